"""The feed of one data rank, on a real payload store."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from moorage.core.errors import ExchangeError, RunEnded
from moorage.core.rundir import write_end
from moorage.payload.client import PayloadClient
from moorage.records.sample import MicroBatch, RankBatch
from moorage.trainer.agreement import first_owners
from moorage.trainer.data import BatchFeed, FeedSettings, check_routing, within_budget
from moorage.trainer.world import World
from tests.support.training import TOKEN, SyntheticRun

ALONE = World(0, 1, torch.device("cpu"))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SyntheticRun]:
    with SyntheticRun(tmp_path_factory.mktemp("feed")) as made:
        yield made


@pytest.fixture
def client() -> Iterator[PayloadClient]:
    with PayloadClient(TOKEN) as made:
        yield made


def _feed(run: SyntheticRun, client: PayloadClient, budget: int = 1 << 20, **options) -> BatchFeed:
    settings = FeedSettings(fetch_timeout_s=20.0, prefetch_budget_bytes=budget, routing=None)
    return BatchFeed(run.run, ALONE, client, settings, options.get("stop", threading.Event()))


def _outstanding(run: SyntheticRun) -> int:
    run.spool.catch_up()
    return run.spool.ledger().outstanding


def test_arrays_arrive_as_they_were_kept_and_are_freed_once(run: SyntheticRun, client: PayloadClient) -> None:
    before = _outstanding(run)
    samples = run.write_step(1)
    feed = _feed(run, client)
    work = feed.take(1)
    assert _outstanding(run) == before + len(samples)
    for micro, arrays in zip(work.batch.micro_batches, work.arrays, strict=True):
        kept = [run.kept[s.payload.id] for s in micro.samples]
        assert arrays.token_ids.tobytes() == b"".join(k.token_ids.tobytes() for k in kept)
        assert arrays.logprobs.tobytes() == b"".join(k.logprobs.tobytes() for k in kept)
    assert work.bytes_fetched > 0
    feed.settle(1)
    assert _outstanding(run) == before
    feed.close(release=True)


def test_a_step_read_ahead_stays_within_the_budget_and_is_complete_when_taken(
    run: SyntheticRun, client: PayloadClient
) -> None:
    samples = run.write_step(2)
    feed = _feed(run, client, budget=samples[0].payload.nbytes * 3)
    feed.prefetch(2)
    deadline = time.monotonic() + 20
    while not feed._ahead[2].done() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert 0 < client.counts.blobs < len(samples)
    work = feed.take(2)
    assert client.counts.blobs == len(samples)
    assert work.num_dropped == 0
    feed.settle(2)
    feed.close(release=True)


def test_what_was_read_ahead_is_freed_when_the_feed_closes(run: SyntheticRun, client: PayloadClient) -> None:
    before = _outstanding(run)
    run.write_step(3)
    feed = _feed(run, client)
    feed.prefetch(3)
    feed._ahead[3].result(20)
    feed.close(release=True)
    assert _outstanding(run) == before


def test_a_dummy_is_not_fetched_without_replay_and_its_absence_is_no_drop(
    run: SyntheticRun, client: PayloadClient
) -> None:
    samples = run.make_samples(2)
    borrowed = run.make_samples(1)
    run.spool.free([borrowed[0].payload.id], "shutdown")
    from moorage.exchange.batches import write_batch

    micros = (MicroBatch(tuple(samples)), MicroBatch(tuple(borrowed), dummy=True))
    write_batch(run.run, 4, [RankBatch("run", 1, 4, 3, 0, 1, micros)], b"")
    feed = _feed(run, client)
    work = feed.take(4)
    assert client.counts.blobs == 2
    assert client.counts.failed == 0
    assert work.num_dropped == 0
    assert not work.arrays[1].dropped
    feed.settle(4)
    feed.close(release=True)


def test_a_stop_and_the_end_of_the_run_both_end_a_wait(tmp_path: Path, client: PayloadClient) -> None:
    stop = threading.Event()
    with SyntheticRun(tmp_path) as empty:
        feed = _feed(empty, client, stop=stop)
        threading.Timer(0.2, stop.set).start()
        with pytest.raises(RunEnded, match="told to stop"):
            feed.take(1)
        feed.close(release=True)
        feed = _feed(empty, client)
        write_end(empty.run, "failed", "the engine died")
        with pytest.raises(RunEnded, match="the engine died"):
            feed.take(1)
        feed.close(release=True)


def test_a_batch_for_other_ranks_is_refused(run: SyntheticRun, client: PayloadClient) -> None:
    run.num_ranks = 2
    run.write_step(5)
    run.num_ranks = 1
    feed = _feed(run, client)
    with pytest.raises(ExchangeError, match="2 data ranks, this trainer has 1"):
        feed.take(5)
    feed.close(release=True)


def test_the_budget_takes_leading_blobs_only(run: SyntheticRun) -> None:
    pieces = [sample.payload for sample in run.make_samples(4)]
    assert within_budget(pieces, 0) == []
    assert within_budget(pieces, pieces[0].nbytes + pieces[1].nbytes) == pieces[:2]
    assert within_budget(pieces, 1 << 30) == pieces


def test_a_reference_that_is_named_twice_is_deleted_once(run: SyntheticRun) -> None:
    pieces = [sample.payload for sample in run.make_samples(2)]
    assert first_owners([*pieces, pieces[0]], ALONE) == pieces


def test_replay_without_rows_names_the_setting(run: SyntheticRun) -> None:
    batch = RankBatch("run", 1, 1, 0, 0, 1, (MicroBatch(tuple(run.make_samples(1))),))
    with pytest.raises(ExchangeError, match="routed_experts = true"):
        check_routing(batch, (2, 2))


def test_rows_of_another_model_are_refused_before_anything_is_fetched(
    tmp_path: Path, client: PayloadClient
) -> None:
    with SyntheticRun(tmp_path, routing=(2, 2, 8)) as routed:
        routed.write_step(1)
        feed = BatchFeed(routed.run, ALONE, client, FeedSettings(20.0, 1 << 20, (3, 2)), threading.Event())
        with pytest.raises(ExchangeError, match="2 layers of 2 experts, the model has 3 hidden layers"):
            feed.take(1)
        assert client.counts.blobs == 0
        feed.close(release=True)


@pytest.mark.parametrize("release", [True, False])
def test_closing_delivers_what_a_store_that_was_away_did_not_hear(tmp_path: Path, release: bool) -> None:
    with SyntheticRun(tmp_path) as away, PayloadClient(TOKEN) as client:
        away.write_step(1)
        feed = _feed(away, client)
        feed.take(1)
        away.service.stop()
        client.release(feed.custody.release_all(), "trainer", deadline_s=0.2)
        assert len(client.pending_releases) == 8
        away.service.start()  # at the same port
        feed.close(release=release)
        assert client.pending_releases == []
        assert _outstanding(away) == 0
