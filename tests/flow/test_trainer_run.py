"""The trainer as a real process on a real payload store: what it deletes, writes, measures and refuses."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from moorage.core.rundir import ready_steps
from moorage.records.sample import Span, TrainSample
from moorage.trainer.starter import make_model_folder
from tests.support.training import STORE, SyntheticRun

START_S = 110.0
CONTRACT = {
    "loss",
    "mismatch_kl/mean",
    "mismatch_kl/max",
    "entropy/mean",
    "optim/lr",
    "optim/grad_norm",
    "perf/throughput",
    "perf/padding_share",
    "perf/peak_memory_mib",
    "payload/fetch_s/mean",
    "payload/fetch_s/max",
    "payload/dropped_micro_batches",
    "payload/bytes_fetched",
    "time/step",
    "time/wait_for_batch",
    "time/fetch",
    "time/forward_backward",
    "time/publish",
    "time/checkpoint",
    "policy/lag/mean",
    "policy/lag/max",
}


def _ledger(run: SyntheticRun):
    run.spool.catch_up()
    return run.spool.ledger()


def test_three_steps_free_every_payload_publish_every_version_and_emit_every_series(
    tmp_path: Path,
) -> None:
    overrides = {"num_hidden_layers": 3, "mlp_only_layers": [0]}  # rows count the dense layer too
    model = make_model_folder(tmp_path / "model", "qwen3_moe", overrides=overrides)
    with SyntheticRun(tmp_path, routing=(3, 2, 8)) as run:
        for step in (1, 2, 3):
            run.write_step(step)
        trainer = run.start_trainer(run.config(model, 3, trainer__router_replay=True))
        assert trainer.wait(START_S) == 0, run.log_text()
        ledger = _ledger(run)
        assert ledger.kept == ledger.freed["trainer"] == 24
        assert (ledger.outstanding, ledger.double_frees, ledger.unknown) == (0, 0, 0)
        assert ready_steps(run.run.weights) == [0, 1, 2, 3]
        rows = run.metrics()
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row in rows:
        assert row.keys() >= CONTRACT
        assert row["payload/dropped_micro_batches"] == 0
        assert row["payload/bytes_fetched"] > 0
        assert row["routing/imbalance"] > 0
    versions = [AutoModelForCausalLM.from_pretrained(run.run.weight(n)).state_dict() for n in (0, 3)]
    assert any(not torch.equal(versions[0][name], versions[1][name]) for name in versions[0])


def test_a_lost_payload_drops_its_micro_batch_and_an_empty_step_ends_the_run(
    tmp_path: Path, dense_model: Path
) -> None:
    with SyntheticRun(tmp_path) as run:
        lost = run.write_step(1)[0].payload.id
        gone = [sample.payload.id for sample in run.write_step(2)]
        run.spool.free([lost, *gone], "shutdown")
        trainer = run.start_trainer(run.config(dense_model, 2))
        assert trainer.wait(START_S) == 1
        rows, log, ledger = run.metrics(), run.log_text(), _ledger(run)
    assert [row["payload/dropped_micro_batches"] for row in rows] == [1]
    assert rows[0]["perf/padding_share"] > 0
    assert "step 2: no payload of its" in log
    assert "payload.retain" in log
    assert "Traceback" not in log
    assert ledger.outstanding == 0


@pytest.mark.timeout(200)
def test_a_gradient_that_is_no_number_stops_every_rank_before_it_is_applied_or_published(
    tmp_path: Path, dense_model: Path
) -> None:
    with SyntheticRun(tmp_path, num_ranks=2) as run:
        run.write_step(1)
        first, *rest = run.make_samples(8)
        # Finite, as a batch may hold it, and on one rank only; the gradient is not.
        huge = Span(0, first.payload.num_tokens, advantage=3e38)
        run.write_samples(2, [TrainSample(first.payload, (huge,), env="synthetic", versions=(0, 0)), *rest])
        run.write_step(3)
        trainer = run.start_trainer(run.config(dense_model, 3, checkpoint__interval=1))
        assert trainer.wait(START_S) == 1
        log = run.log_text()
        assert log.count("step 2: the loss is") == 1, log
        assert re.search(r"TrainingError: step 2: the loss is \S+ and the gradient norm (inf|nan);", log)
        assert "step 2: the loss or the gradient is not finite, as the main rank says" in log
        assert [row["step"] for row in run.metrics()] == [1]
        assert ready_steps(run.run.weights) == [0, 1]
        tensors = AutoModelForCausalLM.from_pretrained(run.run.weight(1)).state_dict().values()
        assert all(torch.isfinite(tensor).all() for tensor in tensors)
        assert (run.run.checkpoint(1, "trainer") / "READY").exists()
        assert not run.run.checkpoint(2, "trainer").exists()
        assert _ledger(run).outstanding == 0


def test_missing_routing_rows_stop_the_first_batch_and_name_the_setting(
    tmp_path: Path, moe_model: Path
) -> None:
    with SyntheticRun(tmp_path) as run:
        run.write_step(1)
        trainer = run.start_trainer(run.config(moe_model, 1, trainer__router_replay=True))
        assert trainer.wait(START_S) == 1
        log = run.log_text()
    assert "inference.routed_experts = true" in log
    assert STORE not in log
    assert "Traceback" not in log


def test_told_to_stop_it_ends_in_order_and_frees_what_it_read_ahead(
    tmp_path: Path, dense_model: Path
) -> None:
    with SyntheticRun(tmp_path) as run:
        run.write_step(1)
        trainer = run.start_trainer(run.config(dense_model, 3))
        deadline = time.monotonic() + START_S
        while not run.metrics() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert (run.run.alive / "trainer.json").exists()
        trainer.terminate()
        assert trainer.wait(30) == 143, run.log_text()
        assert _ledger(run).outstanding == 0
        assert "Traceback" not in run.log_text()


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_sample_that_one_rank_cannot_train_stops_all(tmp_path: Path, dense_model: Path) -> None:
    with SyntheticRun(tmp_path, num_ranks=2) as run:
        first, *rest = run.make_samples(8)
        greedy = TrainSample(first.payload, first.spans, env="synthetic", versions=(0, 0), temperature=0.0)
        run.write_samples(1, [greedy, *rest])
        trainer = run.start_trainer(run.config(dense_model, 1))
        assert trainer.wait(START_S) == 1
        log = run.log_text()
        assert log.count("a trained sample was drawn at temperature 0") == 1, log
        assert log.count("1 other rank(s) of the trainer stopped") == 1, log
        assert "RuntimeError" not in log  # no rank was left in a collective
        assert _ledger(run).outstanding == 0


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_ranks_delete_each_payload_once_and_agree_on_a_lost_one(tmp_path: Path, moe_model: Path) -> None:
    with SyntheticRun(tmp_path, num_ranks=2, routing=(2, 2, 8)) as run:
        samples = run.write_step(1, count=7)
        run.write_step(2, count=7)
        run.spool.free([samples[0].payload.id], "shutdown")
        config = run.config(moe_model, 2, trainer__router_replay=True, checkpoint__interval=1)
        assert run.start_trainer(config).wait(280) == 0, run.log_text()
        ledger, rows = _ledger(run), run.metrics()
    assert [row["payload/dropped_micro_batches"] for row in rows] == [1, 0]
    assert ledger.outstanding == 0
    assert ledger.freed["trainer"] == 13
