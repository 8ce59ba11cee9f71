"""Decode throughput of the built-in engine against transformers' `generate`, on the same prompts in one run.

    python bench/engine.py [--model FOLDER] [--requests 64] [--new-tokens 64] [--repeats 5]

Prints tokens per second of: the scheduler in process, with all requests at once, with `--requests` running at
any time and a new one admitted for each that ends, and with requests that trickle into an empty engine;
`generate` in one batch and one by one (both with log-probabilities, sampled at temperature 1, no early end);
the engine over HTTP from another process. Repetitions of the kinds alternate, the median counts, so that a
busy machine burdens all alike. Ratios are to `generate` in one batch.

Of the replaced requests only the time while all places are taken counts, and the first ones are cut to
lengths that spread their ends evenly: requests are admitted at nearly every step.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import aiohttp
import numpy as np
import torch
from transformers import AutoModelForCausalLM

from moorage.engine.builtin.model import load_runner
from moorage.engine.builtin.request import Request, SamplingParams
from moorage.engine.builtin.scheduler import Limits, Scheduler
from moorage.trainer.starter import make_model_folder

ROUNDS = 4
"""How often each place is filled when ended requests are replaced."""
NUM_ONE_BY_ONE = 4
"""Requests of the one-by-one measurement; its rate does not depend on their number."""


def make_prompts(count: int, seed: int = 0) -> list[list[int]]:
    """Prompts of 4 to 8 letters between the starter tokenizer's role markers, 7 to 11 tokens."""
    rng = np.random.default_rng(seed)
    return [[3, *rng.integers(72, 98, rng.integers(4, 9)).tolist(), 1, 4] for _ in range(count)]


def make_request(index: int, prompt: list[int], new_tokens: int, vocab_size: int) -> Request:
    params = SamplingParams(max_tokens=new_tokens, logprobs=1, ignore_eos=True)
    return Request(
        id=str(index),
        prompt=np.asarray(prompt, dtype=np.int64),
        params=params,
        stop_ids=frozenset(),
        eos_id=None,
        limit=new_tokens,
        seed=index * 7919 + vocab_size,
    )


