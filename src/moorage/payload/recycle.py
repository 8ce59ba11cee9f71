"""Freed files that wait to be written over: a reader's page tables and the file's pages serve the next blob.

A new file in memory costs its writer the zeroing of every page and its reader a page table; both cost more
than the copy. So the service moves the files of large freed blobs to `<attempt>/.recycled/<room>-<blob id>`,
and a later blob of the same room (`account.footprint`) is written over one of them. Promises:

- a file is renamed away from its blob's path before anybody may write over it, and a path never returns (it
  holds a random id): whoever copies bytes and then still finds the file at the path has the blob's bytes;
- a file is never cut or shrunk (readers map it): it may be longer than its blob, up to the blob's room.

So bytes of such a file may only ever be copied. `sendfile` hands out the pages themselves, and they lie in
the receiver's queue, unread, for as long as it likes, also after the sender is dead.

`Recycled` is used under the journal's lock, which makes what is held and what waits here add up exactly. Does
not know: journals, who frees.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from moorage.core.errors import PayloadError
from moorage.payload.account import RECYCLED_FROM, footprint
from moorage.payload.codec import MAX_HEADER_BYTES, blob_nbytes, read_layout

FOLDER_NAME = ".recycled"


def holds(size: int, nbytes: int) -> bool:
    """Whether a file of `size` bytes can be that of a whole blob of `nbytes`."""
    return size == nbytes or (nbytes >= RECYCLED_FROM and nbytes <= size <= footprint(nbytes))


def read_nbytes(path: Path) -> int | None:
    """Size of the blob in a file that may be longer; None when a large file is no blob. Raises OSError."""
    size = path.stat().st_size
    if size < RECYCLED_FROM:
        return size
    with contextlib.suppress(PayloadError), path.open("rb") as file:
        return blob_nbytes(read_layout(file.read(8 + MAX_HEADER_BYTES)))
    return None


def names(path: Path, file: os.stat_result) -> bool:
    """Whether `path` is a name of `file`."""
    try:
        return os.path.samestat(os.stat(path), file)
    except OSError:
        return False


def lies_in_memory(folder: Path) -> bool:
    """Whether `folder` is on a tmpfs. Elsewhere there is little to gain, and a file may change its number."""
    device = os.stat(folder).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    with contextlib.suppress(OSError), open("/proc/self/mountinfo") as mounts:
        for line in mounts:
            if line.split(" ", 3)[2] == wanted:
                return line.partition(" - ")[2].startswith("tmpfs ")
    return False


class Recycled:
    """The waiting files of one attempt."""

    def __init__(self, attempt: Path) -> None:
        self._folder = attempt / FOLDER_NAME
        self._in_memory: bool | None = None

    def suits(self, nbytes: int) -> bool:
        """Whether the file of a freed blob is worth keeping. Raises OSError when the attempt is gone."""
        if nbytes < RECYCLED_FROM:
            return False
        if self._in_memory is None:
            self._in_memory = lies_in_memory(self._folder.parent)
        return self._in_memory

    def files(self) -> list[tuple[int, Path]]:
        """(room, path) of each file."""
        try:
            found = os.listdir(self._folder)
        except OSError:
            return []
        return [(int(name.partition("-")[0]), self._folder / name) for name in found]

    def put(self, path: Path, nbytes: int, room: int) -> bool:
        """Move a freed blob's file here, if all that waits then fits into `room`. Raises OSError.

        Files of other rooms make way: what is freed now is more likely to be wanted than they are.
        """
        size = footprint(nbytes)
        if not holds(os.stat(path).st_size, nbytes):
            return False
        files = self.files()
        alike = sum(other for other, _ in files if other == size)
        if alike + size > room:
            return False
        _shrink([item for item in files if item[0] != size], room - alike - size)
        self._folder.mkdir(mode=0o700, exist_ok=True)
        os.rename(path, self._folder / f"{size}-{path.name.partition('.')[0]}")
        return True

    def take(self, nbytes: int, target: Path, spare: int) -> bool:
        """Move a file for a blob of `nbytes` to `target`; False without one. The rest shrinks to `spare`."""
        files = self.files()
        fitting = [item for item in files if item[0] == footprint(nbytes)]
        taken = False
        while fitting and not taken:
            files.remove(fitting[-1])
            taken = _claim(fitting.pop()[1], target)
        _shrink(files, spare)
        return taken

    def clear(self) -> int:
        """Unlink everything; how many files."""
        files = self.files()
        _shrink(files, 0)
        with contextlib.suppress(OSError):
            self._folder.rmdir()
        return len(files)


def _claim(path: Path, target: Path) -> bool:
    """Move `path` to `target`; when it cannot be moved, unlink it."""
    try:
        with contextlib.suppress(FileExistsError):
            target.parent.mkdir(mode=0o700)
        os.rename(path, target)
    except OSError:
        with contextlib.suppress(OSError):
            path.unlink()
        return False
    return True


def _shrink(files: list[tuple[int, Path]], nbytes: int) -> None:
    """Unlink files until the rest has at most `nbytes`."""
    total = sum(size for size, _ in files)
    for size, path in files:
        if total <= nbytes:
            return
        with contextlib.suppress(OSError):
            path.unlink()
        total -= size
