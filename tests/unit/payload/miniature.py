"""A whole run in miniature: the real spool, store, accounts and custodies, and a shell small enough to break.

`MiniRun` plays dispatcher, sinks, trainer, broker, workers and the wire between them; every hand-over of
docs/protocols.md is one method. `bugs` names hand-overs that are to go wrong: the state machine that drives
this must find each of them.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import random
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from moorage.core.errors import PayloadError
from moorage.payload.account import RECYCLED_FROM
from moorage.payload.codec import BranchArrays, encode
from moorage.payload.custody import Custody
from moorage.payload.mappings import Freed, LocalBlob, Mappings
from moorage.payload.spool import SUFFIX, Spool, remove_attempt
from moorage.payload.store import OpenBlob, Store
from moorage.records.payload import PayloadRef
from tests.unit.payload.builders import join, make_arrays

BUGS = (
    "failed encoding keeps the earlier branches",
    "cancel before the reply discards nothing",
    "cancel after the reply discards nothing",
    "worker death discards nothing",
    "lease loss discards acknowledged episodes",
    "acknowledged episode is not held",
    "dropped group is not released",
    "dispatcher keeps what it handed over",
    "filtered trace is not released",
    "pruned sample is released and shipped",
    "stale sample is forgotten",
    "eval episode is not released",
    "sink keeps what it shipped",
    "failed fetch is not deleted",
    "two ranks delete under two names",
    "refused delete is forgotten",
    "repeated delete changes its holder",
    "service restart loses its journal",
    "take-over forgets the older attempt",
    "take-over discards what it adopted",
    "queue is not released at shutdown",
    "trainer does not release at shutdown",
    "file is recycled before the journal says freed",
    "sender does not look again",
    "mapped reader does not look again",
)


@dataclass
class Episode:
    request: str
    split: str
    ids: list[str] = field(default_factory=list)
    state: str = "running"


@dataclass
class Sending:
    """A blob that the service is about to send, or has sent in part, to a peer that reads slowly."""

    id: str
    blob: OpenBlob
    pieces: Iterator[memoryview | bytes]
    sent: bytes


class MiniRun:
    def __init__(self, bugs: frozenset[str] = frozenset()) -> None:
        base = "/dev/shm" if Path("/dev/shm").is_dir() else None
        self.root = Path(tempfile.mkdtemp(prefix="mini-run-", dir=base))
        self.bugs = bugs
        self.attempt = 0
        self.pending: dict[str, str] = {}
        self.fault: str | None = None
        self.lost: set[str] = set()
        self.num = 0
        self.episodes: list[Episode] = []
        self.batches: list[list[str]] = []
        self.contents: dict[str, bytes] = {}
        self.mappings = Mappings()
        self.readings: list[tuple[str, Path, LocalBlob | mmap.mmap]] = []
        self.sendings: list[Sending] = []
        self._start_attempt()
        self.store = Store(self.root)

    def _start_attempt(self) -> None:
        self.attempt += 1
        self.spool = Spool(self.root, f"run.{self.attempt}", 1 << 30, remember=1000)
        self.worker = Spool(self.root, f"run.{self.attempt}", 1 << 30)
        self.custody = {name: Custody(name) for name in ("dispatcher", "train_sink", "eval_sink", "trainer")}
        self.episodes, self.batches = [], []

    # env server

    def dispatch(self, split: str) -> None:
        self.num += 1
        self.episodes.append(Episode(f"r{self.num}", split))

    def finish(self, episode: Episode, branches: int, *, large: bool = False) -> None:
        episode.ids = [self._keep(episode.request, large) for _ in range(branches)]
        episode.state = "replied"

    def _keep(self, request: str, large: bool) -> str:
        """A blob of bytes that no other has; large ones come in sizes that fit into one file."""
        arrays = make_arrays(4, seed=len(self.contents), optional=())
        if large:
            tokens = RECYCLED_FROM // 9 + 1 + len(self.contents) % 3
            ids = np.full(tokens, len(self.contents), np.int32)
            mask = np.full(tokens, len(self.contents) % 2, np.uint8)
            arrays = BranchArrays(token_ids=ids, loss_mask=mask, logprobs=ids.astype(np.float32))
        blob = encode(arrays)
        blob_id = self.worker.keep(request, blob)
        self.contents[blob_id] = join(blob)
        return blob_id

    def fail_encoding(self, episode: Episode, branches: int) -> None:
        for _ in range(branches):
            self.worker.keep(episode.request, [b"x"])
        episode.state = "gone"
        if "failed encoding keeps the earlier branches" not in self.bugs:
            self.worker.discard(episode.request)

    def crash_worker(self, episode: Episode, branches: int, stage: str) -> None:
        """SIGKILL inside keep: after `branches` whole blobs, the next is reserved, written or renamed."""
        for _ in range(branches):
            self.worker.keep(episode.request, [b"x"])
        blob_id = f"{self.num:016x}{random.getrandbits(64):016x}"
        self.worker._journal.append("R", "1", blob_id, episode.request, "1")
        folder = self.worker.folder / episode.request
        if stage != "reserved":
            folder.mkdir(exist_ok=True)
            (folder / f"{blob_id}{'.tmp' if stage == 'written' else SUFFIX}").write_bytes(b"x")
        assert self.store.open(blob_id) is None, "a blob that was never kept is served"
        episode.state = "gone"
        if "worker death discards nothing" not in self.bugs:
            self.spool.discard(episode.request)

    def cancel(self, episode: Episode) -> None:
        when = "after" if episode.state == "replied" else "before"
        episode.state = "gone"
        if f"cancel {when} the reply discards nothing" not in self.bugs:
            self.spool.discard(episode.request)

    def cancel_inside_keep(self, episode: Episode) -> None:
        """The cancel overtakes the worker's keep: the keep has to notice."""
        self.worker.keep(episode.request, [b"x"])
        if "cancel before the reply discards nothing" not in self.bugs:
            self.spool.discard(episode.request)
            with contextlib.suppress(PayloadError):
                self.worker.keep(episode.request, [b"x"])
        episode.state = "gone"

    def lose_lease(self) -> None:
        """What was replied and not acknowledged is discarded."""
        for episode in self.episodes:
            acknowledged = (
                episode.state == "owned" and "lease loss discards acknowledged episodes" in self.bugs
            )
            if episode.state == "replied" or acknowledged:
                self.spool.discard(episode.request)
                episode.state = "gone" if episode.state == "replied" else episode.state

    # orchestrator

    def acknowledge(self, episode: Episode) -> None:
        episode.state = "owned"
        if "acknowledged episode is not held" not in self.bugs:
            self.custody["dispatcher"].hold(episode.request, map(ref, episode.ids))

    def drop_group(self, episode: Episode) -> None:
        episode.state = "gone"
        refs = self.custody["dispatcher"].release_key(episode.request)
        if "dropped group is not released" not in self.bugs:
            self.release(refs, "dispatcher")

    def to_sink(self, episode: Episode) -> None:
        sink = "train_sink" if episode.split == "train" else "eval_sink"
        if "dispatcher keeps what it handed over" in self.bugs:
            refs = [h.ref for h in self.custody["dispatcher"].outstanding if h.key == episode.request]
        else:
            refs = self.custody["dispatcher"].hand_over_key(episode.request, sink)
        self.custody[sink].hold(episode.request, refs)
        episode.state = sink

    def end_eval(self, episode: Episode) -> None:
        episode.state = "gone"
        refs = self.custody["eval_sink"].release_key(episode.request)
        if "eval episode is not released" not in self.bugs:
            self.release(refs, "eval_sink")

    def filter(self, episode: Episode, *, stale: bool) -> None:
        episode.state = "gone"
        refs = self.custody["train_sink"].release_key(episode.request)
        bug = "stale sample is forgotten" if stale else "filtered trace is not released"
        if bug not in self.bugs:
            self.release(refs, "train_sink")

    def ship(self, episode: Episode, prune: int) -> None:
        """All but the first `prune` samples of the episode go into a batch."""
        episode.state = "shipped"
        sink, ids = self.custody["train_sink"], list(self.custody["train_sink"].ids(episode.request))
        pruned, shipped = ids[:prune], ids[prune:]
        if "pruned sample is released and shipped" in self.bugs:
            self.release(map(ref, pruned), "train_sink")
            shipped = ids
        else:
            self.release(sink.release(pruned), "train_sink")
        if "sink keeps what it shipped" not in self.bugs:
            sink.hand_over(shipped, "trainer")
        self.custody["trainer"].hold(episode.request, map(ref, shipped))
        self.batches.append(shipped)

    # trainer

    def train(self, failing: int, *, mapped: bool = False) -> None:
        """Fetch the oldest batch (the first `failing` of its fetches fail), agree, delete all of it."""
        batch = self.batches.pop(0)
        for blob_id in batch[failing:]:
            data = self._fetch(blob_id, mapped)
            if data is None and blob_id in self.lost:
                continue  # its server died: the micro batch is dropped, the delete is answered 404
            assert data is not None, f"the trainer holds {blob_id}, but it cannot be fetched"
            assert data == self.contents[blob_id], "the trainer has another blob's bytes"
        forgotten = batch[:failing] if "failed fetch is not deleted" in self.bugs else []
        refs = [r for r in self.custody["trainer"].release(batch) if r.id not in forgotten]
        self.release(refs, "trainer")
        if "two ranks delete under two names" in self.bugs:
            self.release(refs, "train_sink")

    # readers

    def _fetch(self, blob_id: str, mapped: bool) -> bytes | None:
        if mapped:
            entry = self.spool.find(blob_id)
            blob = self.mappings.open(self.spool.path_of(entry), entry.nbytes) if entry else None
            return copy_of(blob) if blob else None
        opened = self.store.open(blob_id)
        if opened is None:
            return None
        try:
            return os.pread(opened.fd, opened.nbytes, 0)
        finally:
            os.close(opened.fd)

    def start_reading_of(self, blob_id: str) -> None:
        """A reader on this host maps a blob and is held up before it copies."""
        entry = self.spool.find(blob_id)
        assert entry is not None
        path = self.spool.path_of(entry)
        if "mapped reader does not look again" in self.bugs:
            with path.open("rb") as file:
                blob = mmap.mmap(file.fileno(), entry.nbytes, prot=mmap.PROT_READ)
        else:
            blob = self.mappings.open(path, entry.nbytes)
            assert blob is not None
        self.readings.append((entry.id, path, blob))

    def end_reading(self) -> None:
        blob_id, path, blob = self.readings.pop(0)
        try:
            data = copy_of(blob) if isinstance(blob, LocalBlob) else blob[:]
        except Freed:
            assert not path.exists(), "a blob that is there is said to be freed"
            return
        assert data == self.contents[blob_id], "a mapped reader has another blob's bytes"

    def start_sending_of(self, blob_id: str) -> None:
        """The service sends the first piece of a blob, and its peer is not ready for the next."""
        blob = self.store.open(blob_id)
        assert blob is not None
        if "sender does not look again" in self.bugs:
            pieces = (os.pread(blob.fd, n, at) for at, n in ((0, 1), (1, blob.nbytes - 1)))
        else:
            pieces = blob.pieces(0, blob.nbytes)
        self.sendings.append(Sending(blob_id, blob, pieces, bytes(next(pieces))))

    def end_sending(self) -> None:
        sending = self.sendings.pop(0)
        path, wanted = sending.blob.path, self.contents[sending.id]
        try:
            sending.sent += b"".join(map(bytes, sending.pieces))
        except Freed:
            assert not path.exists(), "a blob that is there is said to be freed"
            assert len(sending.sent) < len(wanted), "a peer takes what it got for the whole blob"
        else:
            assert sending.sent == wanted, "a peer was sent another blob's bytes"
        finally:
            os.close(sending.blob.fd)

    # the wire

    def release(self, refs, by: str) -> None:
        """As the client: what is not answered stays pending and goes with the next call."""
        self.pending |= {r.id: by for r in refs}
        fault, self.fault = self.fault, None
        holders = sorted(set(self.pending.values()))
        for holder in holders:
            ids = [blob_id for blob_id, name in self.pending.items() if name == holder]
            if fault == "refused" and "file is recycled before the journal says freed" in self.bugs:
                for entry in filter(None, map(self.spool.find, ids)):
                    self.spool.recycle_file(entry)
            if fault != "refused":
                unknown = self.store.free(ids, holder).unknown
                self.store.settle()
                assert unknown == len(self.lost & set(ids)), "a payload was freed that nobody kept"
            if fault is None or (fault == "refused" and "refused delete is forgotten" in self.bugs):
                for blob_id in ids:
                    del self.pending[blob_id]
            elif fault == "lost" and "repeated delete changes its holder" in self.bugs:
                self.pending |= dict.fromkeys(ids, "dispatcher" if holder != "dispatcher" else "trainer")

    def restart_service(self) -> None:
        self.store.close()
        if "service restart loses its journal" in self.bugs:
            journal = self.spool.folder / "journal"
            journal.write_bytes(b"")
        self.store = Store(self.root)

    # endings

    def take_over(self, *, adopt: bool) -> None:
        """Orchestrator or trainer crashed: a newer attempt says hello, adopting what READY batches name."""
        shipped = [blob_id for batch in self.batches for blob_id in batch]
        wanted = [blob_id for blob_id in shipped if blob_id not in self.lost and adopt]
        older, old_spools = f"run.{self.attempt}", (self.spool, self.worker)
        batches = self.batches
        self._start_attempt()
        if "take-over discards what it adopted" in self.bugs:
            old_spools[0].discard_all("env_server")
        adopted = self.spool.adopt(wanted)
        assert set(adopted) == set(wanted), "an adopted payload was gone"
        if "take-over forgets the older attempt" not in self.bugs:
            old_spools[0].discard_all("env_server")
            remove_attempt(self.root, older)
        for spool in old_spools:
            spool.close()
        for number, batch in enumerate(batches if adopt else []):
            kept = [blob_id for blob_id in batch if blob_id in adopted]
            self.custody["trainer"].hold(f"adopted{number}.{self.attempt}", map(ref, kept))
            self.batches.append(kept)
        self.pending.clear()  # died with the processes that owed them; the attempt they belonged to is gone

    def crash_server(self) -> None:
        """The env server dies whole, another takes its place: what it kept is lost, others still hold it."""
        older = self.spool
        custody, batches = self.custody, self.batches
        self.lost |= {entry.id for entry in older.outstanding()} | set(self.pending)
        older.close()
        self.worker.close()
        self._start_attempt()
        self.custody, self.batches = custody, batches
        remove_attempt(self.root, older.folder.name)

    def stop(self) -> None:
        """An orderly end: every holder releases, then `bye` frees what nobody acknowledged."""
        for name, custody in self.custody.items():
            forgets = {
                "train_sink": "queue is not released at shutdown",
                "trainer": "trainer does not release at shutdown",
            }.get(name, "")
            refs = custody.release_all()
            if forgets not in self.bugs:
                self.release(refs, name)
        self.release((), "trainer")
        for episode in self.episodes:
            if episode.state in ("running", "replied"):
                self.spool.discard(episode.request)
                episode.state = "gone"
        assert self.spool.ledger().outstanding == 0, "payloads were left for the shutdown to free"
        assert self.spool.discard_all("shutdown") == 0

    # what must always hold

    def check(self) -> None:
        owned: list[str] = [blob_id for e in self.episodes if e.state == "replied" for blob_id in e.ids]
        for custody in self.custody.values():
            owned += [holding.ref.id for holding in custody.outstanding]
        assert len(owned) == len(set(owned)), "a payload has two owners"
        ledger = self.store.ledger()
        assert ledger.kept == sum(ledger.freed.values()) + ledger.outstanding
        assert ledger.double_frees == 0, "a payload was freed twice"
        assert ledger.damaged == 0
        for entry in self.spool.outstanding():
            assert self.spool.path_of(entry).exists(), "the journal says kept, but the file is gone"
        outstanding = {held.id for held in self.store.outstanding(10**6)}
        gone = set(owned) - outstanding - self.lost
        assert not gone, f"{gone} are owned, but were freed"
        lost = outstanding - set(owned) - set(self.pending)
        assert not lost, f"{lost} belong to nobody"
        assert not (set(owned) & set(self.pending)), "a payload is owned and being freed"

    def close(self) -> None:
        for sending in self.sendings:
            os.close(sending.blob.fd)
        self.mappings.close()
        self.store.close()
        self.left_files = list(self.root.glob(f"*/*/*{SUFFIX}"))
        self.spool.close()
        self.worker.close()
        shutil.rmtree(self.root)


def copy_of(blob: LocalBlob) -> bytes:
    """The blob's bytes. Raises Freed."""
    return blob.read_into(np.empty(blob.nbytes, np.uint8)).tobytes()


def ref(blob_id: str) -> PayloadRef:
    return PayloadRef("http://127.0.0.1:1", "train/mini.node", blob_id)
