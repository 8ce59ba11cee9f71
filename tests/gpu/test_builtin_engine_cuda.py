"""The built-in engine on a CUDA device against plain forwards on the CPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tests.unit.engine.builtin import reference as ref

from moorage.engine.builtin.model import load_runner
from moorage.engine.builtin.request import SamplingParams
from moorage.engine.builtin.scheduler import Limits, Scheduler

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_logprobs_on_a_device_are_those_of_a_plain_forward(tmp_path: Path, family: str) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    folder = ref.make_folder(tmp_path / "model", family)
    runner = load_runner(str(folder), device="cuda", dtype="float32", routed_experts=family in ref.MOE)
    scheduler = Scheduler(runner, Limits(16, 128))
    rng = np.random.default_rng(0)
    params = [
        SamplingParams(max_tokens=8, logprobs=5, temperature=t, top_k=k) for t in (0, 1.0) for k in (0, 7)
    ]
    requests = [
        ref.make_request(f"r{i}", rng.integers(0, 96, rng.integers(1, 40)), params[i % 4], seed=i)
        for i in range(40)
    ]
    ref.run_all(scheduler, requests, per_step=3)
    reference = ref.Reference(folder)
    for request in requests:
        ref.assert_exact(reference, request)
        if family in ref.MOE:
            ref.assert_routing(reference, request)
