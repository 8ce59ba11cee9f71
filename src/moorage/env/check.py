"""`moorage env-server --check`: one task, one episode, shown as a person would want to see it.

It starts the very server that a run would start, asks it as a run would ask, and prints what came back: the
messages of every agent, rewards and metrics, errors, and how long the kept payloads are. It changes nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import verifiers.v1 as vf
from rich.console import Console
from rich.markup import escape
from verifiers.v1.episode import WireEpisode
from verifiers.v1.types import content_text

from moorage.config.env import EnvServerConfig
from moorage.core.errors import EnvServerError
from moorage.core.log import get_logger
from moorage.core.net import node_name
from moorage.core.secret import TOKEN_VARIABLE
from moorage.env.broker import Broker
from moorage.env.client import EnvClient, RolloutCall
from moorage.env.environment import load_environment
from moorage.env.keep import INFO_KEY, read_payload
from moorage.env.process import make_room

RUN_ID = "check"
log = get_logger(__name__)


def run(config: EnvServerConfig, endpoint: str, model: str = "policy", console: Console | None = None) -> int:
    """Sample one task, run one episode against the engine at `endpoint`, print both.

    Returns 0 when the episode is ok, 1 when it is not. Raises ConfigError for an environment that cannot be
    served.
    """
    console = console or Console(soft_wrap=True)
    make_room(config.source.max_concurrent)
    with _scratch(config) as scratch:
        return asyncio.run(_check(scratch, endpoint, model, console))


@contextlib.contextmanager
def _scratch(config: EnvServerConfig) -> Iterator[EnvServerConfig]:
    """The same server with one worker, and with a run folder and a spool that go afterwards."""
    token = os.environ.setdefault(TOKEN_VARIABLE, secrets.token_hex(32))
    with tempfile.TemporaryDirectory(prefix="moorage-check-") as folder:
        yield config.model_copy(
            update={
                "source": config.source.model_copy(update={"num_workers": 1, "max_concurrent": 1}),
                "run_dir": folder,
                "spool_dir": str(Path(folder) / "spool"),
                "run_id": RUN_ID,
                "retain": "fetched",
                "rpc_port": 0,
                "payload_port": 0,
            }
        )
    if os.environ.get(TOKEN_VARIABLE) == token:
        del os.environ[TOKEN_VARIABLE]


async def _check(config: EnvServerConfig, endpoint: str, model: str, console: Console) -> int:
    token = os.environ[TOKEN_VARIABLE]
    environment = load_environment(config)
    broker = Broker(config, token, environment)
    await broker.start()
    serving = asyncio.create_task(broker.wait_stopped())
    source = f"{config.split}/{config.source.name}"
    client = EnvClient(broker.address, token=token, run_id=RUN_ID, attempt=1, source=source)
    try:
        if broker.fatal:
            raise EnvServerError("worker_died", broker.fatal)
        hello = await client.connect(30)
        console.print(
            f"[bold]{escape(hello.env_id)}[/] on {node_name()}: "
            f"{'endless' if hello.num_tasks is None else hello.num_tasks} tasks"
            f"{', scores groups' if hello.scores_groups else ''}"
        )
        sampled = await client.sample(source)
        _show("task", _own_fields(sampled.task["data"]), console)
        sampling = config.source.sampling.model_dump(exclude_none=True) if config.source.sampling else {}
        call = RolloutCall(sampled.task, model, endpoint, None, sampling, config.source.deadline_s)
        if hello.scores_groups:
            episodes = await client.run_group(call, config.source.group_size or 2)
        else:
            episodes = [await client.run_rollout(call)]
        for episode in episodes:
            show_episode(episode, console)
        await client.bye()
        return 0 if all(episode.ok for episode in episodes) else 1
    finally:
        await client.close()
        broker.request_stop()
        await serving


def _own_fields(task: dict[str, Any]) -> dict[str, Any]:
    """What the environment's author wrote: fields that differ from what every task has."""
    usual = vf.TaskData.model_validate({"prompt": None}).model_dump(mode="json")
    return {name: value for name, value in task.items() if value != usual.get(name)}


def show_episode(episode: WireEpisode, console: Console) -> None:
    """Print an episode: per agent the messages, rewards, metrics, errors and payloads."""
    verdict = "[green]ok[/]" if episode.ok else "[red]not ok[/]"
    console.rule(f"episode {episode.id[:8]}: {verdict}")
    for error in episode.errors:
        console.print(f"[red]{escape(error.type)}[/]: {escape(error.message)}")
    for trace in episode.traces:
        trained = "" if trace.agent.trainable else ", not trained"
        console.print(f"\n[bold]{escape(trace.agent.name)}[/]{trained}, stopped by {trace.stop_condition}")
        for node in trace.nodes:
            mark = "[cyan]" if node.sampled else "[dim]"
            text = content_text(getattr(node.message, "content", "") or "")
            console.print(f"  {mark}{escape(node.message.role)}[/]: {escape(text)}")
            for tool in getattr(node.message, "tool_calls", None) or []:
                console.print(f"    [yellow]{escape(tool.name)}[/]({escape(str(tool.arguments))})")
        for error in trace.errors:
            console.print(f"  [red]{escape(error.type)}[/]: {escape(error.message)}")
        _show("rewards", {n: None if r is None else r.value for n, r in trace.rewards.items()}, console)
        _show("metrics", dict(trace.metrics), console)
        _show("info", {n: v for n, v in trace.info.items() if n != INFO_KEY}, console)
        payload = read_payload(cast(vf.Trace, trace))
        for branch in payload.branches if payload else ():
            console.print(
                f"  payload of branch {branch.branch}: {branch.num_tokens} tokens, {branch.num_trainable} "
                f"trained, {branch.nbytes} bytes ({', '.join(branch.fields)})"
            )
        if payload is not None and not payload.branches:
            console.print("  no payload: nothing of this trace is trained")


def _show(title: str, values: dict[str, Any], console: Console) -> None:
    if values:
        shown = ", ".join(f"{escape(str(name))} = {escape(str(value))}" for name, value in values.items())
        console.print(f"  {title}: {shown}")
