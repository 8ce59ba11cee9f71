"""The env server as a process: `moorage env-server`, from its configuration to its exit code.

It serves from when its address file is there until SIGTERM, SIGINT or the end of its parent; then the broker
drains and ends. A failure of the server itself is its last log line and exit code 1. Does not know requests.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
from typing import Any

from moorage.config.env import EnvServerConfig
from moorage.core.collector import settle_collector
from moorage.core.errors import ConfigError
from moorage.core.log import get_logger, setup_logging
from moorage.core.net import node_name
from moorage.core.open_files import raise_file_limit
from moorage.core.parent import watch_parent
from moorage.core.rundir import Heartbeat, RunDir, write_json_atomic
from moorage.core.secret import TOKEN_VARIABLE
from moorage.env.broker import Broker
from moorage.env.environment import load_environment
from moorage.env.nursery import Nursery
from moorage.env.protocol import LEASE_S

FDS_PER_RUN = 3
"""Both ends of a call to the interception server, and the engine's connection."""
FDS_FIXED = 256
log = get_logger(__name__)


def main(config: EnvServerConfig, *, lease_s: float = LEASE_S) -> int:
    """`moorage env-server`: returns the exit code. `lease_s`: a holder silent for so long loses its lease."""
    setup_logging(f"envs/{config.split}/{config.source.name}.{node_name()}")
    watch_parent()
    token = os.environ.get(TOKEN_VARIABLE)
    if not token:
        token = secrets.token_hex(32)
        os.environ[TOKEN_VARIABLE] = token
        print(f"{TOKEN_VARIABLE}={token}  (give it to whoever uses this env server)", flush=True)
    make_room(config.source.max_concurrent)
    nursery = Nursery(config.model_path, config.renderer)
    nursery.start()  # it loads the environment library while this process does
    environment = load_environment(config)
    settle_collector()
    logging.getLogger("verifiers").setLevel("WARNING")
    return asyncio.run(serve(Broker(config, token, environment, nursery, lease_s)))


def make_room(max_concurrent: int) -> None:
    """Allow as many open files as the system does. Raises ConfigError when the runs cannot fit."""
    allowed = raise_file_limit()
    needed = max_concurrent * FDS_PER_RUN + FDS_FIXED
    if allowed is not None and needed > allowed:
        fits = max(1, (allowed - FDS_FIXED) // FDS_PER_RUN)
        raise ConfigError(
            f"max_concurrent = {max_concurrent} needs about {needed} open files in a worker and the system "
            f"allows {allowed}; lower it to {fits}, use more workers, or raise the hard limit (ulimit -Hn)"
        )


async def serve(broker: Broker) -> int:
    """Run one env server until it is told to stop. Returns the exit code."""
    config = broker.config
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda loop, context: _on_bug(broker, loop, context))
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, broker.request_stop)
    run = RunDir(config.run_dir)
    address_file = run.address(config.split, broker.store_name)
    process_name = f"envs/{config.split}/{broker.store_name}"
    await broker.start()
    try:
        with Heartbeat(run, process_name):
            broker.on_ready = lambda: write_json_atomic(address_file, _describe(broker))
            broker.on_ready()
            log.info("serving %s on %s", broker.environment.env_id, broker.address)
            await broker.wait_stopped()
    finally:
        address_file.unlink(missing_ok=True)
    if broker.fatal:
        log.error("%s", broker.fatal)
        return 1
    return 0


def _describe(broker: Broker) -> dict[str, Any]:
    """The address file. The payload url is null until the store has adopted what it has to."""
    store = broker.store
    return {
        "rpc": broker.address,
        "payload": store.url if store.ready else None,
        "spool": store.folder,
        "store": store.name,
        "node": node_name(),
        "pid": os.getpid(),
    }


def _on_bug(broker: Broker, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """An exception that nobody caught is a bug of ours: the server says so and stops."""
    loop.default_exception_handler(context)
    if isinstance(context.get("exception"), Exception):
        broker.fail(f"a bug in the broker: {context['exception']!r}")
