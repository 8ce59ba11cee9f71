"""Conversations become samples whose trained tokens are the assistant's, under any chat template."""

from __future__ import annotations

import numpy as np
import pytest

from moorage.core.errors import ConfigError
from moorage.trainer.conversations import SampleMaker
from moorage.trainer.starter import make_tokenizer

CHAT = [
    {"role": "system", "content": ""},
    {"role": "user", "content": "ab"},
    {"role": "assistant", "content": "ba"},
    {"role": "user", "content": "c"},
    {"role": "assistant", "content": "c"},
]


def _take(tokenizer, seq_len: int = 64):
    samples, arrays = SampleMaker(tokenizer, seq_len).take(iter([CHAT]), 1)
    return samples[0], arrays["0"]


def test_only_assistant_tokens_are_trained_end_token_included() -> None:
    tokenizer = make_tokenizer()
    sample, arrays = _take(tokenizer)
    trained = tokenizer.convert_ids_to_tokens(arrays.token_ids[arrays.loss_mask == 1].tolist())
    assert trained == ["b", "a", "<|end|>", "c", "<|end|>"]
    assert [(span.stop - span.start, span.ce, span.rl) for span in sample.spans] == [
        (3, 1.0, 0.0),
        (2, 1.0, 0.0),
    ]
    for span in sample.spans:
        assert (arrays.loss_mask[span.start : span.stop] == 1).all()


def test_a_template_without_marks_gives_the_same_tokens_and_mask() -> None:
    marked, plain = make_tokenizer(), make_tokenizer()
    plain.chat_template = plain.chat_template.replace("{% generation %}", "").replace(
        "{% endgeneration %}", ""
    )
    (_, expected), (_, actual) = _take(marked), _take(plain)
    assert np.array_equal(actual.token_ids, expected.token_ids)
    assert np.array_equal(actual.loss_mask, expected.loss_mask)


def test_a_long_conversation_is_cut() -> None:
    sample, arrays = _take(make_tokenizer(), seq_len=8)
    assert arrays.num_tokens == sample.num_tokens == 8
    assert all(span.stop <= 8 for span in sample.spans)


def test_a_template_that_rewrites_earlier_turns_is_refused() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (
        "{{ messages | length }}" + "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    )
    with pytest.raises(ConfigError, match="changes earlier turns"):
        _take(tokenizer)


def test_a_tokenizer_without_a_template_is_refused() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match="no chat template"):
        SampleMaker(tokenizer, 8)
