"""`torchrun -m tests.support.lost_payload_worker <config.json> <out>`: what each rank makes of lost payloads.

The gradients of steps 2 and 3 without an update, each as one file, and what this rank saw in them; then the
trainer's own loop from step 1, and how it ended.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from moorage.config.base import load_config
from moorage.config.run import TrainerProcessConfig
from moorage.core.rundir import RunDir
from moorage.trainer.loop import main as run_trainer
from moorage.trainer.metrics import StepMetrics
from moorage.trainer.rows import float_dtype, make_row
from moorage.trainer.session import Session
from moorage.trainer.step import agree_divisors
from tests.support.rank_worker import full


def backward(session: Session, number: int, out: Path) -> dict[str, Any]:
    """Save the step's gradients on the main rank; returns what this rank saw."""
    work = session.feed.take(number)
    dtype = float_dtype(session.config.model.dtype)
    rows = [make_row(arrays, dtype, session.world.device, replay=True) for arrays in work.arrays]
    metrics = StepMetrics(session.step.loss.metric_names)
    session.step.backward(rows, metrics)
    gradients = {name: full(p.grad) for name, p in session.model.module.named_parameters()}
    if session.world.is_main:
        save_file(gradients, out / f"gradients_{number}.safetensors")
    session.step.optimizer.zero_grad(set_to_none=True)
    session.feed.settle(number)
    return {
        "dropped": sum(row.dropped for row in rows),
        "num_dropped": work.num_dropped,
        "divisor": agree_divisors(rows, session.model).rl,
        "loss": metrics.agree(session.world)["loss"],
    }


def main() -> None:
    config, out = load_config(TrainerProcessConfig, Path(sys.argv[1])), Path(sys.argv[2])
    session = Session(config, RunDir(config.facts.run_dir), threading.Event())
    seen: dict[str, Any] = {str(number): backward(session, number, out) for number in (2, 3)}
    session.feed.close(release=True)
    session.client.close()
    seen["exit_code"] = run_trainer(config)
    (out / f"rank_{os.environ['RANK']}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
