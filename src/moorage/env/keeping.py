"""Keeping episodes on threads, for runs that may be cancelled at any moment.

Owns the threads that keep and the set of requests whose folder may hold something. Promises:

- once `keep` has returned or raised, no thread writes for its request any more, however often the caller was
  cancelled meanwhile;
- `take` is true for every request for which a thread has begun to keep, whatever became of it, so that who
  ends a run knows that there may be something to discard;
- a cancelled keep does not wait for room in the spool, nor for a free thread.

It does not know what is kept, nor who frees it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from moorage.payload.codec import Buffer
from moorage.payload.spool import Spool


class GivingKeeper:
    """A spool as one keep sees it: it stops waiting for room once `given_up` is set."""

    def __init__(self, spool: Spool) -> None:
        self.given_up = threading.Event()
        self._spool = spool
        self.free = spool.free
        self.remove_file = spool.remove_file

    def keep(self, request_id: str, buffers: Sequence[Buffer], timeout_s: float) -> str:
        """As `Spool.keep`."""
        return self._spool.keep(request_id, buffers, timeout_s, self.given_up)


class Keeping:
    """The keeps of one worker."""

    def __init__(self, spool: Spool) -> None:
        self._spool = spool
        self._threads = ThreadPoolExecutor(thread_name_prefix="keep")
        self._may_hold: set[str] = set()

    async def keep(self, request_id: str, work: Callable[[GivingKeeper], Any]) -> None:
        """Run `work`, which keeps for this request, on a thread, to its end."""
        keeper = GivingKeeper(self._spool)

        def begin() -> None:
            self._may_hold.add(request_id)  # before anything is written
            work(keeper)

        job = self._threads.submit(begin)
        done = asyncio.wrap_future(job)
        cancelled: asyncio.CancelledError | None = None
        while not done.done():
            try:
                await asyncio.wait({done})
            except asyncio.CancelledError as error:  # a thread cannot be cancelled: hurry it, see it end
                cancelled = error
                keeper.given_up.set()
                if job.cancel():
                    raise  # it had not begun
        if cancelled is not None:
            if not done.cancelled():
                done.exception()  # the cancel is what the caller hears of
            raise cancelled
        done.result()

    def take(self, request_id: str) -> bool:
        """Whether something may lie in the folder of this request, which is over; asked once."""
        found = request_id in self._may_hold
        self._may_hold.discard(request_id)
        return found

    def close(self, *, wait: bool = False) -> None:
        """End the threads. Keeps under way are seen to their end by who awaits them (`wait`: here)."""
        self._threads.shutdown(wait=wait, cancel_futures=True)
