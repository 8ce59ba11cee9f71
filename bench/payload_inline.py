"""One way of bench/payload.py's first part, in a process of its own.

`payload_inline.py <way> <tokens> <count>` decodes `count` single-turn episodes as an orchestrator gets them,
holds them, and prints one JSON line: bytes on the wire, memory held (resident, beyond what was there before),
text, and decode CPU, each per sample.
Inline ways go through verifiers' wire code (DeltaStreamer, EpisodeAssembly, WireEpisode); verifiers has no
field for a head, so the head rides in `trace.info`.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import json
import sys
import time
from pathlib import Path

import msgspec
import numpy as np
import psutil
import verifiers.v1 as vf
from verifiers.v1.episode import WireEpisode
from verifiers.v1.graph import MessageNode
from verifiers.v1.serve.delta import DeltaStreamer, EpisodeAssembly, TraceSummary, dump, pack, unpack
from verifiers.v1.trace import AgentInfo, TraceTask
from verifiers.v1.types import AssistantMessage, UserMessage

from moorage.env.decode import decode_episode
from moorage.payload.codec import encode, nbytes_of
from moorage.payload.custody import Custody
from moorage.records.payload import BranchPayload, NodeSpan, PayloadSlice, TracePayload
from moorage.records.sample import Span, TrainSample
from payload_fetch import make_head_and_routing

CHARS_PER_TOKEN = 4


def make_episode(way: str, tokens: int, number: int) -> vf.Episode:
    """A single-turn episode as its env server would send it."""
    arrays = make_head_and_routing(tokens, seed=number)
    prompt = tokens - arrays.num_trainable
    rng = np.random.default_rng(number)
    letters = rng.integers(97, 123, CHARS_PER_TOKEN * tokens).astype(np.uint8).tobytes().decode()
    question, answer = letters[: CHARS_PER_TOKEN * prompt], letters[CHARS_PER_TOKEN * prompt :]
    nodes = [
        MessageNode(message=UserMessage(content=question)),
        MessageNode(parent=0, message=AssistantMessage(content=answer), sampled=True),
    ]
    trace = vf.Trace(
        task=TraceTask(type="Task", data=vf.TaskData(prompt=question)),
        agent=AgentInfo(config=vf.AgentConfig(), name="agent"),
        nodes=nodes,
        ok=True,
        is_completed=True,
    )
    if way in ("reference", "optional"):
        trace.info["moorage_payload"] = make_record(arrays, number, prompt)
    if way != "reference":
        ids = arrays.token_ids.tolist()
        nodes[0].token_ids, nodes[0].mask = ids[:prompt], [False] * prompt
        nodes[1].token_ids, nodes[1].mask = ids[prompt:], [True] * (tokens - prompt)
        nodes[1].logprobs = arrays.logprobs[prompt:].tolist()
    if way.startswith("inline") and arrays.routed_experts is not None:
        nodes[0].routed_experts = arrays.routed_experts[:prompt]
        nodes[1].routed_experts = arrays.routed_experts[prompt:]
    if way == "inline":
        trace.info["head"] = {"ids": arrays.head_ids, "logprobs": arrays.head_logprobs}
    return vf.Episode(task=trace.task, traces=[trace], ok=True)


def make_record(arrays, number: int, prompt: int):
    tokens = arrays.num_tokens
    spans = (NodeSpan(0, 0, prompt, False, -1, 0), NodeSpan(1, prompt, tokens, True, prompt, tokens - prompt))
    branch = BranchPayload(
        0, f"{number:032x}", tokens, tokens - prompt, tuple(arrays.present()), arrays.routing,
        nbytes_of(encode(arrays)), (3, 4), spans,
    )  # fmt: skip
    record = TracePayload("http://10.11.12.13:43210", "train/bench.node", {"gibberish": False}, (branch,))
    return msgspec.json.decode(msgspec.json.encode(record))


def send(way: str, episode: vf.Episode) -> bytes:
    """What goes over the wire: our reply is one dump, verifiers sends deltas and a head."""
    if way == "reference":
        return pack(dump(episode))
    streamer = DeltaStreamer(lambda: episode.traces, lambda _: asyncio.sleep(0))
    summaries = [
        TraceSummary(id=trace.id, nodes=len(trace.nodes), calls=len(trace.calls)).model_dump()
        for trace in episode.traces
    ]
    deltas = [pack(delta) for _, delta, _ in streamer.diff()]
    return pack([deltas, pack({"head": dump(episode, exclude={"traces"}), "traces": summaries})])


def receive(way: str, data: bytes) -> object:
    """What an orchestrator holds of it: the episode; with references its sample and its custody too."""
    if way == "reference":
        return asyncio.run(decode_episode(data))
    deltas, head = unpack(data)
    assembly = EpisodeAssembly()
    for delta in deltas:
        assembly.apply(unpack(delta))
    reply = unpack(head)
    summaries = [TraceSummary.model_validate(summary) for summary in reply["traces"]]
    return WireEpisode.model_validate(assembly.finish(reply["head"], summaries))


def make_sample(episode, custody: Custody) -> TrainSample:
    record = msgspec.convert(episode.traces[0].info["moorage_payload"], TracePayload)
    branch = record.branches[0]
    piece = PayloadSlice(
        record.url, record.store, branch.id, branch.num_tokens, branch.num_tokens, branch.fields,
        branch.routing, branch.nbytes,
    )  # fmt: skip
    custody.hold(episode.id, [piece], time.time())
    return TrainSample(piece, (Span(branch.spans[1].start, branch.spans[1].stop, 0.5),), "bench")


def main() -> int:
    way, tokens, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    trim = ctypes.CDLL(None).malloc_trim
    held, wire, cpu, custody = [], 0, 0.0, Custody("train_sink")
    receive(way, send(way, make_episode(way, tokens, 0)))  # imports and caches
    wires = Path("/dev/shm" if Path("/dev/shm").is_dir() else "/tmp") / f"bench-inline-{psutil.Process().pid}"
    wires.mkdir()
    try:
        for number in range(count):
            (wires / str(number)).write_bytes(send(way, make_episode(way, tokens, number)))
        gc.collect()
        trim(0)
        before = psutil.Process().memory_info().rss
        for number in range(count):
            data = (wires / str(number)).read_bytes()
            wire += len(data)
            begun = time.process_time()
            episode = receive(way, data)
            cpu += time.process_time() - begun
            held.append((episode, make_sample(episode, custody) if way == "reference" else None))
            del data, episode
    finally:
        for path in wires.iterdir():
            path.unlink()
        wires.rmdir()
    gc.collect()
    trim(0)
    grown = psutil.Process().memory_info().rss - before
    prompt = tokens - make_head_and_routing(tokens).num_trainable
    text = CHARS_PER_TOKEN * (
        tokens + prompt
    )  # the task's prompt is there twice: in the task and as a message
    figures = {
        "wire_bytes": wire / count,
        "held_bytes": grown / count,
        "text_bytes": text,
        "cpu_ms": 1000 * cpu / count,
    }
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
