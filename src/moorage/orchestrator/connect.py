"""Reaches the env servers of every source, as the launcher or somebody else started them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from moorage.config.env import SourceConfig
from moorage.core.errors import ConfigError, EnvServerError
from moorage.core.log import get_logger
from moorage.core.rundir import PeerWatch, RunDir, read_json
from moorage.env.client import EnvClient, Hello
from moorage.env.replicas import Replicas
from moorage.orchestrator.environments import Environment
from moorage.orchestrator.sources import Source

log = get_logger(__name__)

START_TIMEOUT_S = 600.0
POLL_S = 0.1


@dataclass(frozen=True)
class Identity:
    """Who asks: the run's secret and the attempt."""

    token: str
    run_id: str
    attempt: int


async def connect_source(
    run: RunDir,
    source: Source,
    config: SourceConfig,
    identity: Identity,
    *,
    num_replicas: int,
    watch: PeerWatch,
    adopt: Iterable[str] = (),
) -> tuple[Environment, Hello]:
    """Connect to all servers of a source. Raises EnvServerError when one does not come up, ConfigError when
    an eval source is infinite and says no number."""
    addresses = (
        [config.address] if config.address else await wait_for_addresses(run, source, num_replicas, watch)
    )
    clients = [
        EnvClient(
            address,
            token=identity.token,
            run_id=identity.run_id,
            attempt=identity.attempt,
            source=source.stream,
        )
        for address in addresses
    ]
    replicas = Replicas(clients)
    hello = await replicas.connect(START_TIMEOUT_S, adopt)
    log.info(
        "source %s: %s, %s tasks, %d server(s)", source.stream, hello.env_id, hello.num_tasks, len(clients)
    )
    if source.split == "eval":
        check_eval_size(source, hello)
    return Environment(source, replicas, hello.scores_groups), hello


def check_eval_size(source: Source, hello: Hello) -> int:
    """Tasks of one pass over an eval source."""
    if hello.num_tasks is None and source.num_tasks is None:
        raise ConfigError(
            f"eval source `{source.name}` is infinite; say how many tasks to measure with num_tasks"
        )
    if source.num_tasks is None:
        assert hello.num_tasks is not None
        return hello.num_tasks
    return source.num_tasks if hello.num_tasks is None else min(source.num_tasks, hello.num_tasks)


async def wait_for_addresses(
    run: RunDir, source: Source, num_replicas: int, watch: PeerWatch
) -> Sequence[str]:
    """RPC addresses of `num_replicas` servers. Unblocked by the servers' address files, or the run's end."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        found = read_addresses(run, source)
        if len(found) >= num_replicas:
            return [found[name] for name in sorted(found)]
        watch.check()
        if time.monotonic() > deadline:
            raise EnvServerError(
                "unreachable",
                f"{len(found)} of {num_replicas} env servers of {source.stream} came up within "
                f"{START_TIMEOUT_S:g} s; see {run.logs / 'envs' / source.split}",
            )
        await asyncio.sleep(POLL_S)


def read_addresses(run: RunDir, source: Source) -> dict[str, str]:
    """Store name to RPC address of the source's servers that have published theirs."""
    folder = run.envs / source.split
    found: dict[str, str] = {}
    for path in folder.glob("*.address"):
        if path.name.removesuffix(".address").rpartition(".")[0] != source.name:
            continue
        record: Any = read_json(path)
        if record is not None:
            found[record["store"]] = record["rpc"]
    return found
