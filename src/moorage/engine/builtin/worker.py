"""The engine thread: one scheduler, driven by commands from the event loop.

The event loop posts closures; the thread runs them between two steps, so that a request, an abort or a reload
never meets a step half-way. What a step finished goes back in one `call_soon_threadsafe`.

Pausing (vLLM's three modes): `abort` ends everything, `wait` lets what runs end and keeps the queue, `keep`
freezes everything. New requests are refused while paused, but for `keep`, where they queue. With
`clear_cache` the stored prefixes go, and frozen requests are computed again after `resume`.

An exception in the thread is final: every open request fails with it, and `failed` tells the server to stop.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from moorage.core.errors import EngineError
from moorage.core.log import get_logger
from moorage.engine.builtin.request import Request, RequestError
from moorage.engine.builtin.scheduler import Scheduler

log = get_logger(__name__)
ResultT = TypeVar("ResultT")
Listener = asyncio.Queue[tuple[Request | BaseException, int]]
"""Gets (request, number of output tokens) after each step that touched it, or an error."""
PAUSE_MODES = ("abort", "wait", "keep")
STOP_TIMEOUT_S = 30.0


class EngineThread:
    """Runs `scheduler` in a thread of its own; everything public is called on the event loop."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.paused: str | None = None
        self.failed: asyncio.Future[BaseException]
        self._loop: asyncio.AbstractEventLoop
        self._inbox: deque[Callable[[], None]] = deque()
        self._wake = threading.Event()
        self._frozen = False
        self._stopping = False
        self._drained: Callable[[], None] | None = None
        self._calls: set[asyncio.Future[Any]] = set()
        self._listeners: dict[str, Listener] = {}
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Start the thread; called once, on the running event loop."""
        self._loop = asyncio.get_running_loop()
        self.failed = self._loop.create_future()
        self._thread.start()

    async def stop(self) -> None:
        """End the thread; open requests fail."""
        self._stopping = True
        self._wake.set()
        await asyncio.to_thread(self._thread.join, STOP_TIMEOUT_S)
        self._fail_all(EngineError("the engine is stopping", status=503, retryable=True))

    @property
    def num_open(self) -> int:
        return len(self._listeners)

    # requests

    def submit(self, request: Request) -> Listener:
        """Queue `request`. The queue gets it after each step that touched it; the last time with a finish
        reason.

        Raises RequestError (503) while paused in a mode that takes no requests.
        """
        if self.paused in ("abort", "wait"):
            raise RequestError(f"the engine is paused (mode={self.paused})", status=503)
        if self.failed.done():
            raise RequestError(f"the engine is dead: {self.failed.result()}", status=500)
        if request.id in self._listeners:
            raise RequestError(f"request id {request.id!r} is in use", param="request_id")
        queue: Listener = asyncio.Queue()
        self._listeners[request.id] = queue
        self._post(lambda: self.scheduler.add(request))
        return queue

    async def generate(self, request: Request) -> Request:
        """Run `request` to its end. Cancelling frees its slot before the next step."""
        queue = self.submit(request)
        try:
            while True:
                got, _ = await queue.get()
                if isinstance(got, BaseException):
                    raise got
                if got.finish_reason is not None:
                    return got
        finally:
            self.drop(request)

    def drop(self, request: Request) -> None:
        """Stop listening to `request`; it is aborted when it still runs."""
        if self._listeners.pop(request.id, None) is not None and request.finish_reason is None:
            self._post(lambda: self._deliver(self.scheduler.abort([request.id])))

    async def abort(self, ids: list[str] | None) -> int:
        """Abort the named requests, or all of them; how many there were."""

        def run() -> int:
            ended = self.scheduler.abort(self.scheduler.all_ids() if ids is None else ids)
            self._deliver(ended)
            return len(ended)

        return await self.call(run)

    # control

    async def pause(self, mode: str, *, clear_cache: bool) -> None:
        """Pause; returns once nothing is being computed."""
        self.paused = mode
        done = self._open_call()

        def freeze() -> None:
            self._drained = None
            self._frozen = True
            self.scheduler.admitting = True
            if clear_cache:
                self.scheduler.preempt()
            self._tell(done, None)

        def run() -> None:
            earlier, self._drained = self._drained, None

            def settle() -> None:
                if earlier is not None:  # a pause that was draining still
                    earlier()
                freeze()

            if mode == "abort":
                self._deliver(self.scheduler.abort(self.scheduler.all_ids()))
            if mode == "wait" and self.scheduler.running:
                self.scheduler.admitting = False
                self._drained = settle
            else:
                settle()

        self._post(run)
        await done

    async def resume(self) -> None:
        """Go on with everything that is queued or frozen."""
        self.paused = None

        def run() -> None:
            drained, self._drained = self._drained, None
            if drained is not None:
                drained()
            self._frozen = False

        await self.call(run)

    async def call(self, function: Callable[[], ResultT]) -> ResultT:
        """Run `function` in the engine thread between two steps; its result or EngineError."""
        done = self._open_call()

        def run() -> None:
            try:
                result = function()
            except EngineError as error:
                self._tell(done, error)
            else:
                self._tell(done, result)

        self._post(run)
        return await done

    def _open_call(self) -> asyncio.Future[Any]:
        """A future that the engine thread settles, or its death does."""
        if self.failed.done():
            raise EngineError(f"the engine is dead: {self.failed.result()!r}", status=500)
        done = self._loop.create_future()
        self._calls.add(done)
        done.add_done_callback(self._calls.discard)
        return done

    # the thread

    def _post(self, command: Callable[[], None]) -> None:
        self._inbox.append(command)
        self._wake.set()

    def _run(self) -> None:
        try:
            while not self._stopping:
                while self._inbox:
                    self._inbox.popleft()()
                if self._drained is not None and not self.scheduler.running:
                    self._drained()
                if self._frozen or self.scheduler.idle:
                    self._wake.wait()
                    self._wake.clear()
                    continue
                self._deliver(self.scheduler.step())
        except Exception as error:
            log.exception("the engine thread died")
            self._loop.call_soon_threadsafe(self._on_death, error)

    def _deliver(self, touched: list[Request]) -> None:
        if touched:
            counts = [(request, len(request.out)) for request in touched]
            self._loop.call_soon_threadsafe(self._hand_over, counts)

    def _hand_over(self, touched: list[tuple[Request, int]]) -> None:
        for request, count in touched:
            queue = self._listeners.get(request.id)
            if queue is not None:
                queue.put_nowait((request, count))

    def _tell(self, future: asyncio.Future[Any], result: Any) -> None:
        def settle() -> None:
            if future.done():
                return
            if isinstance(result, BaseException):
                future.set_exception(result)
            else:
                future.set_result(result)

        self._loop.call_soon_threadsafe(settle)

    def _on_death(self, error: BaseException) -> None:
        if not self.failed.done():
            self.failed.set_result(error)
        self._fail_all(EngineError(f"the engine died: {error!r}", status=500))

    def _fail_all(self, error: EngineError) -> None:
        for queue in self._listeners.values():
            queue.put_nowait((error, 0))
        self._listeners.clear()
        for call in list(self._calls):
            if not call.done():
                call.set_exception(error)
