"""Payloads: what a waiting sample costs the orchestrator, how fast a trainer fetches. One run, side by side.

    python bench/payload.py [--tokens 16384] [--blobs 16] [--rounds 5] [--connections 4] [--ray-python PATH]

The shape is the published one (R11): routing 48 layers x 8 experts uint8, a top-128 head, completions of
16k tokens; `--tokens` and `--blobs` scale it, the scale is printed. Four parts:

1. memory and bytes per sample in the orchestrator: references, references for optional arrays only, inline
   (verifiers' own wire code and types);
2. bytes of a batch file per sample;
3. fetch throughput: a raw sendfile socket copy, the payload service, a threaded standard-library HTTP
   server, Ray's object store between two raylets; and on one host, mapped, Ray's shared memory. Rounds are
   interleaved, the first is discarded. On one host every round reads blobs that were just written: moorage's
   over the files of the round before, Ray's where its store puts them;
4. keeping: into new files, and over recycled ones.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean, median

import numpy as np

from moorage.core.errors import PayloadError
from moorage.payload.codec import encode, nbytes_of
from moorage.payload.spool import TMPFS, has_room
from moorage.records.payload import PayloadSlice
from moorage.records.sample import MicroBatch, RankBatch, Span, TrainSample, encode_rank_batch
from payload_fetch import FetchBench, Round, make_head_and_routing

MIB = 1 << 20
FIGURES = ("reference", "optional", "inline_routing", "inline")
LABELS = {
    "reference": "moorage: references only",
    "optional": "references for optional arrays only",
    "inline_routing": "inline, routing rows alone",
    "inline": "inline, routing rows and head",
}


def main() -> int:
    options = parse_options()
    report: dict[str, object] = {"scale": describe_scale(options)}
    report["orchestrator"] = measure_orchestrator(options)
    report["batch_file"] = measure_batch_file(options.tokens)
    report["fetch"] = measure_fetch(options)
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=16_384, help="tokens of a completion")
    parser.add_argument("--blobs", type=int, default=16, help="payloads fetched in one round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--connections", type=int, default=4)
    parser.add_argument("--samples", type=int, default=300, help="waiting samples held by reference")
    parser.add_argument("--inline-samples", type=int, default=12, help="waiting samples held inline")
    parser.add_argument("--ray-python", help="python with ray and numpy; without it Ray is left out")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    return parser.parse_args()


def describe_scale(options: argparse.Namespace) -> dict[str, object]:
    blob = nbytes_of(encode(make_head_and_routing(options.tokens)))
    scale = {"tokens": options.tokens, "blob_mib": blob / MIB, "blobs": options.blobs, "cpus": os.cpu_count()}
    print(f"scale: {options.tokens} tokens, routing 48 x 8 uint8, head 128: {blob / MIB:.1f} MiB a payload;")
    print(
        f"       {options.blobs} payloads a round, {options.connections} connections, {os.cpu_count()} CPUs"
    )
    print(f"       load average before: {os.getloadavg()[0]:.1f}\n")
    return scale


def measure_orchestrator(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Each way in a process of its own, which decodes and holds samples as an orchestrator does."""
    print("what a waiting sample costs the orchestrator (decoded and held)")
    print(f"  {'':38}{'wire':>12}{'held':>12}{'beyond text':>14}{'CPU':>10}{'per 1,000':>12}")
    figures = {}
    for way in FIGURES:
        count = options.samples if way in ("reference",) else options.inline_samples
        command = [sys.executable, str(Path(__file__).with_name("payload_inline.py")), way]
        done = subprocess.run([*command, str(options.tokens), str(count)], capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"payload_inline.py {way} failed:\n{done.stderr[-2000:]}")
        figures[way] = row = json.loads(done.stdout.splitlines()[-1])
        beyond = row["held_bytes"] - row["text_bytes"]
        print(
            f"  {LABELS[way]:38}{row['wire_bytes'] / 1024:9.0f} KiB{row['held_bytes'] / 1024:8.0f} KiB"
            f"{beyond / 1024:10.0f} KiB{row['cpu_ms']:7.2f} ms{row['held_bytes'] * 1000 / MIB:8.0f} MiB"
        )
        row["beyond_text_bytes"] = beyond
    for way in FIGURES[1:]:
        held = figures[way]["held_bytes"] / figures["reference"]["held_bytes"]
        wire = figures[way]["wire_bytes"] / figures["reference"]["wire_bytes"]
        print(f"  {LABELS[way]}: {held:.0f} times the memory, {wire:.0f} times the bytes")
    print()
    return figures


