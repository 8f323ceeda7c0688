"""The replay of CUDA's caching allocator: sequences worked out by hand, and what holds for every sequence."""

from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowtide.planner.allocators.cuda_allocator import MIB, Block, CudaAllocator, Pool

SIZES = st.one_of(
    st.integers(1, 4096), st.integers(1, 2 * MIB), st.integers(MIB, 12 * MIB), st.integers(10 * MIB, 70 * MIB)
)
REQUESTS = st.lists(st.tuples(SIZES, st.integers(0, 12)), max_size=60)
"""Each is born, and dies after so many more births."""


class Event(NamedTuple):
    block: int
    size: int


def lifetimes(requests: list[tuple[int, int]]) -> list[Event]:
    events, ends = [], {}
    for number, (size, more) in enumerate(requests):
        events.append(Event(number, size))
        ends.setdefault(number + more, []).append(number)
        events += [Event(dead, -requests[dead][0]) for dead in ends.pop(number, [])]
    return events + [Event(dead, -requests[dead][0]) for left in ends.values() for dead in left]


def holding(*sizes: int) -> CudaAllocator:
    """An allocator that holds blocks 0, 1, ... of some sizes."""
    allocator = CudaAllocator()
    for number, size in enumerate(sizes):
        allocator.born(number, size)
    return allocator


def blocks(pool: Pool) -> list[Block]:
    """All blocks of a pool, in the order of their addresses."""
    found = [pool.first]
    while (after := found[-1].after) is not None:
        found.append(after)
    return found


def used(allocator: CudaAllocator) -> int:
    """`torch.cuda.memory_allocated`: bytes of the blocks that tensors hold."""
    return sum(block.size for pool in (allocator.small, allocator.large) for block in blocks(pool) if block.used)


# -- by hand ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "allocated", "reserved"),
    [
        (1, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (11 * MIB, 11 * MIB, 20 * MIB),
        (20 * MIB + 1, 20 * MIB + 512, 40 * MIB),
        (50 * MIB, 50 * MIB, 60 * MIB),
    ],
)
def test_one_request(size, allocated, reserved):
    allocator = holding(size)
    assert (used(allocator), allocator.held) == (allocated, reserved)


def test_small_requests_share_a_page():
    assert holding(*[512 * 1024] * 4).held == 2 * MIB
    assert holding(*[512 * 1024] * 5).held == 4 * MIB


def test_the_pools_are_apart():
    allocator = holding(30 * MIB)
    allocator.died(0)
    allocator.born(1, MIB)
    assert allocator.held == 42 * MIB


def test_the_smallest_block_that_is_large_enough_serves():
    allocator = holding(30 * MIB, 2 * MIB, 16 * MIB, 2 * MIB, 22 * MIB, 8 * MIB)
    assert allocator.held == 80 * MIB
    for number in (0, 2, 4):
        allocator.died(number)
    allocator.born(6, 21 * MIB)  # of the 22
    allocator.born(7, 16 * MIB)
    allocator.born(8, 30 * MIB)
    allocator.born(9, MIB + 1)  # behind all of them, although a MiB of the 22 is left
    assert (allocator.held, used(allocator)) == (100 * MIB, 80 * MIB + 512)


def test_free_neighbours_become_one():
    allocator = holding(6 * MIB, 6 * MIB, 6 * MIB, 2 * MIB)  # all in one page of 20
    assert allocator.held == 20 * MIB
    for number in (0, 2, 1):
        allocator.died(number)
    allocator.born(4, 18 * MIB)
    assert allocator.held == 20 * MIB


def test_what_is_free_at_the_end_grows():
    allocator = CudaAllocator()
    for size in (40 * MIB, 44 * MIB):  # longer rows from step to step
        allocator.born(0, size)
        allocator.died(0)
    assert allocator.held == 60 * MIB


def test_whole_pages_inside_of_a_free_block_are_given_back():
    allocator = holding(30 * MIB, 8 * MIB)
    allocator.died(0)  # 30 free, 8 in use, 2 free: one page of the 30 is whole
    assert allocator.held == 40 * MIB
    allocator.empty_cache()
    assert allocator.held == 20 * MIB


def test_a_hole_of_pages_is_filled_first():
    allocator = holding(40 * MIB, 20 * MIB)
    allocator.died(0)
    allocator.empty_cache()
    assert allocator.held == 20 * MIB
    allocator.born(2, 40 * MIB)
    assert [(each.size, each.used) for each in blocks(allocator.large) if each.mapped] == [
        (40 * MIB, True), (20 * MIB, True),
    ]  # fmt: skip


def test_a_storage_without_bytes_asks_for_nothing():
    allocator = holding(0)
    allocator.died(0)
    assert allocator.held == 0


# -- for every sequence -------------------------------------------------------------------------------------------


def check(allocator: CudaAllocator, live: dict[int, int]) -> None:
    """What holds between two events."""
    assert used(allocator) == sum(-(-size // 512) * 512 for size in live.values())
    for pool in (allocator.small, allocator.large):
        assert sum(block.size for block in blocks(pool) if block.mapped) == pool.mapped
        for block in blocks(pool):
            assert block.mapped or not block.used
            if (after := block.after) is not None:
                assert after.before is block
                assert after.address == block.address + block.size
                assert block.used or after.used or block.mapped != after.mapped  # else they would be one


@given(requests=REQUESTS)
def test_nothing_overlaps_and_nothing_is_lost(requests):
    allocator = CudaAllocator()
    live: dict[int, int] = {}
    for event in lifetimes(requests):
        if event.size > 0:
            allocator.born(event.block, event.size)
            live[event.block] = event.size
        else:
            allocator.died(event.block)
            del live[event.block]
        check(allocator, live)
    allocator.empty_cache()
    assert allocator.held == 0
    assert allocator.small.first.after is None
    assert allocator.large.first.after is None
