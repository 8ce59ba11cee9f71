"""Records of the RPC: strict, sized, and refused with a reason."""

from __future__ import annotations

import msgspec
import pytest

from moorage.core.errors import EnvServerError
from moorage.env import protocol as wire

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