def measure_batch_file(tokens: int) -> dict[str, float]:
    """Bytes per sample and per span of an encoded rank batch."""

    def size(num_spans: int) -> float:
        fields = ("token_ids", "logprobs", "head_ids", "head_logprobs", "routed_experts", "loss_mask")
        url, store = "http://10.11.12.13:43210", "train/reverse_text.node-017"
        piece = PayloadSlice(url, store, "f" * 32, tokens, tokens, fields, (48, 8), 24 * MIB)
        spans = tuple(Span(100 * n, 100 * n + 90, -0.123456 * (n + 1)) for n in range(num_spans))
        sample = TrainSample(piece, spans, "reverse_text", 0.7, "a" * 32, 0, (41, 42))
        micro = tuple(MicroBatch((sample,) * 4) for _ in range(64))
        return len(encode_rank_batch(RankBatch("run", 1, 42, 41, 0, 1, micro))) / 256

    none, many = size(0), size(50)
    print(
        f"batch file: {none:.0f} bytes a sample and {(many - none) / 50:.1f} bytes a span (aims: 1024, 24)\n"
    )
    return {"sample_bytes": none, "span_bytes": (many - none) / 50}


def measure_fetch(options: argparse.Namespace) -> dict[str, object]:
    needed = 4 * options.blobs * nbytes_of(encode(make_head_and_routing(options.tokens)))
    base = TMPFS if has_room(TMPFS, needed) else None
    folder = Path(tempfile.mkdtemp(prefix="bench-payload-", dir=base))
    try:
        with FetchBench(folder, options.tokens, options.blobs, options.connections) as bench:
            rounds = {name: [] for name in bench.ways}
            keeps = {name: [] for name in bench.keeps}
            for _ in range(options.rounds + 1):
                for name in bench.ways:
                    rounds[name].append(bench.time_fetch(name))
                for name in bench.keeps:
                    keeps[name].append(bench.time_keep(name))
            # The first round warms everything up, Ray's too.
            speeds = {name: [each.gb_per_s for each in values[1:]] for name, values in rounds.items()}
            cpu = {name: mean_cpu(values[1:]) for name, values in rounds.items()}
            keeps = {name: values[1:] for name, values in keeps.items()}
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    skipped = None
    if options.ray_python:
        try:
            speeds |= run_ray(options)
        except PayloadError as error:
            skipped = str(error)
    else:
        skipped = "--ray-python was not given"
    print_speeds(speeds, cpu)
    if skipped:
        print(f"  Ray: skipped, {skipped}")
    print_keeps(keeps)
    print(f"  load average after: {os.getloadavg()[0]:.1f}, numpy {np.__version__}")
    return {"gb_per_s": speeds, "cpu_s_per_gb": cpu, "keep_gb_per_s": keeps, "ray_skipped": skipped}


def run_ray(options: argparse.Namespace) -> dict[str, list[float]]:
    nbytes = nbytes_of(encode(make_head_and_routing(options.tokens)))
    command = [options.ray_python, str(Path(__file__).with_name("payload_ray.py"))]
    command += [str(nbytes), str(options.blobs), str(options.rounds), str(options.connections)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        raise PayloadError(f"its process ended with {done.returncode}: {done.stderr.strip()[-300:]}")
    return json.loads(lines[-1])


def mean_cpu(rounds: list[Round]) -> list[float]:
    """Seconds a GB of client and server."""
    return [mean(each.client_s for each in rounds), mean(each.server_s for each in rounds)]


def print_speeds(speeds: dict[str, list[float]], cpu: dict[str, list[float]]) -> None:
    raw = median(speeds["raw sendfile copy"])
    print("fetch, all into the same memory: GB/s, and processor seconds a GB at both ends")
    print(f"  {'':40}{'median':>8}{'best':>8}{'worst':>8}{'of raw':>8}{'client':>8}{'server':>8}")
    for name, values in speeds.items():
        figures = median(values), max(values), min(values), median(values) / raw, *cpu.get(name, ())
        print(f"  {name:40}" + "".join(f"{figure:8.2f}" for figure in figures))


def print_keeps(keeps: dict[str, list[float]]) -> None:
    print("\nkeep, one thread, GB/s")
    for name, values in keeps.items():
        print(f"  {name:38}{median(values):9.2f}{max(values):9.2f}{min(values):9.2f}")


if __name__ == "__main__":
    sys.exit(main())
