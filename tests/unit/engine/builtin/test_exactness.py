"""The engine's numbers against plain forwards of the same weights (R31, R32)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from moorage.engine.builtin.request import Request, SamplingParams
from tests.unit.engine.builtin import reference as ref

MODES = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.6},
    {"temperature": 1.0, "top_k": 5},
    {"temperature": 1.2, "top_p": 0.8},
    {"temperature": 0.9, "min_p": 0.1},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    {"temperature": 1.0, "top_k": 1},
)
HEADS = (None, 0, 1, 5, 64)


def make_requests(count: int, vocab: int, seed: int) -> list[Request]:
    """Random prompts, a third of them continuing an earlier one, through every mode and head size."""
    rng = np.random.default_rng(seed)
    prompts: list[np.ndarray] = []
    requests = []
    for index in range(count):
        prompt = rng.integers(0, vocab, rng.integers(1, 40))
        if prompts and rng.random() < 0.35:
            prompt = np.concatenate([prompts[rng.integers(len(prompts))], prompt[: rng.integers(1, 12)]])[:80]
        prompts.append(prompt)
        params = SamplingParams(
            max_tokens=int(rng.integers(1, 14)),
            logprobs=HEADS[int(rng.integers(len(HEADS)))],
            routed_experts_prompt_start=int(rng.integers(0, len(prompt) + 1)),
            **MODES[index % len(MODES)],
        )
        requests.append(ref.make_request(f"r{index}", prompt, params, seed=int(rng.integers(2**40))))
    return requests


def again(request: Request) -> Request:
    """The same request, not yet run."""
    return ref.make_request(request.id, request.prompt, request.params, seed=request.seed)


def assert_same(one: Request, other: Request, truth: ref.Truth) -> None:
    """Values equal within 1e-5; ids too, up to where a deciding gap was smaller than that."""
    for at, (left, right) in enumerate(zip(one.out, other.out, strict=True)):
        if left != right:
            mass = np.exp(truth.logprobs[at])
            between = mass.cumsum()[min(left, right) : max(left, right)]
            assert np.ptp(between) < 1e-5 or abs(mass[left] - mass[right]) < 1e-5
            return
        assert abs(one.logprobs[at] - other.logprobs[at]) < 1e-5
        if one.head_logprobs:
            left_head, right_head = one.head_logprobs[at], other.head_logprobs[at]
            real = np.isfinite(left_head)
            np.testing.assert_allclose(left_head[real], right_head[real], atol=1e-5, rtol=0)


@pytest.mark.parametrize(("family", "routing"), [("qwen3", False), ("qwen3_moe", True)])
def test_two_hundred_random_requests_agree_with_a_plain_forward(
    tmp_path: Path, family: str, routing: bool
) -> None:
    folder = ref.make_folder(tmp_path / "model", family)
    reference = ref.Reference(folder)
    requests = make_requests(200, ref.TINY["vocab_size"], seed=1)
    scheduler = ref.make_scheduler(folder, slots=24, routing=routing)
    ref.run_all(scheduler, requests, per_step=3)
    assert scheduler.totals.cached_tokens > 200, "no prefix was ever reused"
    for request in requests:
        assert len(request.out) == request.params.max_tokens
        ref.assert_exact(reference, request)
        if routing:
            ref.assert_routing(reference, request)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_values_do_not_depend_on_what_else_is_in_the_batch(tmp_path: Path, family: str) -> None:
    folder = ref.make_folder(tmp_path / "model", family)
    reference = ref.Reference(folder)
    crowd = make_requests(80, ref.TINY["vocab_size"], seed=2)
    ref.run_all(ref.make_scheduler(folder, slots=32), crowd, per_step=5)
    alone = [again(request) for request in crowd]
    scheduler = ref.make_scheduler(folder, slots=1)
    for request in alone:
        scheduler.prefixes.clear()
        ref.run_all(scheduler, [request])
    for one, other in zip(crowd, alone, strict=True):
        assert_same(one, other, reference.truth(one))


@pytest.mark.parametrize("family", sorted(ref.FAMILIES))
def test_every_family_agrees_with_its_plain_forward(tmp_path: Path, family: str) -> None:
    folder = ref.make_folder(tmp_path / "model", family)
    reference = ref.Reference(folder)
    routing = family in ref.MOE
    requests = make_requests(24, ref.TINY["vocab_size"], seed=3)
    ref.run_all(ref.make_scheduler(folder, routing=routing), requests, per_step=2)
    for request in requests:
        ref.assert_exact(reference, request)
        if routing:
            ref.assert_routing(reference, request)


def test_dense_layers_of_a_mixture_of_experts_have_zero_rows(tmp_path: Path) -> None:
    folder = ref.make_folder(tmp_path / "model", "qwen3_moe", mlp_only_layers=[1])
    request = ref.make_request("a", [5, 6, 7, 8], SamplingParams(max_tokens=4))
    ref.run_all(ref.make_scheduler(folder, routing=True), [request])
    rows = request.routed_experts
    assert rows is not None
    assert rows.shape == (7, 3, 2)
    assert not rows[:, 1].any()
    assert rows[:, 0].any()
    assert rows[:, 2].any()


def test_more_than_256_experts_are_reported_in_two_bytes(tmp_path: Path) -> None:
    folder = ref.make_folder(
        tmp_path / "model", "qwen3_moe", num_experts=300, moe_intermediate_size=4, num_hidden_layers=2
    )
    reference = ref.Reference(folder)
    request = ref.make_request("a", list(range(5, 60)), SamplingParams(max_tokens=4))
    ref.run_all(ref.make_scheduler(folder, routing=True), [request])
    rows = request.routed_experts
    assert rows is not None
    assert rows.dtype == np.uint16
    assert rows.max() > 255
    chosen, gaps = reference.choices(np.concatenate([request.prompt, np.asarray(request.out[:-1])]))
    sure = gaps > ref.GAP
    np.testing.assert_array_equal(rows[sure], chosen[sure])
