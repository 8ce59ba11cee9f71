"""The store of prefixes, without a model."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from moorage.engine.builtin.prefix import BLOCK, PrefixStore, chain_keys


@dataclass
class Sheet:
    name: str
    nbytes: int = 10


def find(store: PrefixStore[Sheet], salt: str, tokens: np.ndarray) -> tuple[int, str | None]:
    shared, block = store.find(salt, chain_keys(salt, tokens), tokens)
    return shared, None if block is None else block.name


tokens_lists = st.lists(st.lists(st.integers(0, 1), max_size=40), max_size=12)


@given(stored=tokens_lists, asked=st.lists(st.integers(0, 1), max_size=40))
def test_a_hit_is_equal_token_for_token_and_no_long_one_is_missed(
    stored: list[list[int]], asked: list[int]
) -> None:
    store: PrefixStore[Sheet] = PrefixStore(10_000)
    for tokens in stored:
        store.insert("s", np.array(tokens, dtype=np.int64), Sheet(repr(tokens)))
    wanted = np.array(asked, dtype=np.int64)
    shared, name = find(store, "s", wanted)
    assert find(store, "other", wanted) == (0, None)
    best = max((common(tokens, asked) for tokens in stored), default=0)
    if name is not None:
        assert shared == common(eval(name), asked) >= BLOCK
    assert shared // BLOCK == best // BLOCK


def common(left: list[int], right: list[int]) -> int:
    length = 0
    for one, other in zip(left, right, strict=False):
        if one != other:
            break
        length += 1
    return length


def test_the_one_used_longest_ago_goes_first() -> None:
    store: PrefixStore[Sheet] = PrefixStore(25)
    sheets = {name: np.full(BLOCK, ord(name), dtype=np.int64) for name in "abc"}
    store.insert("", sheets["a"], Sheet("a"))
    store.insert("", sheets["b"], Sheet("b"))
    assert find(store, "", sheets["a"]) == (BLOCK, "a")
    store.insert("", sheets["c"], Sheet("c"))
    assert len(store) == 2
    assert store.used_bytes == 20
    assert [find(store, "", sheets[name])[1] for name in "abc"] == ["a", None, "c"]


def test_what_is_larger_than_the_budget_is_not_kept() -> None:
    store: PrefixStore[Sheet] = PrefixStore(25)
    store.insert("", np.zeros(BLOCK, dtype=np.int64), Sheet("big", 26))
    assert len(store) == 0


def test_clear_forgets_everything() -> None:
    store: PrefixStore[Sheet] = PrefixStore(25)
    store.insert("", np.zeros(BLOCK, dtype=np.int64), Sheet("a"))
    store.clear()
    assert (len(store), store.used_bytes) == (0, 0)
    assert find(store, "", np.zeros(BLOCK, dtype=np.int64)) == (0, None)
