"""PyTorch's caching allocator for CUDA, without CUDA: which device memory a sequence of births and deaths reserves.

Tensors ask for bytes, the device gives segments, and what lies between is what a run reserves beside what it holds.
This follows `c10/cuda/CUDACachingAllocator.cpp` (its native backend) rule by rule: sizes are rounded to 512 bytes;
requests of at most 1 MiB come from a small pool of 2 MiB segments, others from a large one, with segments of 20 MiB
below 10 MiB and of the request itself, in steps of 2 MiB, above. The smallest free block that is large enough serves,
is split where enough remains, and merges with free neighbours when it is freed. A full device first gets back the
segments that are free as a whole.

With `expandable_segments:True`, which lowtide's command line sets (`memory.allocators.settings`), a pool is one range
of addresses that is backed with pages of 2 MiB (small) or 20 MiB (large) where it has to grow.

The constants are those of `c10/core/AllocatorConfig.h` in torch 2.13; they have had these values since torch 1.x, and
the 20 MiB have been an option of the environment (`large_segment_size_mb`) since 2.10. What is left out: streams (all
is one), events that delay a free, graphs' private pools, `max_split_size_mb` and rounding to powers of two, which
nobody asked for by default.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import torch

from lowtide.memory.allocators.measure import bytes_text

MIB = 1 << 20
MIN_BLOCK = 512
SMALL = 1 * MIB
"""The largest request of the small pool."""
SMALL_SEGMENT = 2 * MIB
LARGE_SEGMENT = 20 * MIB
MIN_LARGE = 10 * MIB
"""Requests from here on get a segment of their own size."""
ROUND_LARGE = 2 * MIB
BOUNDLESS = 1 << 50
"""The bytes of a device that is never full."""


class Event(Protocol):
    """A storage is born, or dies: what `planner.tracing.trace` records."""

    @property
    def block(self) -> Hashable:
        """Names the storage, while it lives."""
        ...

    @property
    def size(self) -> int:
        """Bytes; below zero where it dies."""
        ...

    @property
    def phase(self) -> str: ...


@dataclass
class Peak:
    """The most bytes at a time: those in blocks that tensors hold, and those that the device gave."""

    allocated: int = 0
    """`torch.cuda.max_memory_allocated`: with what rounding and unsplit blocks add."""
    reserved: int = 0
    """`torch.cuda.max_memory_reserved`"""


@dataclass(frozen=True)
class Replay:
    """What a sequence of events makes of a device."""

    peak: Peak
    phases: dict[str, Peak]
    """The same within each phase."""
    retries: int
    """How often the device was full, and cached segments were given back to it."""


def replay(events: Iterable[Event], *, capacity: int | None = None, expandable: bool = True) -> Replay:
    """Runs a sequence of events through the allocator.

    Args:
        events: births and deaths in their order; storages of no bytes ask for nothing.
        capacity: bytes that the device can give, its context not counted; None for any number.
        expandable: whether segments grow (`expandable_segments:True`).

    Raises:
        torch.OutOfMemoryError: the device cannot give what an event asks for.
    """
    allocator = CudaAllocator(capacity, expandable=expandable)
    phases: dict[str, Peak] = {}
    for event in events:
        if event.size > 0:
            allocator.born(event.block, event.size)
        elif event.size < 0:
            allocator.died(event.block)
        peak = phases.setdefault(event.phase, Peak())
        peak.allocated = max(peak.allocated, allocator.allocated)
        peak.reserved = max(peak.reserved, allocator.reserved)
    return Replay(allocator.peak, phases, allocator.retries)


@dataclass(eq=False, slots=True)
class Block:
    """A range of addresses in a segment: a tensor's, free, or not backed by pages yet."""

    address: int
    size: int
    used: bool = False
    mapped: bool = True
    before: Block | None = None
    """Its neighbours in the segment."""
    after: Block | None = None


