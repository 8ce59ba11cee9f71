"""The payload service as a real process: what is fetched and assembled is what was encoded (R4), and the
routes answer as docs/protocols.md section 2 says."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moorage.core.errors import PayloadError
from moorage.core.net import node_name
from moorage.core.rundir import write_json_atomic
from moorage.payload.assemble import assemble
from moorage.payload.client import PayloadClient
from moorage.payload.codec import BranchArrays, cut, encode
from moorage.payload.server import PayloadService
from moorage.payload.spool import Spool
from moorage.records.payload import PayloadRef
from moorage.records.sample import MicroBatch, TrainSample
from tests.unit.payload.builders import assert_same, branches, make_arrays, make_slice

TOKEN = "5ec4e7" * 8


class Site:
    """A spool, its service and a client."""

    def __init__(self, root: Path) -> None:
        self.spool = Spool(root / "spool", "run.1", 1 << 28)
        self.service = PayloadService(root / "spool", token=TOKEN)
        self.service.start()
        self.client = PayloadClient(TOKEN, connections=3)

    def keep(self, arrays: BranchArrays, num_tokens: int | None = None, request: str = "r"):
        blob_id = self.spool.keep(request, encode(arrays))
        return make_slice(arrays, blob_id, self.service.url, "train/x.node", num_tokens)

    def ledger(self):
        return self.client.ledger(self.service.url)

    def close(self) -> None:
        self.client.close()
        self.service.stop()
        self.spool.close()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    site = Site(tmp_path_factory.mktemp("site"))
    yield site
    site.close()


def raw(site: Site, text: str, *, token: str = TOKEN) -> tuple[int, dict[str, str], bytes]:
    """One request on a connection of its own."""
    head, _, body = text.partition("\n\n")
    lines = head.split("\n")
    request = "\r\n".join(
        [f"{lines[0]} HTTP/1.1", f"Authorization: Bearer {token}", "Connection: close", *lines[1:]]
    )
    with socket.create_connection(("127.0.0.1", site.service.port), timeout=10) as peer:
        peer.sendall(f"{request}\r\n\r\n{body}".encode())
        data = b""
        while chunk := peer.recv(65536):
            data += chunk
    answer, _, rest = data.partition(b"\r\n\r\n")
    first, *headers = answer.decode().split("\r\n")
    return int(first.split()[1]), dict(h.lower().split(": ", 1) for h in headers), rest


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(branches(max_tokens=60), st.floats(0, 1)), min_size=1, max_size=4))
def test_what_is_fetched_is_what_was_kept_cut_to_the_slice(site, batch) -> None:
    slices = [site.keep(arrays, round(share * arrays.num_tokens)) for arrays, share in batch]
    fetched = site.client.fetch(slices, 20)
    for piece, (arrays, _) in zip(slices, batch, strict=True):
        assert_same(fetched[piece.id], cut(arrays, piece.num_tokens))
    assert site.client.release(slices, "trainer") == len(slices)


def test_every_cut_of_a_large_blob_arrives_whether_whole_or_by_ranges(site) -> None:
    arrays = make_arrays(6000, seed=5, routing=(12, 4), head_k=16, prompt=500)
    blob_id = site.keep(arrays).id
    before = site.client.counts.bytes_http
    for num_tokens in (0, 1, 499, 500, 501, 2999, 3000, 3001, 6000):
        piece = make_slice(arrays, blob_id, site.service.url, num_tokens=num_tokens)
        fetched = site.client.fetch([piece], 20)[blob_id]
        assert_same(fetched, cut(arrays, num_tokens))
        sent = site.client.counts.bytes_http - before
        before += sent
        kept = sum(array.nbytes for array in cut(arrays, num_tokens).present().values())
        assert sent == (kept if num_tokens < 3000 else piece.nbytes)
    site.client.release([piece], "trainer")


def test_assembly_of_fetched_payloads_equals_assembly_of_the_encoded_arrays(site) -> None:
    rng = np.random.default_rng(1)
    originals, samples = {}, []
    for seed in range(6):
        arrays = make_arrays(int(rng.integers(2, 50)), seed=seed)
        piece = site.keep(arrays, int(rng.integers(1, arrays.num_tokens + 1)))
        originals[piece.id] = arrays
        samples.append(TrainSample(piece, (), "env"))
    micro = MicroBatch(tuple(samples))
    expected = assemble(micro, originals, pad_multiple=8)
    fetched = assemble(micro, site.client.fetch([s.payload for s in samples], 20), pad_multiple=8)
    for name in (
        "token_ids",
        "positions",
        "loss_mask",
        "logprobs",
        "seq_lens",
        "routed_experts",
        "content_mask",
    ):
        assert getattr(fetched, name).tobytes() == getattr(expected, name).tobytes(), name
    for pair in ("sampling", "head"):
        for one, other in zip(getattr(fetched, pair), getattr(expected, pair), strict=True):
            assert one.tobytes() == other.tobytes(), pair
    site.client.release([s.payload for s in samples], "trainer")


def test_delete_answers_and_counts(site) -> None:
    before, piece = site.ledger(), site.keep(make_arrays(5))
    assert raw(site, f"DELETE /{piece.id}?by=trainer")[0] == 204
    assert raw(site, f"DELETE /{piece.id}?by=trainer")[0] == 204
    assert raw(site, f"DELETE /{piece.id}?by=train_sink")[0] == 204
    assert raw(site, f"DELETE /{'0' * 32}?by=trainer")[0] == 404
    assert raw(site, f"DELETE /{piece.id}?by=nobody")[0] == 400
    assert raw(site, f"GET /{piece.id}")[0] == 404
    after = site.ledger()
    assert after.freed["trainer"] - before.freed["trainer"] == 1
    assert after.double_frees - before.double_frees == 1
    assert after.unknown - before.unknown == 1


def test_bulk_release_answers_freed_and_unknown(site) -> None:
    ids = [site.keep(make_arrays(5)).id for _ in range(3)]
    body = json.dumps({"ids": [*ids, "f" * 32, ids[0]], "by": "eval_sink"})
    status, _, answer = raw(site, f"POST /release\nContent-Length: {len(body)}\n\n{body}")
    assert (status, json.loads(answer)) == (200, {"freed": 3, "unknown": 1})
    status, _, answer = raw(site, f"POST /release\nContent-Length: {len(body)}\n\n{body}")
    assert (status, json.loads(answer)) == (200, {"freed": 0, "unknown": 1})
    for bad in ("{}", "[]", '{"ids": [1], "by": "trainer"}', '{"ids": [], "by": "x"}'):
        assert raw(site, f"POST /release\nContent-Length: {len(bad)}\n\n{bad}")[0] == 400


def test_ranges_are_honoured(site) -> None:
    arrays = make_arrays(50)
    piece = site.keep(arrays)
    blob = b"".join(bytes(buffer) for buffer in encode(arrays))
    assert raw(site, f"GET /{piece.id}")[2] == blob
    status, headers, body = raw(site, f"GET /{piece.id}\nRange: bytes=5-24")
    assert (status, body) == (206, blob[5:25])
    assert headers["content-range"] == f"bytes 5-24/{len(blob)}"
    assert raw(site, f"GET /{piece.id}\nRange: bytes=-3")[2] == blob[-3:]
    assert raw(site, f"GET /{piece.id}\nRange: bytes={len(blob)}-")[0] == 416
    site.client.release([piece], "trainer")


def test_nobody_is_served_without_the_token(site) -> None:
    piece = site.keep(make_arrays(5))
    for route in (
        f"GET /{piece.id}",
        f"DELETE /{piece.id}?by=trainer",
        "GET /stats",
        "GET /../../etc/passwd",
    ):
        assert raw(site, route, token="0" * 48)[0] == 401
        assert raw(site, route, token="")[0] == 401
    with PayloadClient("wrong") as stranger:
        error = stranger.fetch([piece], 5)[piece.id]
        assert isinstance(error, PayloadError)
        assert "401" in str(error)
    assert raw(site, "GET /../../etc/passwd")[0] == 404
    assert raw(site, "PUT /x")[0] == 405
    assert site.client.release([piece], "trainer") == 1


def test_heads_and_bodies_are_bounded(site) -> None:
    assert raw(site, "GET /stats\nX: " + "x" * 20_000)[0] == 431
    assert raw(site, "GET /stats" + "\nX: y" * 100)[0] == 431
    assert raw(site, "POST /release\nContent-Length: 99999999")[0] == 413


def test_proxy_settings_are_ignored(site, monkeypatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    piece = site.keep(arrays := make_arrays(5))
    with PayloadClient(TOKEN) as client:
        assert_same(client.fetch([piece], 5)[piece.id], arrays)
        assert client.release([piece], "trainer") == 1


def test_stats_name_who_is_oldest(site) -> None:
    pieces = [site.keep(make_arrays(5), request=f"asked{n}") for n in range(2)]
    stats = json.loads(site.client.stats(site.service.url, outstanding=100))
    held = [item for item in stats["held"] if item["id"] in {piece.id for piece in pieces}]
    assert [item["request"] for item in held] == ["asked0", "asked1"]
    assert all(item["attempt"] == "run.1" and item["age_s"] >= 0 for item in held)
    assert stats["outstanding"] >= 2
    site.client.release(pieces, "trainer")


def test_a_store_on_this_host_is_mapped_with_the_same_accounting(site, tmp_path) -> None:
    def publish(**change) -> None:
        address = {
            "rpc": "tcp://127.0.0.1:1",
            "payload": site.service.url,
            "store": "x.node",
            "node": node_name(),
            "pid": os.getpid(),
            "spool": str(site.spool.folder),
            "run_id": "run",
            "attempt": 1,
        }
        write_json_atomic(tmp_path / "envs" / "train" / "x.node.address", address | change)

    arrays = make_arrays(500)
    publish()
    piece = site.keep(arrays, 200)
    with PayloadClient(TOKEN, run_dir=tmp_path) as client:
        assert_same(client.fetch([piece], 5)[piece.id], cut(arrays, 200))
        assert (client.counts.bytes_mapped, client.counts.bytes_http) == (piece.nbytes, 0)
        assert client.release([piece], "trainer") == 1
        gone = client.fetch([piece], 5)[piece.id]
        assert isinstance(gone, PayloadError)
        assert "404" in str(gone)
    for change in ({"node": "elsewhere"}, {"spool": str(tmp_path / "nowhere")}):
        publish(**change)
        piece = site.keep(arrays)
        with PayloadClient(TOKEN, run_dir=tmp_path) as client:
            assert_same(client.fetch([piece], 5)[piece.id], arrays)
            assert (client.counts.bytes_mapped, client.counts.bytes_http) == (0, piece.nbytes)
            client.release([piece], "trainer")
    publish(spool=str(site.spool.root))
    piece = site.keep(arrays)
    moved = PayloadRef("http://127.0.0.1:9", "train/x.node", piece.id)
    with PayloadClient(TOKEN, run_dir=tmp_path) as client:
        assert_same(client.fetch([piece], 5)[piece.id], arrays)
        assert client.counts.bytes_mapped == piece.nbytes
        assert client.release([moved], "trainer", deadline_s=5) == 1, (
            "the address file's url is the one of now"
        )


def test_the_service_holds_no_payload_in_memory(site) -> None:
    def rss() -> int:
        status = Path(f"/proc/{site.service.pid}/status").read_text()
        return int(status.split("RssAnon:")[1].split()[0]) * 1024

    arrays = make_arrays(20_000, routing=(24, 8), optional=("routed_experts",))
    site.client.fetch([piece := site.keep(arrays)], 20)
    before = rss()
    for _ in range(5):
        piece = site.keep(arrays)
        assert not isinstance(site.client.fetch([piece], 20)[piece.id], PayloadError)
        site.client.release([piece], "trainer")
    assert rss() - before < piece.nbytes


def test_a_readers_memory_is_flat_over_steps(site) -> None:
    def rss() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    arrays = make_arrays(20_000, routing=(24, 8), optional=("routed_experts",))
    after: list[int] = []
    for _ in range(12):
        pieces = [site.keep(arrays) for _ in range(4)]
        fetched = site.client.fetch(pieces, 20)
        assert all(isinstance(payload, BranchArrays) for payload in fetched.values())
        del fetched
        site.client.release(pieces, "trainer")
        after.append(rss())
    assert after[-1] - after[1] < pieces[0].nbytes
    assert site.client.pending_releases == []


def test_a_wildcard_bind_advertises_a_concrete_host(tmp_path) -> None:
    spool = Spool(tmp_path, "run.1", 1 << 20)
    piece_id = spool.keep("r", encode(arrays := make_arrays(5)))
    with PayloadService(tmp_path, "0.0.0.0", token=TOKEN) as service, PayloadClient(TOKEN) as client:
        assert "0.0.0.0" not in service.url
        piece = make_slice(arrays, piece_id, service.url)
        assert_same(client.fetch([piece], 10)[piece_id], arrays)
    spool.close()


def test_a_newer_attempt_is_served_without_a_restart(tmp_path) -> None:
    old = Spool(tmp_path, "run.1", 1 << 20)
    kept, dropped = (old.keep("r", encode(arrays := make_arrays(5))) for _ in range(2))
    with PayloadService(tmp_path, token=TOKEN) as service, PayloadClient(TOKEN) as client:
        assert client.ledger(service.url).outstanding == 2
        new = Spool(tmp_path, "run.2", 1 << 20)
        assert new.adopt([kept]) == (kept,)
        new.remove_attempt("run.1")
        fetched = client.fetch([make_slice(arrays, i, service.url) for i in (kept, dropped)], 5)
        assert_same(fetched[kept], arrays)
        assert isinstance(fetched[dropped], PayloadError)
        ledger = client.ledger(service.url)
        assert (ledger.kept, ledger.outstanding) == (1, 1)
        new.close()
    old.close()


def test_the_service_ends_with_its_parent_and_on_sigterm(tmp_path) -> None:
    service = PayloadService(tmp_path, token=TOKEN)
    service.start()
    pid = service.pid
    assert pid is not None
    os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + 10
    while service.alive() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not service.alive()
    service.stop()


def test_a_port_in_use_is_named(site, tmp_path) -> None:
    with pytest.raises(PayloadError, match=f"{site.service.port}.*in use"):
        PayloadService(tmp_path, port=site.service.port, token=TOKEN).start()
    with pytest.raises(PayloadError, match="token"):
        PayloadService(tmp_path)
