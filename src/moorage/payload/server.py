"""The payload service as a process of its own, and the handle by which a broker starts it.

`python -m moorage.payload.server --root <spool root> --host <h> --port <p>`, the token in MOORAGE_TOKEN.
It prints `READY <url>` when it listens. Promises:
- fetch traffic never delays dispatch: it runs in this process only;
- it holds nothing that is not in the spool, so it may be killed and started again on the same port;
- it ends on SIGTERM and when its parent is gone;
- a wildcard bind advertises a concrete host.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from moorage.core.errors import PayloadError
from moorage.core.log import get_logger, setup_logging
from moorage.core.net import advertised_host, format_url
from moorage.core.open_files import raise_file_limit
from moorage.core.parent import watch_parent
from moorage.core.secret import TOKEN_VARIABLE
from moorage.payload.connections import Limits, PayloadListener, listen
from moorage.payload.store import Store

log = get_logger(__name__)

_START_TIMEOUT_S = 30.0
_STOP_TIMEOUT_S = 5.0


class PayloadService:
    """Starts, watches and stops the service process. Start it from a thread that lives as long as it should:
    the kernel ends it with the thread that started it."""

    def __init__(
        self,
        spool_root: Path | str,
        host: str = "127.0.0.1",
        port: int = 0,
        token: str = "",
        *,
        log_path: Path | None = None,
    ) -> None:
        """`log_path`: file for its log; None: this process's standard error. `port` 0 chooses one, once."""
        if not token:
            raise PayloadError("the payload service needs a token: it serves nobody without one")
        self.spool_root = Path(spool_root)
        self.host = host
        self.port = port
        self._token = token
        self._log_path = log_path
        self._process: subprocess.Popen[bytes] | None = None
        self._url = ""

    @property
    def url(self) -> str:
        """What others use to reach it. Empty before the first start."""
        return self._url

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process is not None and self._process.poll() is None

    def start(self, timeout_s: float = _START_TIMEOUT_S) -> str:
        """Start it and wait until it listens; its url. Raises PayloadError with what it said last."""
        command = [sys.executable, "-m", "moorage.payload.server"]
        command += ["--root", str(self.spool_root), "--host", self.host, "--port", str(self.port)]
        environment = {**os.environ, TOKEN_VARIABLE: self._token}
        with contextlib.ExitStack() as stack:
            stderr = stack.enter_context(open(self._log_path, "ab")) if self._log_path else None
            self._process = subprocess.Popen(
                [*command, "--parent", str(os.getpid())],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stderr,
            )
        self._url = self._wait_ready(self._process, timeout_s)
        self.port = int(self._url.rsplit(":", 1)[1])
        return self._url

    def _wait_ready(self, process: subprocess.Popen[bytes], timeout_s: float) -> str:
        assert process.stdout is not None
        ready, _, _ = select.select([process.stdout], [], [], timeout_s)
        line = process.stdout.readline().decode().strip() if ready else ""
        process.stdout.close()
        word, _, rest = line.partition(" ")
        if word == "READY":
            return rest
        self.stop()
        raise PayloadError(
            f"payload service on {self.host}:{self.port} did not start: {rest or line or 'no answer'}"
        )

    def stop(self) -> None:
        """End the process; safe to call twice."""
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def restart(self) -> str:
        """End it if it runs and start it again on the same port."""
        self.stop()
        deadline = time.monotonic() + _START_TIMEOUT_S
        while True:
            try:
                return self.start()
            except PayloadError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)

    def __enter__(self) -> PayloadService:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="moorage.payload.server", description="Serves the payloads of one spool."
    )
    parser.add_argument("--root", required=True, help="spool root")
    parser.add_argument("--host", default="127.0.0.1", help="bind host")
    parser.add_argument("--port", type=int, default=0, help="port; 0 chooses one")
    parser.add_argument("--parent", type=int, default=None, help="process to end with")
    parser.add_argument("--max-connections", type=int, default=Limits().max_connections)
    options = parser.parse_args(argv)
    setup_logging("payload")
    token = os.environ.pop(TOKEN_VARIABLE, "")
    if not token:
        print(f"ERROR {TOKEN_VARIABLE} is not set", flush=True)
        return 2
    watch_parent(options.parent)
    raise_file_limit()
    try:
        listener = listen(options.host, options.port)
    except OSError as error:
        print(f"ERROR cannot listen on {options.host}:{options.port}: {error.strerror}", flush=True)
        return 1
    store = Store(options.root)
    service = PayloadListener(store, listener, token, Limits(max_connections=options.max_connections))
    done = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: done.set())
    threading.Thread(target=service.serve, name="payload-accept", daemon=True).start()
    port = listener.getsockname()[1]
    print(f"READY {format_url(advertised_host(options.host), port)}", flush=True)
    done.wait()
    service.close()
    store.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
