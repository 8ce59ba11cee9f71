"""Admission, ending, prefixes and changes of weights, on a real tiny model."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from moorage.core.errors import EngineError
from moorage.engine.builtin.request import Request, SamplingParams
from moorage.engine.builtin.scheduler import Scheduler
from tests.unit.engine.builtin import reference as ref

SMALL = {"num_hidden_layers": 2, "hidden_size": 32, "head_dim": 8, "intermediate_size": 32}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two versions of one model."""
    root = tmp_path_factory.mktemp("versions")
    return [ref.make_folder(root / str(seed), "qwen3", seed=seed, **SMALL) for seed in (0, 1)]


@pytest.fixture
def scheduler(folders: list[Path]) -> Scheduler:
    return ref.make_scheduler(folders[0], slots=8)


def sampled(tokens: int, **more: object) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, logprobs=0, **more)


def assert_empty(scheduler: Scheduler) -> None:
    assert scheduler.running == []
    assert not scheduler.waiting
    assert scheduler.idle
    assert scheduler.all_ids() == []
    assert scheduler.cache_share() == 0


def test_a_thousand_random_starts_cancels_and_ends_leave_nothing_behind(scheduler: Scheduler) -> None:
    rng = np.random.default_rng(0)
    started: dict[str, Request] = {}
    ended: Counter[str] = Counter()
    while len(started) < 1000 or not scheduler.idle:
        if len(started) < 1000 and rng.random() < 0.7:
            request = ref.make_request(
                f"r{len(started)}",
                rng.integers(0, 96, rng.integers(1, 30)),
                sampled(int(rng.integers(1, 12))),
            )
            started[request.id] = request
            scheduler.add(request)
        open_ids = scheduler.all_ids()
        if open_ids and rng.random() < 0.25:
            for request in scheduler.abort([open_ids[int(rng.integers(len(open_ids)))], "unknown"]):
                ended[request.id] += 1
                assert request.finish_reason == "abort"
        if rng.random() < 0.02:
            scheduler.preempt()
        if rng.random() < 0.6 or len(started) == 1000:
            ended.update(request.id for request in scheduler.step())
    assert set(ended) == set(started)
    assert set(ended.values()) == {1}
    assert_empty(scheduler)
    reasons = Counter(request.finish_reason for request in started.values())
    assert reasons["abort"] > 50
    assert reasons["length"] > 500


def test_an_aborted_request_is_gone_before_the_next_step(scheduler: Scheduler) -> None:
    requests = [ref.make_request(f"r{i}", [5 + i, 6], sampled(50), seed=i) for i in range(5)]
    for request in requests:
        scheduler.add(request)
    scheduler.step()
    scheduler.step()
    (gone,) = scheduler.abort(["r1"])
    assert gone.finish_reason == "abort"
    assert len(gone.out) == 2
    assert [request.id for request in scheduler.running] == ["r0", "r4", "r2", "r3"]
    ref.run_all(scheduler, [])
    reference = ref.Reference(Path(scheduler.runner.model.config._name_or_path))
    for request in requests:
        ref.assert_exact(reference, request)


def test_a_reload_amid_64_running_requests_loses_none_and_labels_each_token(folders: list[Path]) -> None:
    scheduler = ref.make_scheduler(folders[0], slots=64)
    rng = np.random.default_rng(1)
    requests = [
        ref.make_request(f"r{i}", rng.integers(0, 96, rng.integers(9, 20)), sampled(24), seed=i)
        for i in range(72)
    ]
    for request in requests:
        scheduler.add(request)
    scheduler.label = "3"
    for _ in range(7):
        scheduler.step()
    assert len(scheduler.running) == 64
    scheduler.preempt()
    scheduler.reload(folders[1])
    scheduler.label = "4"
    ref.run_all(scheduler, [])
    old, new = ref.Reference(folders[0]), ref.Reference(folders[1])
    for index, request in enumerate(requests):
        assert len(request.out) == 24
        expected = [("3", 0, 7), ("4", 7, 24)] if index < 64 else [("4", 0, 24)]
        assert request.spans() == expected
        values = np.empty(24)
        for (_, start, end), model in zip(expected, (old, new)[-len(expected) :], strict=True):
            values[start:end] = drawn_logprobs(model, request)[start:end]
        np.testing.assert_allclose(request.logprobs, values, atol=ref.CLOSE, rtol=0)


