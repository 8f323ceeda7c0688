"""The replay of CUDA's caching allocator: sequences worked out by hand, and what holds for every sequence."""

from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lowtide.planner.allocators.cuda_allocator import MIB, CudaAllocator, replay

SIZES = st.one_of(
    st.integers(1, 4096), st.integers(1, 2 * MIB), st.integers(MIB, 12 * MIB), st.integers(10 * MIB, 70 * MIB)
)
REQUESTS = st.lists(st.tuples(SIZES, st.integers(0, 12)), max_size=60)
"""Each is born, and dies after so many more births."""
GROWTH = pytest.mark.parametrize("expandable", [True, False], ids=["expandable", "fixed"])


class Event(NamedTuple):
    block: int
    size: int
    phase: str = "forward"


def lifetimes(requests: list[tuple[int, int]]) -> list[Event]:
    events, ends = [], {}
    for number, (size, more) in enumerate(requests):
        events.append(Event(number, size))
        ends.setdefault(number + more, []).append(number)
        events += [Event(dead, -requests[dead][0]) for dead in ends.pop(number, [])]
    return events + [Event(dead, -requests[dead][0]) for left in ends.values() for dead in left]


def fixed(*sizes: int) -> CudaAllocator:
    """An allocator of fixed segments that holds blocks 0, 1, ... of some sizes."""
    allocator = CudaAllocator(expandable=False)
    for number, size in enumerate(sizes):
        allocator.born(number, size)
    return allocator


# -- by hand ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "allocated", "reserved"),
    [
        (1, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (11 * MIB, 12 * MIB, 12 * MIB),  # a remainder of one MiB is not split off
        (20 * MIB + 1, 20 * MIB + 512, 22 * MIB),
    ],
)
def test_one_request_in_a_fixed_segment(size, allocated, reserved):
    allocator = fixed(size)
    assert (allocator.allocated, allocator.reserved) == (allocated, reserved)


@pytest.mark.parametrize(
    ("size", "allocated", "reserved"),
    [(1, 512, 2 * MIB), (MIB + 1, MIB + 512, 20 * MIB), (11 * MIB, 11 * MIB, 20 * MIB), (50 * MIB, 50 * MIB, 60 * MIB)],
)
def test_one_request_in_a_segment_that_grows(size, allocated, reserved):
    allocator = CudaAllocator()
    allocator.born(0, size)
    assert (allocator.allocated, allocator.reserved) == (allocated, reserved)


def test_small_requests_share_a_segment():
    assert fixed(*[512 * 1024] * 4).reserved == 2 * MIB
    assert fixed(*[512 * 1024] * 5).reserved == 4 * MIB


def test_the_pools_are_apart():
    allocator = fixed(30 * MIB)
    allocator.died(0)
    allocator.born(1, MIB)
    assert allocator.reserved == 32 * MIB


def test_the_smallest_block_that_is_large_enough_serves():
    allocator = fixed(30 * MIB, 14 * MIB, 22 * MIB)
    for number in range(3):
        allocator.died(number)
    allocator.born(3, 16 * MIB)  # of the 22
    allocator.born(4, 14 * MIB)
    allocator.born(5, 30 * MIB)
    assert allocator.reserved == 66 * MIB
    allocator.born(6, 6 * MIB)  # what is left of the 22
    assert (allocator.reserved, allocator.allocated) == (66 * MIB, 66 * MIB)


def test_free_neighbours_become_one():
    allocator = fixed(6 * MIB, 6 * MIB, 6 * MIB)  # all in one segment of 20
    assert allocator.reserved == 20 * MIB
    for number in (0, 2, 1):
        allocator.died(number)
    allocator.born(3, 20 * MIB)
    assert allocator.reserved == 20 * MIB


def test_holes_of_fixed_segments_serve_nothing_larger():
    shapes = [40 * MIB, 44 * MIB]  # longer rows from step to step
    grows, stays = CudaAllocator(), CudaAllocator(expandable=False)
    for allocator in (grows, stays):
        for size in shapes:
            allocator.born(0, size)
            allocator.died(0)
    assert stays.reserved == 84 * MIB
    assert grows.reserved == 60 * MIB


def test_a_full_device_gets_back_what_is_cached_whole():
    allocator = CudaAllocator(64 * MIB, expandable=False)
    allocator.born(0, 30 * MIB)
    allocator.born(1, 24 * MIB)
    allocator.died(0)
    allocator.born(2, 40 * MIB)
    assert (allocator.retries, allocator.reserved, allocator.peak.reserved) == (1, 64 * MIB, 64 * MIB)


