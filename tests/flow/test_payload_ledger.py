"""`moorage ledger`: a live run is asked, an ended one replayed, and what cannot be known is said."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from moorage.core.errors import ConfigError
from moorage.core.net import node_name
from moorage.core.rundir import RunDir, write_end, write_json_atomic
from moorage.payload.server import PayloadService
from moorage.payload.spool import Spool
from moorage.report.ledger import format_accounts, read_accounts, show_ledger

TOKEN = "1ed6e4" * 8


def publish(run: RunDir, name: str, url: str, spool: Path) -> None:
    address = {"payload": url, "spool": str(spool), "store": name, "node": node_name(), "pid": os.getpid()}
    write_json_atomic(run.address("train", name), address)


def test_a_live_run_is_asked_and_then_its_journals_are_replayed(tmp_path, capsys, monkeypatch) -> None:
    run, root = RunDir(tmp_path / "run"), tmp_path / "spool"
    spool = Spool(root, "run.1", 1 << 20, remember=10)
    ids = [spool.keep("asked", [b"x" * 100]) for _ in range(3)]
    spool.free(ids[:1], "trainer")
    spool.free(ids[:1], "train_sink")
    with PayloadService(root, token=TOKEN) as service:
        publish(run, "a.node", service.url, root)
        monkeypatch.delenv("MOORAGE_TOKEN", raising=False)
        with pytest.raises(ConfigError, match="MOORAGE_TOKEN"):
            read_accounts(run.root)
        monkeypatch.setenv("MOORAGE_TOKEN", TOKEN)
        [live] = read_accounts(run.root, limit=1)
        assert (live.store, live.source, live.problem) == ("train/a.node", "service", None)
        assert (live.ledger.kept, live.ledger.outstanding, live.ledger.double_frees) == (3, 2, 1)
        assert [(item.id, item.request) for item in live.held] == [(ids[1], "asked")]
        assert show_ledger(run.root, limit=1) == 1, "a double free is a fault"
        printed = capsys.readouterr().out
        assert "trainer 1, 1 double frees" in printed
        assert ids[1] in printed
        assert "and 1 more in train/a.node" in printed
    [dead] = read_accounts(run.root)
    assert dead.problem is not None
    assert "no account" in format_accounts([dead])
    write_end(run, "failed", "killed")
    [ended] = read_accounts(run.root)
    assert (ended.source, ended.ledger.kept, ended.ledger.outstanding) == ("journal", 3, 2)
    assert {item.id for item in ended.held} == set(ids[1:])
    spool.close()


def test_a_retained_spool_in_the_run_folder_is_found(tmp_path) -> None:
    run = RunDir(tmp_path)
    spool = Spool(run.spool / "train" / "a.node", "run.2", 1 << 20)
    spool.keep("r", [b"x"])
    spool.close()
    [account] = read_accounts(run.root)
    assert (account.store, account.ledger.outstanding) == ("train/a.node", 1)


def test_a_run_whose_spools_are_gone_has_its_summary(tmp_path) -> None:
    run = RunDir(tmp_path)
    assert read_accounts(run.root) == []
    assert "no payload store" in format_accounts([])
    payload = {"kept": 5, "bytes": 2**20, "freed": {"trainer": 5}, "outstanding": 0, "double_frees": 0}
    write_json_atomic(run.summary, {"payload": payload | {"unknown": None, "dropped_micro_batches": 0}})
    [account] = read_accounts(run.root)
    assert (account.source, account.ledger.kept, account.ledger.freed["trainer"]) == ("summary", 5, 5)
    assert "trainer 5" in format_accounts([account])
    assert show_ledger(run.root) == 0
    with pytest.raises(ConfigError, match="is not a run folder"):
        read_accounts(tmp_path / "nothing")
