"""A cancel at every turn of the loop around a keep: who ends the run knows what may lie there (R22, R24)."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from moorage.core.errors import PayloadError
from moorage.env.keeping import GivingKeeper, Keeping
from moorage.payload.spool import Spool

BLOB = [b"x" * 100]


@pytest.fixture
def spool(tmp_path: Path) -> Iterator[Spool]:
    spool = Spool(tmp_path, "run.1", 1000)
    yield spool
    spool.close()


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


@pytest.mark.parametrize("cancels", [1, 2, 3])
@pytest.mark.parametrize("count", range(9))
def test_what_a_cancelled_keep_left_is_known(spool: Spool, count: int, cancels: int) -> None:
    """The thread is through; the cancels come `count` turns of the loop later, one turn apart."""

    async def run() -> None:
        keeping, wrote, go = Keeping(spool), threading.Event(), threading.Event()

        def work(keeper: GivingKeeper) -> None:
            go.wait(5)
            keeper.keep("r1", BLOB, 5)
            wrote.set()

        task = asyncio.create_task(keeping.keep("r1", work))
        await turns(2)
        go.set()
        assert wrote.wait(5)  # on purpose on the loop: nothing else may run meanwhile
        keeping.close(wait=True)  # the thread says that it has ended
        await turns(count)
        for _ in range(cancels):
            task.cancel()
            await turns(1)
        await asyncio.wait({task})
        assert spool.ledger().outstanding == 1
        assert keeping.take("r1")
        assert not keeping.take("r1")

    asyncio.run(run())


@pytest.mark.parametrize("cancels", [1, 2, 5])
def test_a_cancelled_keep_ends_after_its_thread(spool: Spool, cancels: int) -> None:
    async def run() -> None:
        keeping, begun, go = Keeping(spool), threading.Event(), threading.Event()

        def work(_: GivingKeeper) -> None:
            begun.set()
            go.wait(5)
            spool.keep("r1", BLOB, 5)

        task = asyncio.create_task(keeping.keep("r1", work))
        await asyncio.to_thread(begun.wait, 5)
        for _ in range(cancels):
            task.cancel()
            await turns(3)
            assert not task.done(), "a thread still writes"
        go.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert spool.ledger().outstanding == 1
        assert keeping.take("r1")
        keeping.close()

    asyncio.run(run())


def test_a_cancelled_keep_does_not_wait_for_room(spool: Spool) -> None:
    spool.keep("full", [b"x" * 950], 1)

    async def run() -> None:
        keeping = Keeping(spool)
        task = asyncio.create_task(keeping.keep("r1", lambda keeper: keeper.keep("r1", BLOB, 60)))
        await asyncio.sleep(0.1)
        started = time.monotonic()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert time.monotonic() - started < 5
        keeping.close()

    asyncio.run(run())
    assert spool.ledger().outstanding == 1


def test_a_keep_that_has_no_thread_yet_is_cancelled_at_once(spool: Spool) -> None:
    async def run() -> None:
        keeping, go = Keeping(spool), threading.Event()
        busy = [asyncio.create_task(keeping.keep(f"b{i}", lambda _: go.wait(10))) for i in range(64)]
        await turns(2)
        last = asyncio.create_task(keeping.keep("r1", lambda keeper: keeper.keep("r1", BLOB, 5)))
        await turns(2)
        last.cancel()
        with pytest.raises(asyncio.CancelledError):
            await last
        assert not keeping.take("r1")
        go.set()
        await asyncio.gather(*busy)
        keeping.close()

    asyncio.run(run())
    assert spool.ledger().kept == 0


@pytest.mark.parametrize("error", [PayloadError("no room"), TypeError("a bug")])
def test_a_keep_that_fails_is_known_too(spool: Spool, error: Exception) -> None:
    """Whatever is raised after something was written, the request's folder is asked to be discarded."""

    def work(keeper: GivingKeeper) -> None:
        keeper.keep("r1", BLOB, 5)
        raise error

    async def run() -> None:
        keeping = Keeping(spool)
        with pytest.raises(type(error)):
            await keeping.keep("r1", work)
        assert keeping.take("r1")
        assert not keeping.take("another")
        keeping.close()

    asyncio.run(run())
