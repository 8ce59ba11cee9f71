"""Nothing per token crosses the middle: every reply and batch record of a real job is walked (R1, R2)."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest

from moorage.records.sample import RankBatch, decode_rank_batch
from tests.flow.jobs import Keeper, start_job, wait_until
from tests.flow.recorder import Recorder

STEPS = 3


@dataclass
class Evidence:
    """What crossed the middle in one job: decoded replies, their sizes, batch records."""

    replies: list[Any] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    batches: list[RankBatch] = field(default_factory=list)
    exit_code: int = -1
    server_code: int | None = None
    """Of the external env server, that is told to stop after the job; None: it was not alive any more."""

    @property
    def episodes(self) -> list[tuple[dict[str, Any], int]]:
        """Decoded episodes, each with the size of its reply."""
        both = zip(self.replies, self.sizes, strict=True)
        return [(reply, size) for reply, size in both if isinstance(reply, dict) and reply.get("traces")]


def record_job(folder: Path, model: Path, *args: str) -> Evidence:
    """A job whose env server is reached through a recorder."""
    token = secrets.token_hex(32)
    dry = start_job(folder, model, *args, "--dry-run", max_steps=STEPS)
    assert dry.finish()[0] == 0
    (config,) = (folder / "runs" / "job" / "configs" / "envs" / "train").iterdir()
    server_dir = folder / "server"
    command = [sys.executable, "-m", "moorage.cli.main", "env-server", "@", str(config)]
    command += ["--run_id", "", "--run_dir", str(server_dir)]
    env = {**os.environ, "MOORAGE_TOKEN": token}
    log = open(folder / "server.log", "w")  # noqa: SIM115 - closed at the end of this function
    server = subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT, cwd=folder)
    evidence = Evidence()
    try:
        addresses = server_dir / "envs" / "train"
        wait_until(lambda: list(addresses.glob("*.address")) or server.poll() is not None, 90.0)
        (address,) = addresses.glob("*.address")
        host, _, port = json.loads(address.read_text())["rpc"].removeprefix("tcp://").partition(":")
        recorder = Recorder(host, int(port))
        shutil.rmtree(folder / "runs")
        os.environ["MOORAGE_TOKEN"] = token
        try:
            through = f"tcp://127.0.0.1:{recorder.port}"
            job = start_job(folder, model, *args, "--orchestrator.train.0.address", through, max_steps=STEPS)
        finally:
            del os.environ["MOORAGE_TOKEN"]
        keeper = Keeper(job.run.batches, ("step_*/rank_*.msgpack",), folder / "kept")
        try:
            evidence.exit_code, out, err = job.finish(180.0)
            assert evidence.exit_code == 0, f"{out}\n{err}"
        finally:
            job.end()
            evidence.batches = [decode_rank_batch(path.read_bytes()) for path in keeper.stop()]
            recorder.close()
    finally:
        alive = server.poll() is None
        server.terminate()
        code = server.wait(30)
        log.close()
    evidence.server_code = code if alive else None
    for frames in recorder.messages():
        if len(frames) == 3 and frames[1] == b"reply":
            evidence.replies.append(msgspec.msgpack.decode(frames[2]))
            evidence.sizes.append(len(frames[2]))
    return evidence


@pytest.fixture(scope="module")
def evidence(tmp_path_factory: pytest.TempPathFactory, dense_model: Path) -> Evidence:
    return record_job(tmp_path_factory.mktemp("references"), dense_model)


def find_arrays(value: Any, longest: int, where: str = "") -> Iterator[str]:
    """Paths of binary values, and of sequences of numbers longer than `longest`; `spans` are exempt."""
    if isinstance(value, bytes | bytearray | memoryview):
        yield f"{where}: {len(value)} bytes"
    elif isinstance(value, dict):
        for key, inner in value.items():
            if key != "spans":
                yield from find_arrays(inner, longest, f"{where}.{key}")
    elif isinstance(value, list | tuple):
        if len(value) > longest and all(isinstance(x, int | float) for x in value):
            yield f"{where}: {len(value)} numbers"
        for index, inner in enumerate(value):
            yield from find_arrays(inner, longest, f"{where}[{index}]")


def most_nodes(episode: dict[str, Any]) -> int:
    return max(len(trace["nodes"]) for trace in episode["traces"])


def test_the_job_went_through_the_recorder(evidence: Evidence) -> None:
    assert len(evidence.episodes) >= STEPS * 8
    assert len(evidence.batches) == STEPS
    for episode, _ in evidence.episodes:
        for trace in episode["traces"]:
            assert trace["info"]["moorage_payload"]["branches"]


def test_the_env_server_that_somebody_else_runs_outlives_the_job(evidence: Evidence) -> None:
    assert evidence.server_code == 0


def test_no_reply_holds_an_array(evidence: Evidence) -> None:
    for episode, _ in evidence.episodes:
        assert list(find_arrays(episode, most_nodes(episode))) == []


def test_no_batch_record_holds_an_array(evidence: Evidence) -> None:
    for batch in evidence.batches:
        plain = msgspec.to_builtins(batch)
        for micro in plain["micro_batches"]:
            for sample in micro["samples"]:
                spans = sample.pop("spans")
                assert len(spans) <= 8
                assert list(find_arrays(sample, 4)) == []


@pytest.mark.parametrize("planted", [[0.5] * 40, b"\0" * 40, [[1, 2, 3, 4] * 10]])
def test_an_array_planted_in_a_reply_is_found(evidence: Evidence, planted: Any) -> None:
    episode = json.loads(json.dumps(evidence.episodes[0][0]))
    episode["traces"][0]["nodes"][-1]["logprobs"] = planted
    assert list(find_arrays(episode, most_nodes(episode)))


def text_bytes(value: Any) -> int:
    """Bytes of all text in a value."""
    if isinstance(value, str):
        return len(value.encode())
    if isinstance(value, dict):
        return sum(text_bytes(inner) for inner in value.values())
    return sum(text_bytes(inner) for inner in value) if isinstance(value, list) else 0


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_completions_ten_times_longer_add_only_their_text(
    evidence: Evidence, tmp_path: Path, dense_model: Path
) -> None:
    long = record_job(
        tmp_path, dense_model, "--orchestrator.sampling.max_tokens", "80", "--inference.max_model_len", "128"
    )

    def beside_text(found: Evidence) -> list[int]:
        return [size - text_bytes(episode) for episode, size in found.episodes]

    short_text = max(text_bytes(episode) for episode, _ in evidence.episodes)
    long_text = max(text_bytes(episode) for episode, _ in long.episodes)
    assert long_text > short_text + 40
    assert max(beside_text(long)) < max(beside_text(evidence)) + 100
