"""Which sequences run in the next step: admission, decoding, ending, and what a change of weights means.

One `step()` admits waiting requests into free slots, feeds their prompts, and decodes one token of every
running sequence. Promises:
- running sequence i sits in slot i; when one ends, the last moves into its place;
- a request leaves exactly once, with a finish reason, and leaves nothing behind;
- a prefix is taken over only from sequences that the present weights computed (`epoch`) under the same salt;
- every output token is labelled with the version label that was set when it was drawn.

Not thread-safe: one thread owns it. It knows no HTTP.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from moorage.engine.builtin.cache import Block
from moorage.engine.builtin.model import Runner
from moorage.engine.builtin.prefix import BLOCK, PrefixStore, chain_keys
from moorage.engine.builtin.request import Request
from moorage.engine.builtin.sampler import Plan, Sampled, hash_seed, make_plan, sample, uniforms

SMALL_FEED = 512
"""Padding does not matter below so many tokens."""
PREFIX_BYTES = 512 << 20
SHARE_TOKENS = 4 * BLOCK
"""A request waits one step for a sibling that is being fed when they share this many tokens not yet
stored."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one engine."""

    max_num_seqs: int = 128
    max_model_len: int = 2048
    prefill_tokens: int = 8192
    """Prompt tokens (padding included) fed in one step; a longer prompt is fed alone."""
    prefix_bytes: int = PREFIX_BYTES
    """Memory for stored prefixes; 0 turns their reuse off."""


