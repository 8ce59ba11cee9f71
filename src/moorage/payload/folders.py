"""Where blobs lie: spool roots, attempts, request folders, and the one way a blob file comes to be.

    <root>/<attempt key>/journal
    <root>/<attempt key>/owner.json                       pid and node of the env server
    <root>/<attempt key>/<request id>/<blob id>.safetensors
    <root>/<attempt key>/.recycled/                       files of freed blobs (recycle.py)

Promises: a blob is written under a temporary name and renamed, so a reader sees the whole blob or none; a
folder that `remove_folder` removed is gone, also when somebody wrote into it meanwhile. Does not know: who
holds a blob, budgets.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from moorage.core.errors import ConfigError, PayloadError
from moorage.core.net import node_name
from moorage.core.parent import process_birth
from moorage.core.rundir import read_json, write_json_atomic
from moorage.payload.codec import Buffer
from moorage.payload.journal import JOURNAL_NAME, Journal

SUFFIX = ".safetensors"
OWNER_NAME = "owner.json"
TMPFS = Path("/dev/shm")
_SAFE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_WRITEV_MAX = 512


def choose_spool_root(
    store: str,
    *,
    run_id: str,
    budget_bytes: int,
    spool_dir: str | Path | None = None,
    run_dir: str | Path | None = None,
    retain: str = "fetched",
) -> Path:
    """Where the spool of `store` (`<split>/<name>.<node>`) lies; nothing is created.

    `retain="checkpoint"`: in the run folder. Else `spool_dir` when given, else tmpfs when it has room for the
    whole budget, else the temporary folder.
    """
    if retain == "checkpoint":
        if run_dir is None:
            raise ConfigError('payload.retain = "checkpoint" needs a run folder; set output_dir')
        return Path(run_dir) / "spool" / store
    if spool_dir is not None:
        base = Path(spool_dir)
    elif has_room(TMPFS, budget_bytes):
        base = TMPFS
    else:
        base = Path(tempfile.gettempdir())
    return base / f"moorage-{os.getuid()}" / (_slug(run_id) or "run") / store


def has_room(folder: Path, nbytes: int) -> bool:
    """Whether a file system is there, can be written, and has `nbytes` to spare."""
    try:
        stat = os.statvfs(folder)
    except OSError:
        return False
    return os.access(folder, os.W_OK) and stat.f_bavail * stat.f_frsize >= nbytes


def attempt_keys(root: Path) -> list[str]:
    """Attempts that have a journal under `root`, by name."""
    try:
        names = os.listdir(root)
    except OSError:
        return []
    return sorted(name for name in names if os.path.exists(os.path.join(root, name, JOURNAL_NAME)))


def remove_attempt(root: Path, attempt_key: str) -> None:
    """End an attempt's journal and remove its folder with all that is in it."""
    folder = root / check_name(attempt_key, "attempt key")
    with contextlib.suppress(PayloadError):
        journal = Journal(folder / JOURNAL_NAME)
        journal.append("E", f"{time.time():.3f}")
        journal.close()
    remove_folder(folder)


def remove_folder(folder: Path) -> None:
    """Remove a folder into which somebody may still be writing; gone at the return."""
    for _ in range(100):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(0.001)
    raise PayloadError(f"spool folder {folder} cannot be removed; is it read-only?")


def make_folder(folder: Path) -> None:
    """Make a folder of a spool with its parents. Raises PayloadError naming it."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise PayloadError(f"spool folder {folder} cannot be made: {error.strerror}") from error


def write_owner(folder: Path) -> None:
    """Write down that this process is the env server whose attempt `folder` is."""
    owner = {"pid": os.getpid(), "birth": process_birth(os.getpid()), "node": node_name()}
    write_json_atomic(folder / OWNER_NAME, owner)


def owner_lives(folder: Path) -> bool:
    """Whether the env server of an attempt lives, as far as this node can tell."""
    owner = read_json(folder / OWNER_NAME)
    if owner is None:
        return False
    if owner["node"] != node_name():
        return True  # a shared file system: not ours to judge
    return process_birth(owner["pid"]) == owner["birth"]


def temporary_of(path: Path) -> Path:
    """Where a blob is written before it is renamed to `path`."""
    return path.with_suffix(".tmp")


def write_blob(path: Path, buffers: Sequence[Buffer], *, over: bool = False) -> None:
    """Write one blob, making its request's folder when need be. Raises OSError; then nothing is left.

    `over`: write over the file that lies at `temporary_of(path)`, which keeps its length if that is more.
    """
    temporary = temporary_of(path)
    fd = os.open(temporary, os.O_WRONLY | os.O_CLOEXEC) if over else _open_new(temporary)
    try:
        rest = [memoryview(buffer).cast("B") for buffer in buffers]
        while rest:
            written = os.writev(fd, rest[:_WRITEV_MAX])
            if written == 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            while rest and written >= len(rest[0]):
                written -= len(rest.pop(0))
            if written:
                rest[0] = rest[0][written:]
        os.rename(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    finally:
        os.close(fd)


def _open_new(path: Path) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    for _ in range(3):  # the request's folder goes with its last blob: make it again
        with contextlib.suppress(FileExistsError):
            path.parent.mkdir(mode=0o700)
        with contextlib.suppress(FileNotFoundError):
            return os.open(path, flags, 0o600)
    return os.open(path, flags, 0o600)


def check_name(name: str, what: str) -> str:
    """`name`, if it can be a folder's. Raises PayloadError."""
    if not _SAFE_NAME.fullmatch(name):
        raise PayloadError(f"{what} {name!r} cannot name a folder: use letters, digits, `_`, `.` and `-`")
    return name


def _slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9_-]+", "-", text).strip("-.")[:64]
