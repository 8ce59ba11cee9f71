"""The process of the built-in engine: an HTTP server in vLLM 0.33's form around one engine thread.

Loops: the event loop serves HTTP; the engine thread computes. The process ends on SIGTERM or SIGINT (code
0) and when the engine thread dies (code 1, its error printed). The control routes are unprotected, as
vLLM's are: it binds to loopback unless told otherwise, and says so when it is.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

from moorage.config.run import InferenceProcessConfig
from moorage.core import net
from moorage.core.collector import settle_collector
from moorage.core.errors import ConfigError
from moorage.core.log import get_logger, setup_logging
from moorage.core.parent import watch_parent
from moorage.core.rundir import Heartbeat, RunDir

log = get_logger(__name__)
DEFAULT_MODEL_LEN = 2048
LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})
SWITCH_INTERVAL_S = 0.001
SHUTDOWN_S = 2.0


def main(config: InferenceProcessConfig) -> int:
    """Serve until told to stop. Exit code 0 on an orderly stop, 1 when the engine died, 2 for a bad
    config."""
    setup_logging(config.name)
    watch_parent()
    os.environ.setdefault("OMP_NUM_THREADS", str(config.inference.num_threads))
    heartbeat = Heartbeat(RunDir(config.run_dir), config.name).start() if config.run_dir else None
    try:
        return asyncio.run(serve(config))
    except ConfigError as error:
        log.error("%s", error)
        return 2
    finally:
        if heartbeat is not None:
            heartbeat.stop()


async def serve(config: InferenceProcessConfig) -> int:
    """Load, bind, serve until a signal or the engine's death."""
    inference = config.inference
    check_start(config)  # before the costly imports
    from aiohttp import web

    from moorage.engine.builtin.routes import make_app

    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    service = make_service(config)
    app = make_app(service)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=SHUTDOWN_S)
    await runner.setup()
    try:
        await _bind(runner, inference.host, inference.port)
        port = runner.addresses[0][1]
        if inference.host not in LOOPBACK:
            log.warning(
                "bound to %s: the control routes are unprotected; keep this network private", inference.host
            )
        print(f"inference engine at {net.format_url(net.advertised_host(inference.host), port)}", flush=True)
        settle_collector()
        stopped = asyncio.create_task(stop.wait())
        await asyncio.wait({stopped, service.engine.failed}, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        return 1 if service.engine.failed.done() else 0
    finally:
        await runner.cleanup()


def check_start(config: InferenceProcessConfig) -> None:
    """What can be refused without loading anything. Raises ConfigError."""
    host, port = config.inference.host, config.inference.port
    if port and not net.is_port_free(host, port):
        raise ConfigError(f"inference.port {port} on {host} is in use; choose another, or 0")
    if not (Path(config.model.path) / "config.json").is_file():
        raise ConfigError(
            f"model.path {config.model.path!r} holds no config.json; give a folder in Hugging Face layout"
        )


async def _bind(runner, host: str, port: int) -> None:
    from aiohttp import web

    try:
        await web.TCPSite(runner, host, port, backlog=4096).start()
    except OSError as error:
        raise ConfigError(
            f"cannot bind {host}:{port} ({error.strerror}); choose another inference.port"
        ) from None


def make_service(config: InferenceProcessConfig):
    """The loaded model and its engine. Raises ConfigError."""
    import torch

    from moorage.engine.builtin.model import load_runner
    from moorage.engine.builtin.scheduler import PREFIX_BYTES, Limits, Scheduler
    from moorage.engine.builtin.service import Service, end_tokens, load_tokenizer

    inference, model = config.inference, config.model
    torch.set_num_threads(inference.num_threads)
    dtype = model.dtype if inference.dtype == "auto" else inference.dtype
    runner = load_runner(
        model.path, device=inference.device, dtype=dtype, routed_experts=bool(inference.routed_experts)
    )
    longest = runner.max_positions
    max_model_len = inference.max_model_len or min(longest or DEFAULT_MODEL_LEN, DEFAULT_MODEL_LEN)
    if longest and max_model_len > longest:
        raise ConfigError(
            f"inference.max_model_len {max_model_len} is above the model's max_position_embeddings {longest}"
            f"; set it, or seq_len, which it follows when it is not set, to {longest} or less"
        )
    prefix_bytes = PREFIX_BYTES if inference.enable_prefix_caching else 0
    limits = Limits(inference.max_num_seqs, max_model_len, prefix_bytes=prefix_bytes)
    tokenizer = load_tokenizer(model.path)
    return Service(
        scheduler=Scheduler(runner, limits),
        name=model.name,
        path=model.path,
        max_model_len=max_model_len,
        sampling_mask=bool(inference.sampling_mask),
        seed=inference.seed or 0,
        tokenizer=tokenizer,
        eos_ids=end_tokens(model.path, runner.model.config, tokenizer),
    )