def drawn_logprobs(model: ref.Reference, request: Request) -> np.ndarray:
    return model.truth(request).logprobs[np.arange(len(request.out)), request.out]


def test_no_later_request_reads_a_block_of_older_weights(folders: list[Path]) -> None:
    scheduler = ref.make_scheduler(folders[0], slots=4)
    prompt = list(range(2, 42))
    first = ref.make_request("a", prompt, sampled(4))
    ref.run_all(scheduler, [first])
    again = ref.make_request("b", prompt, sampled(4))
    ref.run_all(scheduler, [again])
    assert again.cached_tokens == 39
    kept = ref.make_request("kept", prompt[:20], sampled(30))
    scheduler.add(kept)
    scheduler.step()
    scheduler.reload(folders[1])  # not paused, cache kept: what runs goes on with the keys it has
    later = ref.make_request("c", prompt, sampled(4))
    ref.run_all(scheduler, [later])
    assert later.cached_tokens == 0
    ref.assert_exact(ref.Reference(folders[1]), later)
    follow = ref.make_request("d", [*prompt[:20], *kept.out], sampled(2))
    ref.run_all(scheduler, [follow])
    assert follow.cached_tokens < len(prompt[:20]) + 8, "keys of two versions were taken over"
    ref.assert_exact(ref.Reference(folders[1]), follow)


def test_a_continued_conversation_feeds_only_its_new_part(folders: list[Path]) -> None:
    scheduler = ref.make_scheduler(folders[0], slots=4)
    turn = ref.make_request("a", list(range(3, 30)), sampled(10), salt="7")
    ref.run_all(scheduler, [turn])
    known = [*turn.prompt.tolist(), *turn.out]
    second = ref.make_request("b", [*known, 50, 51], sampled(5), salt="7")
    other = ref.make_request("c", [*known, 50, 51], sampled(5), salt="8")
    ref.run_all(scheduler, [second, other])
    assert second.cached_tokens == len(known) - 1  # the last drawn token was never fed
    assert other.cached_tokens == 0
    reference = ref.Reference(folders[0])
    ref.assert_exact(reference, second)
    ref.assert_exact(reference, other)


def test_siblings_with_a_long_prompt_feed_it_once(folders: list[Path]) -> None:
    scheduler = ref.make_scheduler(folders[0], slots=8)
    prompt = list(range(2, 90))
    group = [ref.make_request(f"r{i}", prompt, sampled(3), seed=i) for i in range(8)]
    ref.run_all(scheduler, group)
    assert sum(request.cached_tokens for request in group) == 7 * 87
    for request in group:
        ref.assert_exact(ref.Reference(folders[0]), request)


def test_routing_rows_survive_prefix_reuse_and_recomputation(tmp_path: Path) -> None:
    folder = ref.make_folder(tmp_path / "model", "qwen3_moe")
    scheduler = ref.make_scheduler(folder, routing=True)
    turn = ref.make_request("a", list(range(3, 30)), sampled(6))
    ref.run_all(scheduler, [turn])
    known = [*turn.prompt.tolist(), *turn.out]
    second = ref.make_request("b", [*known, 50, 51], sampled(8, routed_experts_prompt_start=len(known) - 1))
    scheduler.add(second)
    for _ in range(3):
        scheduler.step()
    scheduler.preempt()
    ref.run_all(scheduler, [])
    whole = ref.make_request("c", [*known, 50, 51], sampled(1))
    ref.run_all(scheduler, [whole])
    assert whole.cached_tokens > 30
    reference = ref.Reference(folder)
    ref.assert_routing(reference, second)
    ref.assert_routing(reference, whole)


