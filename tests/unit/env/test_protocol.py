"""Records of the RPC: strict, sized, and refused with a reason; leases: one run, newest attempt."""

from __future__ import annotations

import msgspec
import pytest

from moorage.core.errors import EnvServerError
from moorage.env import protocol as wire
from moorage.env.leases import Holder, Leases

WHO = {"token": "t", "run_id": "r", "attempt": 1, "source": "train/a"}


def encode(**fields: object) -> bytes:
    return msgspec.msgpack.encode({**WHO, **fields})


def test_every_record_survives_the_wire() -> None:
    run = wire.RunGroup(
        **WHO,
        task=msgspec.Raw(wire.encode({"prompt": "x"})),
        model="m",
        endpoint="http://e",
        policy_version=None,
        sampling=msgspec.Raw(wire.encode({})),
        deadline_s=1.0,
        n=3,
    )
    again = wire.decode_request(b"run_group", wire.encode(run))
    assert isinstance(again, wire.RunGroup)
    assert msgspec.msgpack.decode(again.task) == {"prompt": "x"}
    assert again.n == 3


@pytest.mark.parametrize(
    ("method", "body", "named"),
    [
        (b"sample", encode(stream="s", limitt=3), "limitt"),
        (b"sample", encode(), "stream"),
        (b"sample", encode(stream=4), r"\$.stream"),
        (b"cancel", encode(ids="abc"), r"\$.ids"),
        (b"ping", b"\xc1", "ping"),
        (b"ping", b"", "ping"),
    ],
)
def test_a_body_that_does_not_fit_is_refused_by_the_name_of_the_field(
    method: bytes, body: bytes, named: str
) -> None:
    with pytest.raises(EnvServerError, match=named) as caught:
        wire.decode_request(method, body)
    assert caught.value.kind == "bad_request"


def test_an_unknown_method_names_the_valid_ones() -> None:
    with pytest.raises(EnvServerError, match=r"'sampel'.*sample") as caught:
        wire.decode_request(b"sampel", encode())
    assert caught.value.kind == "unknown_method"


def test_a_message_above_the_limit_is_named_with_both_sizes() -> None:
    with pytest.raises(EnvServerError, match="the reply is 11 bytes, above the limit of 10"):
        wire.check_size("the reply", 11, 10)
    wire.check_size("the reply", 10, 10)


def test_errors_keep_their_kind_over_the_wire() -> None:
    error = wire.decode_error(wire.encode_error("deadline", "late"))
    assert (error.kind, str(error)) == ("deadline", "late")
    assert wire.decode_error(b"\xc1").kind == "bad_request"


def test_a_token_is_compared_whole() -> None:
    assert wire.is_token("secret", "secret")
    assert not wire.is_token("secre", "secret")
    assert not wire.is_token("", "secret")


def test_request_ids_can_name_a_folder_and_nothing_above_it() -> None:
    assert wire.REQUEST_ID.fullmatch(b"0a1b-run-7")
    for bad in (b"", b"../x", b"a/b", b"a.b", b"x" * 65, b"a\n"):
        assert not wire.REQUEST_ID.fullmatch(bad)


def test_every_kind_says_whether_it_is_infrastructure() -> None:
    assert set(wire.KINDS) - wire.INFRASTRUCTURE_KINDS == {"task_error", "cancelled", "deadline"}


A1, A2 = Holder("run", 1, "train/a"), Holder("run", 2, "train/a")


def test_a_newer_attempt_takes_over_and_the_older_is_refused_for_ever() -> None:
    leases = Leases()
    assert leases.hello(A1, 0.0) == []
    assert leases.hello(A2, 1.0) == [A1]
    with pytest.raises(EnvServerError, match="attempt 2 has taken over"):
        leases.check(A1, 2.0)
    leases.end(A2)
    with pytest.raises(EnvServerError, match="out of date"):
        leases.hello(A1, 3.0)


def test_another_run_waits_for_the_lease_and_is_told_whose_it_is() -> None:
    leases = Leases()
    leases.hello(A1, 0.0)
    other = Holder("other", 1, "train/a")
    with pytest.raises(EnvServerError, match=r"leased by run 'run' attempt 1 \(train/a\)"):
        leases.hello(other, 1.0)
    assert leases.expire(30.0) == [A1]
    assert leases.hello(other, 31.0) == []


def test_two_sources_of_one_attempt_share_a_server() -> None:
    leases = Leases()
    leases.hello(A1, 0.0)
    assert leases.hello(Holder("run", 1, "eval/b"), 0.0) == []
    assert len(leases.holders) == 2


def test_a_silent_holder_loses_its_lease_until_it_says_hello() -> None:
    leases = Leases()
    leases.hello(A1, 0.0)
    leases.check(A1, 20.0)
    assert leases.expire(49.0) == []
    assert leases.expire(50.0) == [A1]
    with pytest.raises(EnvServerError, match="lease lost"):
        leases.check(A1, 51.0)
    leases.hello(A1, 52.0)
    leases.check(A1, 53.0)


def test_a_server_of_a_run_serves_no_other() -> None:
    leases = Leases("run", 2)
    with pytest.raises(EnvServerError, match="belongs to run 'run'"):
        leases.hello(Holder("other", 1, "train/a"), 0.0)
    with pytest.raises(EnvServerError, match="out of date"):
        leases.hello(A1, 0.0)


def test_bye_needs_no_lease_but_the_newest_attempt() -> None:
    leases = Leases("run", 2)
    leases.check_bye(A2)
    with pytest.raises(EnvServerError, match="out of date"):
        leases.check_bye(A1)
    with pytest.raises(EnvServerError, match="cannot end"):
        leases.check_bye(Holder("other", 3, "train/a"))
