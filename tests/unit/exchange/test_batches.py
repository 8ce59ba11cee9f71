from __future__ import annotations

import threading
import time

import pytest

from moorage.core.errors import ExchangeError, RunEnded
from moorage.core.rundir import PeerWatch, RunDir, write_end, write_json_atomic
from moorage.exchange import batches
from moorage.records.payload import PayloadSlice
from moorage.records.sample import MicroBatch, RankBatch, Span, TrainSample


def make_rank(step: int, rank: int, ranks: int, ids: list[str]) -> RankBatch:
    micro = tuple(
        MicroBatch((TrainSample(PayloadSlice("u", "s", i, 4, 4, (), None, 9), (Span(1, 4, 0.5),), "e"),))
        for i in ids
    )
    return RankBatch("run", 1, step, step - 1, rank, ranks, micro)


def test_a_batch_is_read_as_it_was_written(tmp_path):
    run = RunDir(tmp_path)
    ranks = [make_rank(3, 0, 2, ["a"]), make_rank(3, 1, 2, ["b"])]
    size = batches.write_batch(run, 3, ranks, b"state")
    assert size > 5
    watch = PeerWatch(run, "orchestrator")
    assert [batches.wait_for_batch(run, 3, rank, watch) for rank in (0, 1)] == ranks
    assert batches.read_state(run, 3) == b"state"
    assert batches.newest_batch(run) == 3
    assert [path.name for path in run.batches.iterdir()] == ["step_3"]


def test_a_reader_waits_until_ready(tmp_path):
    run = RunDir(tmp_path)
    seen = []
    watch = PeerWatch(run, "orchestrator")
    reader = threading.Thread(target=lambda: seen.append(batches.wait_for_batch(run, 1, 0, watch)))
    reader.start()
    time.sleep(0.1)
    assert not seen
    batches.write_batch(run, 1, [make_rank(1, 0, 1, ["a"])], b"")
    reader.join(5)
    assert seen[0].step == 1


def test_a_reader_whose_orchestrator_is_gone_ends(tmp_path):
    run = RunDir(tmp_path)
    write_end(run, "failed", "orchestrator: boom")
    with pytest.raises(RunEnded, match="boom"):
        batches.wait_for_batch(run, 1, 0, PeerWatch(run, "orchestrator"))


def test_a_reader_whose_orchestrator_is_silent_ends(tmp_path):
    run = RunDir(tmp_path)
    write_json_atomic(run.alive / "orchestrator.json", {"pid": 1, "time": time.time() - 100})
    watch = PeerWatch(run, "orchestrator")
    watch._since -= 100
    with pytest.raises(RunEnded, match="no sign of life"):
        batches.wait_for_batch(run, 1, 0, watch)


def test_a_ready_batch_is_never_overwritten(tmp_path):
    run = RunDir(tmp_path)
    batches.write_batch(run, 1, [make_rank(1, 0, 1, ["a"])], b"")
    with pytest.raises(ExchangeError, match="never written twice"):
        batches.write_batch(run, 1, [make_rank(1, 0, 1, ["b"])], b"")


def test_a_torn_batch_is_replaced(tmp_path):
    run = RunDir(tmp_path)
    run.batch(1).mkdir(parents=True)
    (run.batch(1) / "rank_7.msgpack").write_bytes(b"half")
    batches.write_batch(run, 1, [make_rank(1, 0, 1, ["a"])], b"")
    assert not (run.batch(1) / "rank_7.msgpack").exists()


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ([], "no data rank"),
        ([make_rank(1, 1, 1, [])], "not 0..n-1"),
        ([make_rank(1, 0, 2, [])], "disagree about their number"),
        ([make_rank(1, 0, 2, ["a"]), make_rank(1, 1, 2, [])], "equally many"),
        ([make_rank(2, 0, 1, [])], "another step"),
    ],
)
def test_ranks_that_do_not_fit_together_are_refused(tmp_path, ranks, message):
    with pytest.raises(ExchangeError, match=message):
        batches.write_batch(RunDir(tmp_path), 1, ranks, b"")


def test_another_number_of_data_ranks_is_named(tmp_path):
    run = RunDir(tmp_path)
    batches.write_batch(run, 1, [make_rank(1, 0, 1, ["a"])], b"")
    with pytest.raises(ExchangeError, match="another number of data ranks"):
        batches.read_batch(run, 1, 1)


def test_a_file_that_is_no_batch_is_named(tmp_path):
    run = RunDir(tmp_path)
    batches.write_batch(run, 1, [make_rank(1, 0, 1, ["a"])], b"")
    (run.batch(1) / "rank_0.msgpack").write_bytes(b"\xc1")
    with pytest.raises(ExchangeError, match="rank_0"):
        batches.read_batch(run, 1, 0)


def test_adoption_lists_each_payload_after_a_step_once(tmp_path):
    run = RunDir(tmp_path)
    for step, ids in ((1, ["a"]), (2, ["b", "c"]), (3, ["c", "d"])):
        batches.write_batch(run, step, [make_rank(step, 0, 1, ids)], b"")
    assert [payload.id for payload in batches.read_owned_slices(run, 2)] == ["b", "c", "d"]


def test_batches_go_up_to_a_step(tmp_path):
    run = RunDir(tmp_path)
    for step in (1, 2, 3):
        batches.write_batch(run, step, [make_rank(step, 0, 1, ["a"])], b"")
    assert batches.remove_batches(run, 2) == [1, 2]
    assert [path.name for path in run.batches.iterdir()] == ["step_3"]


def test_a_state_without_ready_is_refused(tmp_path):
    run = RunDir(tmp_path)
    run.batch(1).mkdir(parents=True)
    with pytest.raises(ExchangeError, match="not READY"):
        batches.read_state(run, 1)


def test_a_checkpoint_part_is_read_as_written(tmp_path):
    folder = RunDir(tmp_path).checkpoint(4, "orchestrator")
    with pytest.raises(ExchangeError, match="not READY"):
        batches.read_checkpoint_state(folder)
    batches.write_state(folder, b"s")
    assert batches.read_checkpoint_state(folder) == b"s"