def test_rows_of_tokens_drawn_before_a_reload_stay_those_that_drew_them(tmp_path: Path) -> None:
    folders = [ref.make_folder(tmp_path / str(seed), "qwen3_moe", seed=seed) for seed in (0, 1)]
    scheduler = ref.make_scheduler(folders[0], routing=True)
    request = ref.make_request("a", [5, 6, 7, 8, 9], sampled(8))
    scheduler.add(request)
    for _ in range(4):
        scheduler.step()
    scheduler.preempt()
    scheduler.reload(folders[1])
    ref.run_all(scheduler, [])
    fed = np.concatenate([request.prompt, np.asarray(request.out[:-1])])
    old, new = (ref.Reference(folder).choices(fed)[0] for folder in folders)
    rows = request.routed_experts
    assert rows is not None
    np.testing.assert_array_equal(rows[:8], old[:8])
    np.testing.assert_array_equal(rows[8:], new[8:])
    assert (old[:8] != new[:8]).any()


def test_a_seed_gives_the_same_tokens_whatever_runs_beside_it(folders: list[Path]) -> None:
    def run(neighbours: int, preempt_after: int | None = None) -> list[int]:
        scheduler = ref.make_scheduler(folders[0], slots=8)
        request = ref.make_request("a", [7, 8, 9], sampled(20, seed=11))
        for index in range(neighbours):
            scheduler.add(ref.make_request(f"n{index}", [index + 2] * (index + 1), sampled(30), seed=index))
        scheduler.add(request)
        for step in range(40):
            if step == preempt_after:
                scheduler.preempt()
            scheduler.step()
        return request.out

    alone = run(0)
    assert run(6) == alone
    assert run(3, preempt_after=9) == alone


def test_stop_ids_end_a_request_but_not_before_min_tokens(scheduler: Scheduler) -> None:
    every = frozenset(range(96))
    first = ref.make_request("a", [5], sampled(9), stop_ids=every, eos_id=1)
    ref.run_all(scheduler, [first])
    assert len(first.out) == 1
    assert first.finish_reason == "stop"
    assert first.stop_reason == (None if first.out[0] == 1 else first.out[0])
    some = frozenset(range(48))
    later = ref.make_request("b", [5], sampled(60, min_tokens=5), stop_ids=some)
    ref.run_all(scheduler, [later])
    assert len(later.out) > 5
    assert not some.intersection(later.out[:5])
    assert later.out[-1] in some


def test_prompts_beyond_the_feeding_budget_are_fed_over_several_steps(folders: list[Path]) -> None:
    scheduler = ref.make_scheduler(folders[0], slots=8)
    scheduler.limits = type(scheduler.limits)(8, 128, prefill_tokens=64)
    rng = np.random.default_rng(3)
    requests = [ref.make_request(f"r{i}", rng.integers(0, 96, 50), sampled(3), seed=i) for i in range(4)]
    for request in requests:
        scheduler.add(request)
    scheduler.step()
    assert len(scheduler.running) == 1
    ref.run_all(scheduler, [])
    for request in requests:
        ref.assert_exact(ref.Reference(folders[0]), request)


def test_a_reload_that_fails_changes_nothing(folders: list[Path], tmp_path: Path) -> None:
    scheduler = ref.make_scheduler(folders[0], slots=4)
    other = ref.make_folder(tmp_path / "wide", "qwen3", **{**SMALL, "hidden_size": 40})
    request = ref.make_request("a", list(range(2, 22)), sampled(12))
    scheduler.add(request)
    for _ in range(3):
        scheduler.step()
    with pytest.raises(EngineError, match="the served model has"):
        scheduler.reload(other)
    ref.run_all(scheduler, [])
    ref.assert_exact(ref.Reference(folders[0]), request)
    assert scheduler.epoch == 0
