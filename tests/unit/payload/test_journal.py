"""The journal: whole lines count in file order, torn ones hurt nobody."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moorage.core.errors import PayloadError
from moorage.payload.journal import Event, Journal, make_line, parse_line

words = st.text(alphabet="abcdef0123456789._-", min_size=1, max_size=12)
events = st.builds(Event, st.sampled_from("RKXFDME"), words, st.lists(words, max_size=4).map(tuple))


@given(events)
def test_a_line_is_read_back(event) -> None:
    assert parse_line(make_line(event).strip(b"\n")) == event


@given(st.lists(st.tuples(events, st.none() | st.floats(0, 1)), max_size=12), st.integers(1, 50))
def test_torn_lines_are_skipped_and_the_others_keep_their_order(tmp_path_factory, plan, chunk) -> None:
    """`plan`: events, each with the share of its line that was written before its writer was killed."""
    path = tmp_path_factory.mktemp("journal") / "journal"
    journal = Journal(path, create=True)
    expected, seen = [], []
    with path.open("ab", buffering=0) as file:
        for event, share in plan:
            line = make_line(event)
            stop = len(line) if share is None else int(share * (len(line) - 1))
            whole = stop >= len(line) - 1
            if whole:
                expected.append(event)
            for start in range(0, stop, chunk):  # a reader may look in the middle of a write
                file.write(line[start : min(stop, start + chunk)])
                seen.extend(journal.read_new())
        file.write(b"\n")
    seen.extend(journal.read_new())
    assert seen == expected
    journal.close()


def test_a_writer_finds_its_own_events_among_others(tmp_path: Path) -> None:
    one, other = Journal(tmp_path / "j", create=True), Journal(tmp_path / "j")
    tags = [one.append("K", "a"), other.append("K", "b"), one.append("K", "c")]
    assert [event.tag for event in one.read_new()] == tags
    assert [event.fields for event in other.read_new()] == [("a",), ("b",), ("c",)]
    assert len(set(tags)) == 3
    one.close()
    other.close()


def test_a_journal_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    with pytest.raises(PayloadError, match="missing/journal"):
        Journal(tmp_path / "missing" / "journal", create=True)


def test_the_lock_has_a_deadline(tmp_path: Path) -> None:
    one, other = Journal(tmp_path / "j", create=True), Journal(tmp_path / "j")
    with one.lock(0), pytest.raises(PayloadError, match="stays locked"), other.lock(0):
        pass
    with other.lock(0):
        pass
    one.close()
    other.close()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_said_so() -> None:
    journal = Journal(Path("/dev/full"))
    with pytest.raises(PayloadError, match="no space left"):
        journal.append("K", "a")
    journal.close()