@dataclass(eq=False)
class Pool:
    """The blocks that small, or large, requests come from."""

    small: bool
    free: list[tuple[int, int, Block]] = field(default_factory=list)
    """(size, address, block), the smallest first."""
    unmapped: list[tuple[int, Block]] = field(default_factory=list)
    """(address, block), the lowest first; of segments that grow."""

    @property
    def page(self) -> int:
        """Bytes by which its segments grow."""
        return SMALL_SEGMENT if self.small else LARGE_SEGMENT

    def add(self, block: Block) -> None:
        """A block that nobody uses."""
        if block.mapped:
            insort(self.free, (block.size, block.address, block))
        else:
            insort(self.unmapped, (block.address, block))

    def remove(self, block: Block) -> None:
        """A block that was added."""
        if block.mapped:
            del self.free[bisect_left(self.free, (block.size, block.address))]
        else:
            del self.unmapped[bisect_left(self.unmapped, (block.address,))]


class CudaAllocator:
    """The allocator of one device, asked by one stream. Its keys are anything that names a living storage.

    Args:
        capacity: bytes that the device can give; None for any number.
        expandable: whether segments grow.
    """

    def __init__(self, capacity: int | None = None, *, expandable: bool = True) -> None:
        self.capacity = BOUNDLESS if capacity is None else capacity
        self.expandable = expandable
        self.allocated = self.reserved = self.retries = 0
        self.peak = Peak()
        self.segments: list[Block] = []
        """The first block of each, which stays the first whatever is split or merged."""
        self._pools = {small: Pool(small) for small in (True, False)}
        self._held: dict[Hashable, tuple[Pool, Block]] = {}
        self._next_address = 0

    @property
    def held(self) -> int:
        """Bytes that the device has given and not got back."""
        return self.reserved

    def born(self, key: Hashable, size: int, mapped: bool = False) -> None:
        """Finds a block for so many bytes; none is asked for where there are none.

        Args:
            mapped: is there for the sake of the host's heap, which maps some blocks by themselves.

        Raises:
            torch.OutOfMemoryError: the device is full, even with everything cached given back.
        """
        if size == 0:
            return
        rounded = _round_up(size, MIN_BLOCK)
        pool = self._pools[rounded <= SMALL]
        block = self._cached(pool, rounded) or self._grown(pool, rounded)
        if block is None:
            self.retries += 1
            self.empty_cache()
            block = self._grown(pool, rounded)
        if block is None:
            raise torch.OutOfMemoryError(
                f"no room for {bytes_text(size)}: {bytes_text(self.reserved)} of {bytes_text(self.capacity)} are "
                f"reserved, {bytes_text(self.allocated)} of them held"
            )
        pool.remove(block)
        if self._splits(pool, block.size - rounded):
            pool.add(_cut(block, rounded))
        block.used = True
        self._held[key] = pool, block
        self.allocated += block.size
        if self.allocated > self.peak.allocated:
            self.peak.allocated = self.allocated

    def died(self, key: Hashable) -> None:
        """Gives a block back to its pool, merged with its free neighbours."""
        if key not in self._held:
            return
        pool, block = self._held.pop(key)
        self.allocated -= block.size
        block.used = False
        self._settle(pool, block)

    def trim(self) -> None:
        """Nothing: what trims the host's heap leaves a device alone."""

    def empty_cache(self) -> None:
        """Gives back what the device can take: segments that are free as a whole, and free pages of those that grow."""
        for pool in self._pools.values():
            for _, _, block in list(pool.free):
                if self.expandable:
                    self._unmap(pool, block)
                elif block.before is None and block.after is None:
                    pool.remove(block)
                    self.segments.remove(block)
                    self.reserved -= block.size

    def blocks(self) -> Iterator[Block]:
        """All blocks, segment by segment, in the order of their addresses."""
        for first in self.segments:
            block: Block | None = first
            while block is not None:
                yield block
                block = block.after

    # -- finding a block -----------------------------------------------------------------------------------------

    def _cached(self, pool: Pool, size: int) -> Block | None:
        """The smallest free block that is large enough; at the end of a segment what it could grow to counts."""
        place = bisect_left(pool.free, (size,))
        if place == len(pool.free):
            return None
        block = pool.free[place][2]
        while self.expandable and place + 1 < len(pool.free):
            place += 1
            following = pool.free[place][2]
            if _could_grow_to(following) >= _could_grow_to(block):
                break
            block = following
        return block

    def _splits(self, pool: Pool, remaining: int) -> bool:
        return remaining >= MIN_BLOCK if pool.small or self.expandable else remaining > SMALL

    def _grown(self, pool: Pool, size: int) -> Block | None:
        """A free block of new memory, added to the pool; None if the device is full."""
        if self.expandable:
            return self._expanded(pool, size)
        segment = SMALL_SEGMENT if pool.small else LARGE_SEGMENT if size < MIN_LARGE else _round_up(size, ROUND_LARGE)
        if not self._reserve(segment):
            return None
        block = self._segment(segment)
        pool.add(block)
        return block

    def _reserve(self, size: int) -> bool:
        if self.reserved + size > self.capacity:
            return False
        self.reserved += size
        self.peak.reserved = max(self.peak.reserved, self.reserved)
        return True

    def _segment(self, size: int, mapped: bool = True) -> Block:
        block = Block(self._next_address, size, mapped=mapped)
        self._next_address += size + LARGE_SEGMENT
        self.segments.append(block)
        return block

    # -- segments that grow --------------------------------------------------------------------------------------

    def _expanded(self, pool: Pool, size: int) -> Block | None:
        """A free block that is large enough, at the lowest address where pages can make one."""
        block = next(filter(None, (_room(each, size) for _, each in pool.unmapped)), None)
        if block is None:
            # Addresses for more than the device has, so that pages can move behind what is in use.
            block = self._segment(_round_up(self.capacity + self.capacity // 8, pool.page), mapped=False)
            pool.add(block)
        if not block.mapped and not self._map(pool, block, min(block.size, size)):
            return None
        while block.size < size:
            following = block.after
            assert following is not None
            if not self._map(pool, following, min(size - block.size, following.size)):
                return None
        return block

    def _map(self, pool: Pool, block: Block, size: int) -> bool:
        """Backs the start of an unmapped block with pages; it becomes free, and part of a free one before it."""
        pages = _round_up(size, pool.page)
        if not self._reserve(pages):
            return False
        pool.remove(block)
        if pages < block.size:
            pool.add(_cut(block, pages))
        block.mapped = True
        self._settle(pool, block)
        return True

    def _unmap(self, pool: Pool, block: Block) -> None:
        """Takes the whole pages inside a free block away."""
        first = self._segment_start(block)
        start = _round_up(block.address - first, pool.page) + first
        stop = (block.address + block.size - first) // pool.page * pool.page + first
        if start >= stop:
            return
        pool.remove(block)
        middle = _cut(block, start - block.address) if start > block.address else block
        if middle is not block:
            pool.add(block)
        if stop < middle.address + middle.size:
            pool.add(_cut(middle, stop - middle.address))
        middle.mapped = False
        self.reserved -= middle.size
        self._settle(pool, middle)

    def _segment_start(self, block: Block) -> int:
        """The address at which the segment of a block begins."""
        return max(first.address for first in self.segments if first.address <= block.address)

    def _settle(self, pool: Pool, block: Block) -> None:
        """Puts a block that nobody uses into its pool, as one with neighbours of its kind."""
        before, after = block.before, block.after
        if after is not None and not after.used and after.mapped == block.mapped:
            pool.remove(after)
            _join(block, after)
        if before is not None and not before.used and before.mapped == block.mapped:
            pool.remove(before)
            _join(before, block)
            block = before
        pool.add(block)


def _round_up(size: int, step: int) -> int:
    return -(-size // step) * step


def _could_grow_to(block: Block) -> int:
    after = block.after
    return block.size + (after.size if after is not None and not after.mapped else 0)


def _room(unmapped: Block, size: int) -> Block | None:
    """Where a block of a size can begin: at an unmapped one, or at the free one before it; None if nowhere."""
    before = unmapped.before
    first = before if before is not None and not before.used else unmapped
    room, block = 0, first
    while block is not None and not block.used and room < size:
        room += block.size
        block = block.after
    return first if room >= size else None


def _cut(block: Block, size: int) -> Block:
    """Leaves a block its first bytes, and returns the rest as a block of its own."""
    rest = Block(block.address + size, block.size - size, mapped=block.mapped, before=block, after=block.after)
    if rest.after is not None:
        rest.after.before = rest
    block.size, block.after = size, rest
    return rest


def _join(block: Block, after: Block) -> None:
    """Makes one block of two neighbours."""
    block.size += after.size
    block.after = after.after
    if block.after is not None:
        block.after.before = block
