"""The account: whatever order events come in, kept = freed + outstanding and nothing is freed twice."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from moorage.payload.account import Account, footprint
from moorage.payload.journal import Event
from moorage.records.payload import HOLDERS

IDS = [f"{n:032x}" for n in range(5)]
REQUESTS = ["r0", "r1"]


def act(account: Account, kind: str, *fields: str):
    return account.apply(Event(kind, "t", fields))


def keep(account: Account, blob_id: str, request: str = "r0", nbytes: int = 10, at: float = 1.0) -> None:
    act(account, "R", str(at), blob_id, request, str(nbytes))
    act(account, "K", blob_id)


ids, requests, holders = st.sampled_from(IDS), st.sampled_from(REQUESTS), st.sampled_from(HOLDERS)
sizes = st.one_of(st.integers(0, 99), st.integers(1 << 20, 1 << 24))
any_event = st.one_of(
    st.tuples(st.just("R"), st.just("1"), ids, requests, sizes.map(str)),
    st.tuples(st.just("K"), ids),
    st.tuples(st.just("X"), ids),
    st.tuples(st.just("F"), st.just("2"), holders, ids, ids),
    st.tuples(st.just("D"), st.just("2"), holders, requests),
)


@given(st.lists(any_event, max_size=40))
def test_every_history_balances(history) -> None:
    account, freed = Account(), []
    for kind, *fields in history:
        freed += [entry.id for entry in act(account, kind, *fields).freed]
        ledger = account.ledger(now=5.0)
        kept = list(account.kept())
        assert ledger.kept == sum(ledger.freed.values()) + ledger.outstanding
        assert ledger.outstanding == len(kept)
        assert ledger.outstanding_bytes == sum(entry.nbytes for entry in kept)
        assert account.held_bytes == sum(footprint(entry.nbytes) for entry in account.entries.values())
        assert account.peak_bytes >= account.held_bytes
        assert len(freed) == sum(ledger.freed.values())
        assert all(entry.request not in account.discarded for entry in account.entries.values())


@given(st.lists(any_event, max_size=40))
def test_forgetting_freed_ids_changes_no_balance(history) -> None:
    """What workers and mapping readers replay agrees with the service on what is there."""
    full, light = Account(), Account(remember=0)
    for kind, *fields in history:
        act(full, kind, *fields)
        act(light, kind, *fields)
        assert full.entries == light.entries
        assert full.held_bytes == light.held_bytes


def test_a_repeat_counts_nothing_and_another_holder_is_a_double_free() -> None:
    account = Account()
    keep(account, IDS[0])
    assert [entry.id for entry in act(account, "F", "1", "trainer", IDS[0]).freed] == [IDS[0]]
    assert act(account, "F", "1", "trainer", IDS[0]).repeated == 1
    assert act(account, "F", "1", "train_sink", IDS[0]).double == 1
    assert act(account, "F", "1", "trainer", IDS[1]).unknown == 1
    ledger = account.ledger(now=2.0)
    assert (ledger.kept, ledger.freed["trainer"], ledger.double_frees, ledger.unknown) == (1, 1, 1, 1)


def test_a_discard_frees_what_is_kept_and_voids_what_is_not_yet() -> None:
    account = Account()
    keep(account, IDS[0])
    act(account, "R", "1", IDS[1], "r0", "10")
    keep(account, IDS[2], request="r1")
    assert [entry.id for entry in act(account, "D", "2", "env_server", "r0").freed] == [IDS[0]]
    act(account, "K", IDS[1])
    keep(account, IDS[3], request="r0")
    ledger = account.ledger(now=2.0)
    assert (ledger.kept, ledger.freed["env_server"], ledger.outstanding) == (2, 1, 1)
    assert account.held_bytes == 10


def test_the_oldest_outstanding_blob_has_an_age() -> None:
    account = Account()
    keep(account, IDS[0], at=10.0)
    keep(account, IDS[1], at=20.0)
    assert account.ledger(now=50.0).oldest_s == 40.0
    act(account, "F", "1", "trainer", IDS[0])
    assert account.ledger(now=50.0).oldest_s == 30.0


def test_only_so_many_freed_ids_are_remembered() -> None:
    account = Account(remember=2)
    for blob_id in IDS[:4]:
        keep(account, blob_id)
        act(account, "F", "1", "trainer", blob_id)
    assert act(account, "F", "1", "dispatcher", IDS[3]).double == 1
    assert act(account, "F", "1", "dispatcher", IDS[0]).unknown == 1
