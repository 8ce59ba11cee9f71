"""A Python "with vLLM installed", as far as `moorage inference` looks at it: a real process, run by a script.

    vllm_like.py -c CODE                          prints a version, as asking the installed one does
    vllm_like.py -m vllm... serve MODEL ...       logs, and behaves as VLLM_LIKE says

VLLM_LIKE: `serve` answers /health; `die` ends with an error while loading; `hang` is never ready; `fall` is
ready and ends with an error a moment later; `deaf` serves and ignores SIGTERM.
"""

from __future__ import annotations

import http.server
import json
import os
import signal
import sys
import threading
import time


class Health(http.server.BaseHTTPRequestHandler):
    """200 to everything."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Silent."""


def serve(argv: list[str], behaviour: str) -> None:
    for number in range(3):
        print(f"INFO loading part {number}", flush=True)
    if behaviour == "die":
        print("ValueError: no such attention backend", flush=True)
        print("RuntimeError: Engine core initialization failed. See root cause above.", flush=True)
        sys.exit(1)
    if behaviour == "hang":
        time.sleep(600)
    port = int(argv[argv.index("--port") + 1])
    if behaviour == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if behaviour == "fall":
        threading.Timer(1.5, fall).start()
    http.server.HTTPServer(("127.0.0.1", port), Health).serve_forever()


def fall() -> None:
    print("torch.OutOfMemoryError: no room for the cache", flush=True)
    os._exit(9)


def main() -> None:
    if sys.argv[1] == "-c":
        print(os.environ.get("VLLM_LIKE_VERSION", "0.33.0"))
        return
    names = ("VLLM_SERVER_DEV_MODE", "MOORAGE_TOKEN", "PYTHONPATH", "VLLM_CPU_KVCACHE_SPACE")
    print("ENV " + json.dumps({name: os.environ.get(name) for name in names}), flush=True)
    print(f"PID {os.getpid()}", flush=True)
    serve(sys.argv, os.environ.get("VLLM_LIKE", "serve"))


if __name__ == "__main__":
    main()
