"""Fetch buffers: never shared by two users, given back when the last view is gone, bounded."""

from __future__ import annotations

import gc

import numpy as np

from moorage.payload.buffers import MIN_POOLED_BYTES, BufferPool

SIZE = 4 * MIN_POOLED_BYTES


def test_a_buffer_serves_again_only_when_no_view_is_left() -> None:
    pool = BufferPool(max_idle_bytes=100 * SIZE)
    first = pool.take(SIZE)
    view = first[8:].view(np.int32)[2:5]
    at = first.ctypes.data
    del first
    gc.collect()
    assert pool.idle_bytes == 0
    other = pool.take(SIZE)
    assert other.ctypes.data != at
    del view
    assert pool.idle_bytes == SIZE
    again = pool.take(SIZE - 5)
    assert again.ctypes.data == at
    assert len(again) == SIZE - 5
    assert pool.idle_bytes == 0


def test_views_through_a_memoryview_keep_the_buffer_too() -> None:
    pool = BufferPool(max_idle_bytes=100 * SIZE)
    taken = pool.take(SIZE)
    array = np.frombuffer(taken.data, np.float32, 4, 16)
    del taken
    assert pool.idle_bytes == 0
    del array
    assert pool.idle_bytes == SIZE


def test_idle_memory_is_bounded_and_does_not_grow_over_steps() -> None:
    pool = BufferPool(max_idle_bytes=2 * SIZE)
    for _ in range(5):
        taken = [pool.take(SIZE) for _ in range(4)]
        del taken
        assert pool.idle_bytes == 2 * SIZE


def test_small_and_ill_fitting_requests_do_not_waste_buffers() -> None:
    pool = BufferPool(max_idle_bytes=100 * SIZE)
    big = pool.take(8 * SIZE)
    del big
    assert len(pool.take(10)) == 10
    small = pool.take(SIZE)
    assert pool.idle_bytes == 8 * SIZE
    assert len(small) == SIZE