@dataclass(slots=True)
class Totals:
    """Counts since the start."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    generation_tokens: int = 0
    preemptions: int = 0
    steps: int = 0


class Scheduler:
    """Continuous batching over one Runner."""

    def __init__(self, runner: Runner, limits: Limits) -> None:
        self.runner = runner
        self.limits = limits
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.admitting = True
        self.label = "default"
        self.epoch = 0
        self.totals = Totals()
        self.prefixes: PrefixStore[Block] = PrefixStore(limits.prefix_bytes)
        slots = limits.max_num_seqs
        self._position = np.zeros(slots, dtype=np.int64)
        self._last = np.zeros(slots, dtype=np.int64)
        self._drawn = np.zeros(slots, dtype=np.int64)
        self._state = np.zeros(slots, dtype=np.uint64)
        self._plan: Plan | None = None

    @property
    def idle(self) -> bool:
        """Nothing that a step would do."""
        return not self.running and not (self.waiting and self.admitting)

    def add(self, request: Request) -> None:
        """Queue a request."""
        self.waiting.append(request)

    @torch.inference_mode()
    def step(self) -> list[Request]:
        """Advance every sequence by one token; the requests that ended or that stream, each once."""
        group = self._admit() if self.admitting and self.waiting else []
        decoding = len(self.running)
        if not decoding and not group:
            return []
        self.totals.steps += 1
        sequences = self._place(group)
        logits = self.runner.step(
            self._last[:decoding],
            self._position[:decoding],
            sequences,
            [cached for _, cached, _ in group],
        )
        self._position[:decoding] += 1
        self._join(group)
        return self._draw(logits)

    @torch.inference_mode()
    def abort(self, ids: Iterable[str]) -> list[Request]:
        """End the named requests with reason "abort"; unknown ids are ignored. Returns those that ended."""
        wanted = set(ids)
        ended = [request for request in self.waiting if request.id in wanted]
        if ended:
            self.waiting = deque(request for request in self.waiting if request.id not in wanted)
        for request in ended:
            request.finish_reason = "abort"
            request.routed_experts = _from(request.reported_rows, request.params.routed_experts_prompt_start)
        rows = [row for row, request in enumerate(self.running) if request.id in wanted]
        for row in rows:
            self.running[row].finish_reason = "abort"
        return ended + self._reap(rows)

    def cache_share(self) -> float:
        """Share of all positions that running sequences fill."""
        count = len(self.running)
        return float(self._position[:count].sum()) / (self.limits.max_num_seqs * self.limits.max_model_len)

    def all_ids(self) -> list[str]:
        """Ids of everything running or waiting."""
        return [request.id for request in (*self.running, *self.waiting)]

    @torch.inference_mode()
    def preempt(self) -> None:
        """Forget all keys: running requests go back to the head of the queue and are computed again."""
        for row, request in enumerate(self.running):
            request.reported_rows = self._rows(row)
        self.totals.preemptions += len(self.running)
        self.waiting.extendleft(reversed(self.running))
        self.running.clear()
        self.prefixes.clear()
        self._plan = None

    def reload(self, folder: Path) -> None:
        """Take new weights. Raises EngineError with everything as it was. Running requests keep their
        keys."""
        self.runner.reload(folder)
        self.epoch += 1
        self.prefixes.clear()
        for request in self.running:
            request.computed_epoch = -1

    # admission

    def _admit(self) -> list[tuple[Request, int, Block | None]]:
        group: list[tuple[Request, int, Block | None]] = []
        free = self.limits.max_num_seqs - len(self.running)
        later: list[Request] = []
        feeding: set[int] = set()
        widest = total = 0
        while self.waiting and len(group) < free:
            request = self.waiting[0]
            cached, block, keys = self._find_prefix(request)
            new = request.num_known - cached
            if group and not self._fits(max(widest, new) * (len(group) + 1), total + new):
                break
            self.waiting.popleft()
            if feeding and not feeding.isdisjoint(keys[(cached + SHARE_TOKENS) // BLOCK - 1 :]):
                later.append(request)
                continue
            feeding.update(keys)
            widest, total = max(widest, new), total + new
            group.append((request, cached, block))
        self.waiting.extendleft(reversed(later))
        return group

    def _fits(self, padded: int, real: int) -> bool:
        """Whether a rectangle of `padded` tokens, `real` of them not padding, is worth feeding at once."""
        return padded <= self.limits.prefill_tokens and (padded <= SMALL_FEED or 2 * real >= padded)

    def _find_prefix(self, request: Request) -> tuple[int, Block | None, tuple[int, ...]]:
        if not self.limits.prefix_bytes or request.num_known <= BLOCK:
            return 0, None, ()
        tokens = request.known()[:-1]  # the last token is always fed: its logits are needed
        keys = chain_keys(request.salt, tokens)
        cached, block = self.prefixes.find(request.salt, keys, tokens)
        return cached, block, keys

    def _place(self, group: list[tuple[Request, int, Block | None]]) -> list[np.ndarray]:
        """Give each admitted request the next slot, with what is stored of its prefix; all of its tokens."""
        base = len(self.running)
        sequences = [request.known() for request, _, _ in group]
        if group:
            self.runner.cache.reserve(base + len(group), max(map(len, sequences)))
        for row, (_, cached, block) in enumerate(group, base):
            if block is not None:
                self.runner.cache.copy_in(row, block, cached)
        return sequences

    def _join(self, group: list[tuple[Request, int, Block | None]]) -> None:
        """The admitted requests run now: their tokens have been fed."""
        if not group:
            return
        now = time.monotonic()
        for row, (request, cached, _) in enumerate(group, len(self.running)):
            if not request.out:
                request.cached_tokens = cached
                self.totals.prompt_tokens += len(request.prompt)
                self.totals.cached_tokens += cached
            request.computed_epoch = self.epoch
            request.first_token_s = request.first_token_s or now
            self._position[row] = request.num_known
            self._drawn[row] = len(request.out)
            self._state[row] = hash_seed(request.seed)
            if len(request.prompt) >= cached + SHARE_TOKENS:
                self._store(row, request, len(request.prompt))
        self.running.extend(request for request, _, _ in group)
        self._plan = None

    def _store(self, row: int, request: Request, length: int) -> None:
        if self.limits.prefix_bytes and length >= BLOCK and request.computed_epoch == self.epoch:
            block = self.runner.cache.copy_out(row, length)
            self.prefixes.insert(request.salt, request.known()[:length], block)

    # drawing

    def _draw(self, logits: torch.Tensor) -> list[Request]:
        """Draw the next token of every running request and record it."""
        count = len(self.running)
        for row, request in enumerate(self.running):
            if len(request.out) < request.params.min_tokens and request.stop_ids:
                logits[row, list(request.stop_ids)] = -torch.inf
        if self._plan is None:
            self._plan = make_plan(
                [request.wish for request in self.running], self.runner.vocab_size, self.runner.device
            )
        uniform = uniforms(self._state[:count], self._drawn[:count])
        drawn = sample(logits, self._plan, torch.from_numpy(uniform).to(logits.device))
        ended, streaming = self._record(drawn)
        return self._reap(ended) + streaming

    def _record(self, drawn: Sampled) -> tuple[list[int], list[Request]]:
        """Append what was drawn; the rows that ended, the requests that go on and stream."""
        count = len(self.running)
        ids = drawn.ids.cpu().numpy()
        self._last[:count] = ids
        self._drawn[:count] += 1
        self.totals.generation_tokens += count
        label = self.label
        ended: list[int] = []
        streaming: list[Request] = []
        for row, (request, token, logprob) in enumerate(
            zip(self.running, ids.tolist(), drawn.logprobs.tolist(), strict=True)
        ):
            if not request.versions or request.versions[-1][0] != label:
                request.versions.append((label, len(request.out)))
            request.out.append(token)
            request.logprobs.append(logprob)
            if token in request.stop_ids:
                request.finish_reason = "stop"
                request.stop_reason = None if token == request.eos_id else token
                ended.append(row)
            elif len(request.out) >= request.limit:
                request.finish_reason = "length"
                ended.append(row)
            elif request.streams:
                streaming.append(request)
        _record_extras(self.running, drawn)
        return ended, streaming

    # ending

    def _reap(self, rows: list[int]) -> list[Request]:
        """Take the finished requests at `rows` (ascending) out, filling each gap with the last sequence."""
        ended = []
        for row in reversed(rows):
            request = self.running[row]
            all_rows = self._rows(row)
            request.routed_experts = _from(all_rows, request.params.routed_experts_prompt_start)
            if request.finish_reason != "abort":
                self._store(row, request, int(self._position[row]))
            last = len(self.running) - 1
            if row != last:
                self.runner.cache.move(last, row, int(self._position[last]))
                for array in (self._position, self._last, self._drawn, self._state):
                    array[row] = array[last]
                self.running[row] = self.running[last]
            self.running.pop()
            ended.append(request)
        if rows:
            self._plan = None
        return ended

    def _rows(self, row: int) -> np.ndarray | None:
        """Routing rows of everything fed so far; where rows were reported before a recomputation, those."""
        rows = self.runner.take_rows(row, 0, int(self._position[row]))
        reported = self.running[row].reported_rows
        if rows is not None and reported is not None:
            rows[: len(reported)] = reported
        return rows


def _record_extras(requests: list[Request], drawn: Sampled) -> None:
    ranks = drawn.ranks.tolist() if drawn.ranks is not None else None
    head_ids = drawn.head_ids.cpu().numpy() if drawn.head_ids is not None else None
    head_logprobs = drawn.head_logprobs.cpu().numpy() if drawn.head_logprobs is not None else None
    kept = drawn.kept.cpu().numpy() if drawn.kept is not None else None
    for row, request in enumerate(requests):
        if ranks is not None:
            request.ranks.append(ranks[row])
        if request.head_k and head_ids is not None and head_logprobs is not None:
            request.head_ids.append(head_ids[row, : request.head_k])
            request.head_logprobs.append(head_logprobs[row, : request.head_k])
        if request.want_mask and kept is not None:
            request.masks.append(np.flatnonzero(kept[row]))


def _from(rows: np.ndarray | None, start: int) -> np.ndarray | None:
    return None if rows is None else rows[start:]
