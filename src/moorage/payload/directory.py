"""Where a store is: its url, and its files when it lies on this host.

A reference names its store (`<split>/<name>.<node>`); the address file `envs/<split>/<name>.<node>.address`
of the run folder says the url of now (after a restart it is another one) and the spool. Promises:

- without a run folder or an address file the url of the reference serves; a null url means: not yet;
- a store of this node is read from its own journal and files (`mappings.py`), so a blob that was freed is not
  found, exactly as over HTTP; whatever goes wrong there is no error, the caller goes on over HTTP.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from pathlib import Path
from typing import Any

from moorage.core.errors import PayloadError
from moorage.core.net import node_name
from moorage.core.rundir import read_json
from moorage.payload.journal import JOURNAL_NAME
from moorage.payload.mappings import LocalBlob, Mappings
from moorage.payload.spool import Spool, attempt_keys
from moorage.records.payload import PayloadRef, PayloadSlice

_FRESH_S = 1.0


class LocalStore:
    """Blob files of the attempts under one spool folder, read only."""

    def __init__(self, spool: Path, mappings: Mappings) -> None:
        self._spool = spool
        self._mappings = mappings
        self._lock = threading.Lock()
        self._attempts: dict[str, Spool] = {}

    def open(self, blob_id: str) -> LocalBlob | None:
        """The blob, or None when it is not there whole."""
        with self._lock:
            found = self._find(blob_id)
            if found is None:
                self._refresh()
                found = self._find(blob_id)
        return None if found is None else self._mappings.open(*found)

    def _find(self, blob_id: str) -> tuple[Path, int] | None:
        for spool in reversed(self._attempts.values()):
            if (entry := spool.find(blob_id)) is not None:
                return spool.path_of(entry), entry.nbytes
        return None

    def _refresh(self) -> None:
        root, keys = self._spool, attempt_keys(self._spool)
        if (self._spool / JOURNAL_NAME).exists():  # the address file named the attempt's own folder
            root, keys = self._spool.parent, [self._spool.name]
        for key in keys:
            if key not in self._attempts:
                with contextlib.suppress(PayloadError):
                    self._attempts[key] = Spool(root, key, create=False, writable=False)
        for key, spool in list(self._attempts.items()):
            spool.catch_up()
            if spool.ended:
                del self._attempts[key]
                spool.close()

    def close(self) -> None:
        with self._lock:
            for spool in self._attempts.values():
                spool.close()
            self._attempts.clear()


class StoreDirectory:
    """Looks stores up in a run folder's address files. Safe to use from several threads."""

    def __init__(self, run_dir: str | os.PathLike[str] | None) -> None:
        self._envs = None if run_dir is None else Path(run_dir) / "envs"
        self._lock = threading.Lock()
        self._read: dict[str, tuple[float, dict[str, Any] | None]] = {}
        self._local: dict[str, LocalStore] = {}
        self._mappings = Mappings()

    def url(self, ref: PayloadRef | PayloadSlice) -> str:
        """The payload url of the reference's store. Raises ConnectionError while it has none: it has yet to
        adopt what an earlier attempt kept, and would not find it."""
        address = self._address(ref.store)
        if address is not None and "payload" in address and address["payload"] is None:
            raise ConnectionError(f"store {ref.store} has not adopted the payloads of earlier attempts yet")
        return (address or {}).get("payload") or ref.url

    def local(self, ref: PayloadRef | PayloadSlice) -> LocalStore | None:
        """The store's files, when they are on this node."""
        address = self._address(ref.store)
        if not address or not address.get("spool") or address.get("node") != node_name():
            return None
        spool = address["spool"]
        with self._lock:
            if spool not in self._local:
                self._local[spool] = LocalStore(Path(spool), self._mappings)
            return self._local[spool]

    def _address(self, store: str) -> dict[str, Any] | None:
        if self._envs is None or not store:
            return None
        with self._lock:
            read_at, address = self._read.get(store, (-1e9, None))
            if time.monotonic() - read_at > _FRESH_S:
                address = self._load(store)
                self._read[store] = (time.monotonic(), address)
            return address

    def _load(self, store: str) -> dict[str, Any] | None:
        assert self._envs is not None
        names = [self._envs / f"{store}.address"] if "/" in store else self._envs.glob(f"*/{store}.address")
        for path in names:
            if (address := read_json(path)) is not None:
                return address
        return None

    def sweep(self) -> None:
        """Let go of the memory of files that are gone."""
        self._mappings.sweep()

    def close(self) -> None:
        with self._lock:
            for local in self._local.values():
                local.close()
            self._local.clear()
        self._mappings.close()
