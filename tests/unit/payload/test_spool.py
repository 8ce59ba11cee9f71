"""The spool: budget, discards, adoption, and what is left after failures and kills."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from moorage.core.errors import ConfigError, PayloadError
from moorage.payload.codec import decode, encode
from moorage.payload.spool import (
    SUFFIX,
    Spool,
    choose_spool_root,
    remove_attempt,
)
from tests.unit.payload.builders import assert_same, make_arrays

MIB = 1 << 20


def open_spool(root: Path, key: str = "run.1", budget: int = MIB, remember: int = 100) -> Spool:
    return Spool(root, key, budget, remember=remember)


def files_of(root: Path) -> list[str]:
    return sorted(path.name[: -len(SUFFIX)] for path in root.glob(f"*/*/*{SUFFIX}"))


def test_a_kept_blob_is_a_file_that_decodes(tmp_path: Path) -> None:
    spool, arrays = open_spool(tmp_path), make_arrays(50)
    blob_id = spool.keep("r1", encode(arrays))
    path = tmp_path / "run.1" / "r1" / f"{blob_id}{SUFFIX}"
    assert_same(decode(path.read_bytes()), arrays)
    assert len(blob_id) == 32
    ledger = spool.ledger()
    assert (ledger.kept, ledger.outstanding, ledger.kept_bytes) == (1, 1, path.stat().st_size)


def test_a_discard_removes_the_requests_folder_and_counts_only_what_was_left(tmp_path: Path) -> None:
    spool = open_spool(tmp_path)
    ids = [spool.keep("r1", [b"x" * 10]) for _ in range(3)]
    other = spool.keep("r2", [b"y"])
    assert [entry.id for entry in spool.free(ids[:1], "trainer").freed] == ids[:1]
    assert ids[0] not in files_of(tmp_path)
    assert spool.discard("r1") == 2
    assert spool.discard("r1") == 0
    assert spool.discard("never") == 0
    assert files_of(tmp_path) == [other]
    ledger = spool.ledger()
    assert (ledger.freed["env_server"], ledger.freed["trainer"], ledger.outstanding) == (2, 1, 1)
    assert not (tmp_path / "run.1" / "r1").exists()


def test_nothing_is_kept_under_a_discarded_request(tmp_path: Path) -> None:
    worker, broker = open_spool(tmp_path), open_spool(tmp_path)
    broker.discard("r1")
    with pytest.raises(PayloadError, match="discarded"):
        worker.keep("r1", [b"late"])
    assert files_of(tmp_path) == []
    assert worker.ledger().kept == 0


def test_keeps_racing_a_discard_leave_no_file_and_a_balanced_account(tmp_path: Path) -> None:
    worker, broker = open_spool(tmp_path), open_spool(tmp_path)

    def keep_on() -> None:
        while True:
            try:
                worker.keep("r1", [b"z" * 1000])
            except PayloadError:
                return

    threads = [threading.Thread(target=keep_on) for _ in range(3)]
    for thread in threads:
        thread.start()
    time.sleep(0.05)
    broker.discard("r1")
    for thread in threads:
        thread.join(10)
    assert files_of(tmp_path) == []
    ledger = broker.ledger()
    assert ledger.kept == ledger.freed["env_server"]
    assert (ledger.kept > 0, ledger.outstanding) == (True, 0)


def test_a_full_budget_waits_for_room_and_then_says_why(tmp_path: Path) -> None:
    worker, service = open_spool(tmp_path, budget=100), open_spool(tmp_path, budget=100)
    first = worker.keep("r1", [b"x" * 80])
    with pytest.raises(PayloadError, match="spool_budget_mib"):
        worker.keep("r2", [b"x" * 30], timeout_s=0.1)
    with pytest.raises(PayloadError, match="larger than the whole"):
        worker.keep("r2", [b"x" * 101], timeout_s=60)
    timer = threading.Timer(0.2, lambda: service.free([first], "trainer"))
    timer.start()
    begun = time.monotonic()
    worker.keep("r2", [b"x" * 30], timeout_s=30)
    assert time.monotonic() - begun > 0.1
    timer.join()
    assert worker.ledger().peak_bytes == 80


def test_the_budget_holds_over_all_writers(tmp_path: Path) -> None:
    spools = [open_spool(tmp_path, budget=1000) for _ in range(4)]

    def keep_many(spool: Spool) -> None:
        for number in range(10):
            try:
                spool.keep(f"r{number}", [b"x" * 90], timeout_s=0)
            except PayloadError:
                return

    threads = [threading.Thread(target=keep_many, args=(spool,)) for spool in spools]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert spools[0].ledger().peak_bytes == 990


def test_discard_all_spares_what_is_retained(tmp_path: Path) -> None:
    spool = open_spool(tmp_path)
    ids = [spool.keep(f"r{i % 2}", [b"x"]) for i in range(4)]
    assert spool.discard_all("shutdown", retain=[ids[0]]) == 3
    assert [entry.id for entry in spool.outstanding()] == [ids[0]]
    assert files_of(tmp_path) == [ids[0]]
    assert spool.ledger().freed["shutdown"] == 3


def test_a_new_attempt_adopts_by_file_and_the_old_one_goes(tmp_path: Path) -> None:
    old = open_spool(tmp_path, "run.1")
    kept, dropped = old.keep("r1", [b"keep"]), old.keep("r2", [b"drop"])
    (tmp_path / "run.1" / "journal").unlink()  # the index is rebuilt from the files
    new = open_spool(tmp_path, "run.2")
    assert new.adopt([kept, "f" * 32, "../../etc"]) == (kept,)
    assert new.adopt([kept]) == ()
    remove_attempt(tmp_path, "run.1")
    assert files_of(tmp_path) == [kept]
    assert dropped not in files_of(tmp_path)
    ledger = new.ledger()
    assert (ledger.kept, ledger.outstanding, ledger.outstanding_bytes) == (1, 1, 4)
    assert len(new.free([kept], "trainer").freed) == 1


def test_attempts_whose_server_is_dead_are_found(tmp_path: Path) -> None:
    mine, dead = open_spool(tmp_path, "run.2"), open_spool(tmp_path, "run.1")
    mine.own()
    assert open_spool(tmp_path, "run.3").lost_attempts() == ["run.1"]
    dead.own()
    assert open_spool(tmp_path, "run.3").lost_attempts() == []
    assert mine.lost_attempts() == ["run.3"]


def test_sweep_finishes_what_a_kill_left_between_journal_and_unlink(tmp_path: Path) -> None:
    spool = open_spool(tmp_path)
    freed, kept, orphan = (spool.keep(request, [b"x"]) for request in ("r1", "r1", "r2"))
    spool.free([freed], "trainer", unlink=False)
    spool._journal.append("D", "1.0", "env_server", "r2")
    assert sorted(files_of(tmp_path)) == sorted([freed, kept, orphan])
    assert spool.sweep() == 2
    assert files_of(tmp_path) == [kept]


def test_a_reservation_of_a_killed_worker_goes_with_its_request(tmp_path: Path) -> None:
    spool = open_spool(tmp_path, budget=100)
    spool._journal.append("R", "1.0", "a" * 32, "r1", "100")
    with pytest.raises(PayloadError, match="is full"):
        spool.keep("r2", [b"x"], timeout_s=0)
    assert spool.discard("r1") == 0
    spool.keep("r2", [b"x"], timeout_s=0)
    assert spool.ledger().kept == 1


@pytest.mark.parametrize("name", ["", "..", "a/b", ".hidden", "x" * 129])
def test_a_request_id_that_is_no_folder_name_is_refused(tmp_path: Path, name: str) -> None:
    spool = open_spool(tmp_path)
    with pytest.raises(PayloadError, match="cannot name a folder"):
        spool.keep(name, [b"x"])
    with pytest.raises(PayloadError, match="cannot name a folder"):
        spool.discard(name)


def test_where_the_spool_lies(tmp_path: Path) -> None:
    def choose(**options):
        return choose_spool_root("train/x.n", run_id="my run/1", budget_bytes=1, **options)

    assert choose(spool_dir=tmp_path).parts[-4:-3] != choose(spool_dir=tmp_path).parts[-3:-2]
    assert choose(spool_dir=tmp_path).is_relative_to(tmp_path)
    assert choose(spool_dir=tmp_path).parts[-3:] == ("my-run-1", "train", "x.n")
    assert choose(retain="checkpoint", run_dir=tmp_path) == tmp_path / "spool" / "train" / "x.n"
    with pytest.raises(ConfigError, match="run folder"):
        choose(retain="checkpoint")
    huge = choose_spool_root("s", run_id="r", budget_bytes=1 << 60)
    assert not huge.is_relative_to("/dev/shm")
