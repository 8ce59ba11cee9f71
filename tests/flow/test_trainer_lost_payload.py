"""Three ranks and lost payloads: one rank drops its micro batch, all agree, and the gradient is that of a
batch without it (R6)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from moorage.records.packing import pack
from moorage.records.sample import TrainSample
from tests.support.training import SyntheticRun, process_env

RANKS, SEQ_LEN = 3, 48


def _lose(run: SyntheticRun, samples: list[TrainSample]) -> tuple[int, list[TrainSample]]:
    """Lose one payload of a rank that has other micro batches too; returns the rank and the samples of the
    other micro batches."""
    ranks = pack(samples, SEQ_LEN, RANKS)
    rank = max(range(RANKS), key=lambda index: sum(not micro.dummy for micro in ranks[index]))
    micros = [micro for micro in ranks[rank] if not micro.dummy]
    assert len(micros) > 1
    run.spool.free([micros[0].samples[-1].payload.id], "shutdown")
    lost = {sample.payload.id for sample in micros[0].samples}
    return rank, [sample for sample in samples if sample.payload.id not in lost]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_three_ranks_train_without_what_one_of_them_lost_and_stop_when_all_is_lost(
    tmp_path: Path, moe_model: Path
) -> None:
    with SyntheticRun(tmp_path, num_ranks=RANKS, routing=(2, 2, 8)) as run:
        run.spool.free([sample.payload.id for sample in run.write_step(1)], "shutdown")
        samples = run.write_step(2, count=11, seq_len=SEQ_LEN)
        rank, rest = _lose(run, samples)
        # The batch without the lost micro batch; its payloads are blobs of their own.
        again = [
            TrainSample(run.keep(run.kept[s.payload.id]), s.spans, env=s.env, versions=s.versions)
            for s in rest
        ]
        run.write_samples(3, again, SEQ_LEN)
        config = run.config(moe_model, 1, trainer__router_replay=True, model__dtype="float64")
        seen, output = _run_ranks(tmp_path, config.model_dump_json())
        run.spool.catch_up()
        ledger = run.spool.ledger()
    dropped = [report["2"]["dropped"] for report in seen]
    assert dropped == [int(index == rank) for index in range(RANKS)]
    assert {report["2"]["num_dropped"] for report in seen} == {1}
    assert {report["3"]["num_dropped"] for report in seen} == {0}
    assert {report["2"]["divisor"] for report in seen} == {_trained_tokens(run, rest)}
    assert seen[0]["2"]["loss"] == pytest.approx(seen[0]["3"]["loss"], rel=1e-12)
    _compare(tmp_path)
    assert [report["exit_code"] for report in seen] == [1] * RANKS
    assert output.count("step 1: no payload of its") == 1
    assert "Traceback" not in output
    assert (ledger.outstanding, ledger.double_frees) == (0, 0)


def _run_ranks(tmp_path: Path, config: str) -> tuple[list[dict], str]:
    (tmp_path / "config.json").write_text(config)
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    worker = ["-m", "tests.support.lost_payload_worker", str(tmp_path / "config.json"), str(tmp_path)]
    done = subprocess.run(
        [sys.executable, *torchrun, *worker],
        env=process_env(),
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    output = done.stdout + done.stderr
    assert done.returncode == 0, output[-4000:]
    return [json.loads((tmp_path / f"rank_{rank}.json").read_text()) for rank in range(RANKS)], output


def _trained_tokens(run: SyntheticRun, samples: list[TrainSample]) -> float:
    return float(sum(int(run.kept[sample.payload.id].loss_mask.sum()) for sample in samples))


def _compare(folder: Path) -> None:
    """Gradients with a dropped micro batch equal those of the batch without it."""
    with_drop, without = (load_file(folder / f"gradients_{step}.safetensors") for step in (2, 3))
    assert with_drop.keys() == without.keys()
    for name, expected in without.items():
        scale = float(expected.abs().max())
        assert scale > 0, name
        assert float((with_drop[name] - expected).abs().max()) <= 1e-12 * scale, name
