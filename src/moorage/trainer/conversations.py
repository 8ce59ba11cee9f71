"""Conversations as training samples: token ids, and which of them the assistant would have written.

Owns tokenization for the warm-up. Promises: the prompt's ids are what the chat template gives for it, so the
model later sees in reinforcement learning what it saw here; only tokens of assistant turns are trained, their
end token included.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np

from moorage.core.errors import ConfigError
from moorage.payload.codec import BranchArrays
from moorage.records.payload import PayloadSlice
from moorage.records.sample import Span, TrainSample

Conversation = list[dict[str, Any]]


def load_conversations(taskset: dict[str, Any], seed: int) -> Iterator[Conversation]:
    """The endless conversations of a taskset. Raises ConfigError when it cannot be loaded or has none."""
    from moorage.env.resolve import load_taskset  # verifiers: seconds, so only here

    try:
        loaded = load_taskset({"taskset": dict(taskset)})
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ConfigError(f"taskset {taskset['id']!r} cannot be loaded: {error}") from error
    make = getattr(loaded, "conversations", None)
    if make is None:
        raise ConfigError(
            f"taskset {taskset['id']!r} has no conversations to learn: its class needs "
            "`def conversations(self, seed: int) -> Iterator[list[dict]]`"
        )
    return make(seed)


class SampleMaker:
    """Turns conversations into samples whose arrays are in memory instead of in a store."""

    def __init__(self, tokenizer: Any, seq_len: int) -> None:
        if not tokenizer.chat_template:
            raise ConfigError("the tokenizer has no chat template; add one, or start from [init]")
        self.tokenizer = tokenizer
        self.seq_len = seq_len
        self._marks_turns = "{% generation" in tokenizer.chat_template.replace("{%-", "{%")

    def take(
        self, conversations: Iterator[Conversation], count: int
    ) -> tuple[list[TrainSample], dict[str, BranchArrays]]:
        """The next `count` conversations: samples, and their arrays by id."""
        samples, arrays = [], {}
        for index, (ids, mask) in enumerate(self._tokenize(list(islice(conversations, count)))):
            branch = BranchArrays(
                np.array(ids, np.int32), np.array(mask, np.uint8), np.zeros(len(ids), np.float32)
            )
            arrays[str(index)] = branch
            samples.append(make_sample(str(index), branch))
        return samples, arrays

    def _tokenize(self, conversations: Sequence[Conversation]) -> Iterator[tuple[list[int], list[int]]]:
        if not self._marks_turns:
            for conversation in conversations:
                ids, mask = self._by_prefixes(conversation)
                yield ids[: self.seq_len], mask[: self.seq_len]
            return
        encoded = self.tokenizer.apply_chat_template(
            list(conversations), return_dict=True, return_assistant_tokens_mask=True
        )
        for ids, mask in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True):
            yield ids[: self.seq_len], mask[: self.seq_len]

    def _by_prefixes(self, conversation: Conversation) -> tuple[list[int], list[int]]:
        """For templates without marks: what each assistant turn adds to its prompt."""
        mask: list[int] = []
        ids: list[int] = []
        for turn, message in enumerate(conversation):
            if message["role"] != "assistant":
                continue
            prompt = self._ids(conversation[:turn], add_generation_prompt=True)
            whole = self._ids(conversation[: turn + 1])
            if whole[: len(prompt)] != prompt or prompt[: len(ids)] != ids:
                raise ConfigError(
                    "this chat template changes earlier turns, so the assistant's tokens cannot be told; "
                    "mark them with {% generation %} in the template"
                )
            mask += [0] * (len(prompt) - len(mask)) + [1] * (len(whole) - len(prompt))
            ids = whole
        return ids, mask

    def _ids(self, messages: Conversation, *, add_generation_prompt: bool = False) -> list[int]:
        return self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=add_generation_prompt, return_dict=False
        )


def make_sample(sample_id: str, branch: BranchArrays) -> TrainSample:
    """A sample that trains the masked tokens with cross entropy."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], branch.loss_mask, [0]))))
    spans = tuple(
        Span(int(start), int(stop), None, rl=0.0, ce=1.0) for start, stop in edges.reshape(-1, 2).tolist()
    )
    nbytes = sum(array.nbytes for array in branch.present().values())
    fields = tuple(branch.present())
    piece = PayloadSlice("", "", sample_id, branch.num_tokens, branch.num_tokens, fields, None, nbytes)
    return TrainSample(piece, spans, env="sft")