def test_a_fixed_segment_in_use_cannot_be_given_back():
    allocator = CudaAllocator(64 * MIB, expandable=False)
    allocator.born(0, 30 * MIB)
    allocator.died(0)
    allocator.born(1, 2 * MIB)  # at the start of the 30
    with pytest.raises(torch.OutOfMemoryError, match=r"40\.0 MiB: 30\.0 MiB of 64\.0 MiB are reserved"):
        allocator.born(2, 40 * MIB)


def test_pages_move_behind_what_is_in_use():
    allocator = CudaAllocator(60 * MIB)
    allocator.born(0, 30 * MIB)
    allocator.born(1, 8 * MIB)
    allocator.died(0)  # 30 free, 8 in use, 2 free: one page of the 30 is whole, and too small for 40
    assert allocator.reserved == 40 * MIB
    allocator.born(2, 40 * MIB)
    assert (allocator.retries, allocator.reserved) == (1, 60 * MIB)


def test_a_hole_of_pages_is_filled_first():
    allocator = CudaAllocator()
    for number, size in enumerate((40 * MIB, 20 * MIB)):
        allocator.born(number, size)
    allocator.died(0)
    allocator.empty_cache()
    assert allocator.reserved == 20 * MIB
    allocator.born(2, 40 * MIB)
    assert [(each.size, each.used) for each in allocator.blocks() if each.mapped] == [
        (40 * MIB, True), (20 * MIB, True),
    ]  # fmt: skip


def test_a_storage_without_bytes_asks_for_nothing():
    allocator = fixed(0)
    allocator.died(0)
    assert allocator.held == 0


def test_each_phase_has_its_peak():
    events = [Event(0, 30 * MIB), Event(1, 30 * MIB), Event(1, -30 * MIB), Event(2, 512, "head")]
    found = replay(events, expandable=False)
    assert (found.peak.allocated, found.peak.reserved) == (60 * MIB, 62 * MIB)
    assert found.phases["head"].allocated == 30 * MIB + 512
    assert (found.phases["forward"].reserved, found.phases["head"].reserved) == (60 * MIB, 62 * MIB)


# -- for every sequence -------------------------------------------------------------------------------------------


def check(allocator: CudaAllocator, live: dict[int, int]) -> None:
    """What holds between two events."""
    assert sum(live.values()) <= allocator.allocated <= allocator.reserved <= allocator.capacity
    blocks = list(allocator.blocks())
    assert sum(block.size for block in blocks if block.used) == allocator.allocated
    assert sum(block.size for block in blocks if block.mapped) == allocator.reserved
    assert all(block.mapped for block in blocks if block.used)
    for block in blocks:
        if (after := block.after) is not None:
            assert after.before is block
            assert after.address == block.address + block.size
            assert block.used or after.used or block.mapped != after.mapped  # else they would be one
    firsts = sorted(allocator.segments, key=lambda block: block.address)
    ends = [last(first).address + last(first).size for first in firsts]
    assert all(end <= first.address for end, first in zip(ends, firsts[1:], strict=False))


def last(block):
    while block.after is not None:
        block = block.after
    return block


@GROWTH
@given(requests=REQUESTS, capacity=st.sampled_from([None, 200 * MIB, 500 * MIB]))
def test_nothing_overlaps_and_nothing_is_lost(expandable, requests, capacity):
    allocator = CudaAllocator(capacity, expandable=expandable)
    live: dict[int, int] = {}
    for event in lifetimes(requests):
        if event.size > 0:
            try:
                allocator.born(event.block, event.size)
            except torch.OutOfMemoryError:
                assert capacity is not None
                check(allocator, live)
                return
            live[event.block] = event.size
        else:
            allocator.died(event.block)
            del live[event.block]
        check(allocator, live)
    assert allocator.allocated == 0
    for first in allocator.segments:  # each is one free block, with what is not backed behind it
        block = first if first.mapped else first.after
        assert block is None or block.after is None or not block.after.mapped
    allocator.empty_cache()
    assert allocator.reserved == 0
    assert all(block.after is None for block in allocator.segments)


@given(requests=REQUESTS)
def test_where_segments_grow_nothing_held_is_larger_than_its_rounding(requests):
    live, most = 0, 0
    for event in lifetimes(requests):
        rounded = -(-abs(event.size) // 512) * 512
        live += rounded if event.size > 0 else -rounded
        most = max(most, live)
    assert replay(lifetimes(requests)).peak.allocated == most
