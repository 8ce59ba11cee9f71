"""What the trainer of a real job trains on is, byte for byte, what the env workers encoded (R4)."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from moorage.payload.codec import decode
from moorage.records.sample import RankBatch, decode_rank_batch
from tests.flow.jobs import Keeper, start_job

ROOT = Path(__file__).parents[2]
STEPS = 3


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_trainer_trains_on_the_bytes_that_the_workers_encoded(
    tmp_path: Path, dense_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    seen = tmp_path / "seen.bin"
    loss = json.dumps({"type": "tests.support.recording_loss.RecordingLoss", "path": str(seen)})
    retain = ("--payload.retain", "checkpoint", "--checkpoint.interval", "100")  # blobs stay until the end
    job = start_job(tmp_path, dense_model, "--trainer.loss", loss, *retain, max_steps=STEPS)
    blobs = Keeper(job.run.spool, ("**/*.safetensors",), tmp_path / "blobs")
    batches = Keeper(job.run.batches, ("step_*/rank_*.msgpack",), tmp_path / "batches")
    try:
        code, out, err = job.finish(180.0)
    finally:
        job.end()
        kept_blobs, kept_batches = blobs.stop(), batches.stop()
    assert code == 0, f"{out}\n{err}"

    encoded = {path.name.split("+")[1].split(".")[0]: path for path in kept_blobs}
    steps = sorted((decode_rank_batch(path.read_bytes()) for path in kept_batches), key=lambda b: b.step)
    assert [batch.step for batch in steps] == list(range(1, STEPS + 1))
    expected = b"".join(trained_bytes(batch, encoded) for batch in steps)
    assert len(expected) > 0
    assert seen.read_bytes() == expected


def trained_bytes(batch: RankBatch, encoded: dict[str, Path]) -> bytes:
    """The log-probabilities that this batch trains, in packing order, from the blobs in the spool."""
    parts = []
    for micro in batch.micro_batches:
        for sample in micro.samples if not micro.dummy else ():
            arrays = decode(encoded[sample.payload.id].read_bytes())
            kept = slice(0, sample.payload.num_tokens)
            parts.append(arrays.logprobs[kept][arrays.loss_mask[kept] == 1].astype(np.float32).tobytes())
    return b"".join(parts)