class InProcess:
    """The scheduler, driven directly."""

    def __init__(self, folder: str, num_requests: int, new_tokens: int) -> None:
        self.scheduler = Scheduler(
            load_runner(folder, device="cpu", dtype="float32"), Limits(num_requests, 512)
        )
        self.new_tokens = new_tokens

    def run(self, prompts: list[list[int]], per_step: int | None = None) -> int:
        """Decode all `prompts`; `per_step`: how many arrive before each step (None: all at once)."""
        requests = [make_request(i, p, self.new_tokens, 128) for i, p in enumerate(prompts)]
        waiting = requests[::-1]
        while waiting or not self.scheduler.idle:
            for _ in range(min(len(waiting), per_step or len(waiting))):
                self.scheduler.add(waiting.pop())
            self.scheduler.step()
        return sum(len(request.out) for request in requests)

    def run_full(self, prompts: list[list[int]]) -> float:
        """Tokens per second with `len(prompts)` running, while an ended one is replaced at once."""
        num, length = len(prompts), self.new_tokens
        lengths = [1 + index * length // num for index in range(num)] + [length] * num * (ROUNDS - 1)
        waiting = [make_request(i, prompts[i % num], n, 128) for i, n in enumerate(lengths)][::-1]
        for _ in range(num):
            self.scheduler.add(waiting.pop())
        before, begin = self.scheduler.totals.generation_tokens, time.perf_counter()
        while waiting:
            for _ in self.scheduler.step()[: len(waiting)]:
                self.scheduler.add(waiting.pop())
        made, took = self.scheduler.totals.generation_tokens - before, time.perf_counter() - begin
        while not self.scheduler.idle:
            self.scheduler.step()
        return made / took


class Generate:
    """transformers' generate with log-probabilities of what it sampled."""

    def __init__(self, folder: str, new_tokens: int) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.new_tokens = new_tokens

    def run(self, prompts: list[list[int]]) -> int:
        width = max(map(len, prompts))
        ids = torch.zeros(len(prompts), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        out = self.model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=self.new_tokens,
            do_sample=True,
            top_k=0,
            eos_token_id=None,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
        logits = torch.stack(out.logits, dim=1)
        new = out.sequences[:, width:]
        logprobs = torch.log_softmax(logits.float(), -1).gather(-1, new[..., None])
        return logprobs.numel()


async def run_http(url: str, prompts: list[list[int]], new_tokens: int) -> int:
    """All prompts at once over HTTP."""
    sampling = {"max_tokens": new_tokens, "logprobs": 1, "ignore_eos": True}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def one(prompt: list[int]) -> int:
            body = {"token_ids": prompt, "sampling_params": sampling}
            async with session.post(f"{url}/inference/v1/generate", json=body) as response:
                response.raise_for_status()
                data = json.loads(await response.read())
                return len(data["choices"][0]["token_ids"])

        return sum(await asyncio.gather(*(one(prompt) for prompt in prompts)))


def start_server(folder: str, num_requests: int, scratch: Path) -> tuple[subprocess.Popen[str], str]:
    """The engine as a process of its own, and its address."""
    config = {
        "inference": {"max_model_len": 512, "max_num_seqs": num_requests, "dtype": "float32"},
        "model": {"path": folder},
    }
    path = scratch / "inference.json"
    path.write_text(json.dumps(config))
    command = [sys.executable, "-m", "moorage.cli.main", "inference", "@", str(path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    line = process.stdout.readline()
    if " at " not in line:
        raise RuntimeError(f"the engine did not start: {line!r}")
    return process, line.split(" at ")[1].strip()


def rate(run: Callable[[], int]) -> Callable[[], float]:
    """Measures the tokens per second of a call that returns its tokens."""

    def measured() -> float:
        begin = time.perf_counter()
        return run() / (time.perf_counter() - begin)

    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=None)
    parser.add_argument("--architecture", default="qwen3")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--no-http", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.model or str(make_model_folder(Path(scratch) / "model", args.architecture))
        measure(args, folder, Path(scratch))


def measure(args: argparse.Namespace, folder: str, scratch: Path) -> None:
    prompts = make_prompts(args.requests)
    engine = InProcess(folder, args.requests, args.new_tokens)
    generate = Generate(folder, args.new_tokens)
    arriving = max(1, args.requests // 32)
    kinds: dict[str, Callable[[], float]] = {
        "generate, one batch": rate(lambda: generate.run(prompts)),
        "engine in process, all at once": rate(lambda: engine.run(prompts)),
        "engine in process, each end replaced": lambda: engine.run_full(prompts),
        f"engine in process, {arriving} arriving per step": rate(lambda: engine.run(prompts, arriving)),
        "generate, one by one": rate(lambda: sum(generate.run([p]) for p in prompts[:NUM_ONE_BY_ONE])),
    }
    server = None
    if not args.no_http:
        server, url = start_server(folder, args.requests, scratch)
        kinds["engine over HTTP, all at once"] = rate(
            lambda: asyncio.run(run_http(url, prompts, args.new_tokens))
        )
    try:
        for run in kinds.values():
            run()
        rates: dict[str, list[float]] = {name: [] for name in kinds}
        for _ in range(args.repeats):
            for name, run in kinds.items():
                rates[name].append(run())
    finally:
        if server is not None:
            server.terminate()
            server.wait(timeout=30)
    report(args, rates)


def report(args: argparse.Namespace, rates: dict[str, list[float]]) -> None:
    base = rates["generate, one batch"]
    print(f"{args.requests} requests x {args.new_tokens} tokens, 1 thread, float32, median of {args.repeats}")
    for name, values in rates.items():
        ratio = statistics.median(value / other for value, other in zip(values, base, strict=True))
        print(
            f"{name:44s} {statistics.median(values):9.0f} tokens/s   x {ratio:.2f} of generate in one batch"
        )


if __name__ == "__main__":
    main()
