"""All replicas of the policy's engine: health, weight updates, choice.

Owns the one right order of a weight update (docs/protocols.md section 3): cancel stale work and wait for its
answers, pause all (keep), load all, label all, resume all in a finally. Promises:

- a replica that fails a stage is named in an EngineError, later stages do not begin, and what was paused is
  resumed, so that nobody else's engine stays frozen. Labels may then be wrong: the run ends with that error,
  and the next one loads and labels before it samples;
- no call waits longer than its deadline;
- the label of a version is the decimal number, so that a completion's `weight_versions` are policy versions.

Does not know episodes, or where weights come from.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from moorage.core.errors import EngineError
from moorage.core.log import get_logger
from moorage.engine.connection import open_session, refusal
from moorage.engine.loads import Gauges, Loads, parse_gauges

log = get_logger(__name__)

POLL_S = 1.0
DEAD_AFTER_S = 60.0


class Fleet:
    """Every replica that serves one policy. Use inside one event loop; close it."""

    def __init__(
        self,
        urls: list[str],
        model_name: str,
        *,
        keep_cache: bool = False,
        control_timeout_s: float = 60.0,
        load_timeout_s: float = 600.0,
        dead_after_s: float = DEAD_AFTER_S,
    ) -> None:
        """`keep_cache`: running requests keep their cache over an update (later tokens attend to keys of
        older weights). Otherwise it is computed again from the new weights."""
        self.urls = [url.rstrip("/") for url in urls]
        if not self.urls:
            raise ValueError("a fleet needs at least one engine")
        self.model_name = model_name
        self.keep_cache = keep_cache
        self.version: int | None = None
        self.loads = Loads(self.urls)
        self._control_timeout_s = control_timeout_s
        self._load_timeout_s = load_timeout_s
        self._dead_after_s = dead_after_s
        self._updating = asyncio.Lock()
        self._session: aiohttp.ClientSession | None = None

    async def wait_ready(self, timeout_s: float) -> None:
        """Return when every replica is healthy and serves the model. Raises EngineError naming the first one
        that is not in time, or that serves something else."""
        await self._everywhere("become ready", lambda url: self._until_ready(url, timeout_s), timeout_s + 5)

    async def label(self, version: int) -> None:
        """Say which policy version all replicas hold now: what they were started with, before dispatch."""
        await self._everywhere("take a version label", lambda url: self._label(url, version))
        self.version = version

    async def update_weights(
        self, path: str | Path, version: int, before_pause: Callable[[], Awaitable[Any]] | None = None
    ) -> None:
        """Load the weights in folder `path` everywhere and label them `version`.

        `before_pause` cancels what would be too stale and returns once that is answered. Raises EngineError
        naming the replica that failed; the run cannot go on then. One update runs at a time. A folder
        without weights is refused before anything is paused: a vLLM told to load it would die.
        """
        folder = await asyncio.to_thread(_checked_folder, path)
        async with self._updating:
            if before_pause is not None:
                await before_pause()
            failed = True
            try:
                await self._everywhere("pause", self._pause)
                await self._everywhere(
                    f"load {folder}", lambda url: self._load(url, folder), self._load_timeout_s
                )
                await self._everywhere("take a version label", lambda url: self._label(url, version))
                failed = False
            finally:
                await self._resume_all(quiet=failed)
            self.version = version

    def pick(self, session_key: str) -> str:
        """The replica for a session: the one it had, or the least loaded."""
        return self.loads.pick(session_key)

    def begin(self, url: str) -> None:
        """An episode begins to use `url`; pair with `end` in a finally."""
        self.loads.begin(url)

    def end(self, url: str) -> None:
        """It has ended."""
        self.loads.end(url)

    async def poll(self) -> dict[str, Gauges]:
        """Read every replica's gauges once. Raises EngineError naming one that does not answer."""
        await self._everywhere("answer /metrics", self._observe)
        return {url: self.loads.gauges(url) for url in self.urls}

    async def watch(self) -> None:
        """Poll for ever (the caller owns the task). Raises EngineError when a replica has not answered for
        `dead_after_s`. Unblocked by cancellation."""
        loop = asyncio.get_running_loop()
        heard = loop.time()
        while True:
            try:
                await self.poll()
                heard = loop.time()
            except EngineError:
                if loop.time() - heard > self._dead_after_s:
                    raise
            await asyncio.sleep(POLL_S)

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _everywhere(
        self, what: str, act: Callable[[str], Awaitable[None]], timeout_s: float | None = None
    ) -> None:
        """Do `act` for all replicas at once, wait for all, then raise for those that failed."""
        limit = timeout_s or self._control_timeout_s

        async def bounded(url: str) -> None:
            async with asyncio.timeout(limit):
                await act(url)

        results = await asyncio.gather(*(bounded(url) for url in self.urls), return_exceptions=True)
        failures = [
            f"{url} ({'no answer within ' + format(limit, 'g') + ' s' if isinstance(r, TimeoutError) else r})"
            for url, r in zip(self.urls, results, strict=True)
            if isinstance(r, EngineError | aiohttp.ClientError | TimeoutError)
        ]
        for result in results:
            if isinstance(result, BaseException) and not isinstance(
                result, EngineError | aiohttp.ClientError | TimeoutError
            ):
                raise result
        if failures:
            raise EngineError(
                f"{len(failures)} of {len(self.urls)} engines failed to {what}: {'; '.join(failures)}"
            )

    async def _resume_all(self, *, quiet: bool) -> None:
        try:
            await self._everywhere("resume", lambda url: self._post(url, "/resume"))
        except EngineError as error:
            if not quiet:
                raise
            log.error("after a failed update: %s", error)  # the failure itself is what the caller hears

    async def _pause(self, url: str) -> None:
        clear = "false" if self.keep_cache else "true"
        await self._post(url, f"/pause?mode=keep&clear_cache={clear}")

    async def _load(self, url: str, folder: str) -> None:
        await self._post(
            url, "/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": folder}}
        )

    async def _label(self, url: str, version: int) -> None:
        await self._post(url, "/update_weight_version", {"new_version": str(version)})

    async def _observe(self, url: str) -> None:
        self.loads.observe(url, parse_gauges((await self._get(url, "/metrics")).decode(errors="replace")))

    async def _until_ready(self, url: str, timeout_s: float) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while True:
            try:
                await self._get(url, "/health")
                cards = orjson.loads(await self._get(url, "/v1/models"))["data"]
                break
            except (EngineError, aiohttp.ClientError, TimeoutError, orjson.JSONDecodeError) as error:
                if loop.time() >= deadline:
                    raise EngineError(
                        f"not ready within {timeout_s:g} s (inference.ready_timeout_s); last: "
                        f"{error or type(error).__name__}"
                    ) from None
            await asyncio.sleep(0.2)
        names = [card.get("id") for card in cards]
        if self.model_name not in names:
            raise EngineError(f"it serves {names}, not `{self.model_name}`; set model.name to what it serves")

    async def _get(self, url: str, route: str) -> bytes:
        async with asyncio.timeout(10), self._client.get(url + route) as answer:
            body = await answer.read()
        if answer.status != 200:
            raise refusal(url, answer.status, body)
        return body

    async def _post(self, url: str, route: str, body: dict[str, Any] | None = None) -> None:
        async with self._client.post(url + route, json=body) as answer:
            content = await answer.read()
        if answer.status != 200:
            raise refusal(url, answer.status, content)

    @property
    def _client(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = open_session()
        return self._session


def _checked_folder(path: str | Path) -> str:
    folder = Path(path).absolute()
    if not any(folder.glob("*.safetensors")):
        raise EngineError(f"{folder} holds no *.safetensors; no engine was asked to load it")
    return str(folder)
