"""What the orchestrator sends to the trainer: samples as references, micro batches, rank batches.

A sample is one trainable branch: a `PayloadSlice` plus spans of credit. Tokens outside every span train on
nothing. The trainer spreads a span's numbers over the tokens of the span where the blob's `loss_mask` is 1
(`ce` over all tokens of the span: ECHO trains observations).
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from moorage.records.payload import PayloadSlice


class Span(msgspec.Struct, frozen=True, array_like=True):
    """Credit of tokens `start:stop` (half open, within the kept tokens).

    `advantage` None is unassigned, which is not zero (R17). `rl`, `ce`, `ref_kl` weigh the loss components.
    """

    start: int
    stop: int
    advantage: float | None = None
    rl: float = 1  # the defaults are ints: one byte each in a batch file, where a float takes nine
    ce: float = 0
    ref_kl: float = 0


class TrainSample(msgspec.Struct, frozen=True):
    """One training sequence by reference."""

    payload: PayloadSlice
    spans: tuple[Span, ...]
    env: str
    temperature: float = 1.0
    trace_id: str = ""
    branch: int = 0
    versions: tuple[int, int] | None = None

    @property
    def num_tokens(self) -> int:
        return self.payload.num_tokens


class MicroBatch(msgspec.Struct, frozen=True):
    """Sequences that share one forward pass, packed one after the other.

    A dummy repeats another micro batch's samples to keep ranks in step; it owns no payload and trains on
    nothing (R7).
    """

    samples: tuple[TrainSample, ...]
    dummy: bool = False

    @property
    def num_tokens(self) -> int:
        return sum(sample.num_tokens for sample in self.samples)

    @property
    def routing(self) -> tuple[int, int] | None:
        """(layers, k), or None: a micro batch has routing rows for all its samples or for none (R3)."""
        return self.samples[0].payload.routing if self.samples else None


class RankBatch(msgspec.Struct, frozen=True):
    """Everything one data rank trains on in one step: `batches/step_N/rank_R.msgpack`.

    Every rank of a step has the same number of micro batches. `policy_version` is the version being trained
    (step - 1).
    """

    run_id: str
    attempt: int
    step: int
    policy_version: int
    data_rank: int
    num_data_ranks: int
    micro_batches: tuple[MicroBatch, ...]


def owned_slices(micro_batches: Iterable[MicroBatch]) -> list[PayloadSlice]:
    """The payloads that these micro batches own, each once, in order. Dummies own nothing."""
    seen: dict[str, PayloadSlice] = {}
    for batch in micro_batches:
        if not batch.dummy:
            for sample in batch.samples:
                seen.setdefault(sample.payload.id, sample.payload)
    return list(seen.values())


encode_rank_batch = msgspec.msgpack.Encoder().encode
decode_rank_batch = msgspec.msgpack.Decoder(RankBatch).decode
