"""What a heap holds beside its tensors grows with its extent, and goes where it is trimmed."""

from types import SimpleNamespace
from typing import Any

import pytest

from lowtide.memory.allocators import host_heap
from lowtide.planner.allocators.glibc_heap import SMALL_MOST, SMALL_SHARE, GlibcHeap
from lowtide.planner.estimate import heap_of
from lowtide.planner.sharding.layout import Layout, Parameter
from lowtide.planner.tracing.trace import Event

MIB = 1 << 20


def held(blocks: int, *, trims: bool = False) -> int:
    heap = GlibcHeap(mmap_above=4 * MIB, trim_above=24 * MIB)
    for number in range(blocks):
        heap.born(number, MIB)
    if trims:
        heap.trim()
    return heap.held


def test_holes_of_small_objects_are_a_share_of_the_extent():
    assert held(0) == 0
    assert held(100) == pytest.approx((1 + SMALL_SHARE) * 100 * MIB, rel=1e-3)


def test_they_are_so_many_bytes_at_most():
    assert held(1000) == pytest.approx(1000 * MIB + SMALL_MOST, rel=1e-3)


def test_a_heap_that_is_trimmed_has_none():
    assert held(100, trims=True) == pytest.approx(100 * MIB, rel=1e-3)


@pytest.mark.parametrize(("more", "left"), [(10, 50), (300, 100)])
def test_holes_stay_where_the_heap_held_much_more_before(more, left):
    heap = GlibcHeap(mmap_above=1 << 40, trim_above=24 * MIB, near=0.25)
    for number in range(100):
        heap.born(number, MIB)
    heap.born("once", more * MIB, mapped=True)
    heap.died("once")
    for number in range(0, 100, 2):
        heap.died(number)
    heap.trim()
    assert heap.held == pytest.approx(left * MIB, rel=0.02)


@pytest.mark.parametrize(
    ("weights", "gathers", "expected"),
    [
        (1 << 20, True, (host_heap.MMAP_ABOVE, 1)),
        (1 << 20, False, (host_heap.MMAP_ABOVE, host_heap.NEAR)),
        (host_heap.LARGE, True, (host_heap.MMAP_ABOVE_OF_LARGE, 1)),
        (host_heap.LARGE, False, (host_heap.MMAP_ABOVE_OF_LARGE, host_heap.NEAR)),
    ],
)
def test_a_heap_that_is_trimmed_is_set_up_by_the_size_of_the_model(weights, gathers, expected):
    layout = Layout((Parameter("weight", (weights // 4,), 4, True),), 8)
    head = SimpleNamespace(packed_elements=lambda _: 0)
    run: Any = SimpleNamespace(
        layout=lambda: layout,
        method=SimpleNamespace(head=head),
        gathers=gathers,
        described=None,
        has_16_bits=False,
    )
    heap = heap_of(run, [Event(None, False, "forward", 0)])
    assert (heap.mmap_above, heap.near) == expected
