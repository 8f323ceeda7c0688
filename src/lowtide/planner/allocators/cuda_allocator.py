"""PyTorch's caching allocator for CUDA, without CUDA: which device memory a sequence of births and deaths reserves.

Tensors ask for bytes, the device gives pages, and what lies between is what a run reserves beside what it holds. This
follows `c10/cuda/CUDACachingAllocator.cpp` (its native backend) rule by rule, with `expandable_segments:True`, which
lowtide's command line sets (`memory.allocators.settings`): sizes are rounded to 512 bytes; requests of at most 1 MiB
come from a small pool, others from a large one. A pool is one range of addresses that is backed with pages of 2 MiB
(small) or 20 MiB (large) where it has to grow. The smallest free block that is large enough serves, is split, and
merges with free neighbours when it is freed.

The constants are those of `c10/core/AllocatorConfig.h` in torch 2.13; they have had these values since torch 1.x, and
the 20 MiB have been an option of the environment (`large_segment_size_mb`) since 2.10. What is left out: a device that
is full, streams (all is one), events that delay a free, graphs' private pools, `max_split_size_mb` and rounding to
powers of two, which nobody asked for by default.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable
from dataclasses import dataclass
from itertools import islice

MIB = 1 << 20
MIN_BLOCK = 512
SMALL = 1 * MIB
"""The largest request of the small pool."""
SMALL_PAGE, LARGE_PAGE = 2 * MIB, 20 * MIB
ADDRESSES = LARGE_PAGE << 26
"""Bytes of a pool's addresses: more than any device has."""


@dataclass(eq=False, slots=True)
class Block:
    """A range of addresses: a tensor's, free, or not backed by pages yet."""

    address: int
    size: int
    used: bool = False
    mapped: bool = True
    before: Block | None = None
    """Its neighbours."""
    after: Block | None = None


class Pool:
    """The addresses that small, or large, requests come from.

    Args:
        page: bytes by which what is backed grows.
    """

    def __init__(self, page: int) -> None:
        self.page, self.mapped = page, 0
        self.first = Block(0, ADDRESSES, mapped=False)
        """The block with the lowest addresses, which stays the first whatever is split or merged."""
        self._free: list[tuple[int, int, Block]] = []
        """(size, address, block), the smallest first."""
        self._unmapped: list[tuple[int, Block]] = [(0, self.first)]
        """(address, block), the lowest first."""

    def take(self, size: int) -> Block:
        """A block of so many bytes."""
        block = self._cached(size) or self._grown(size)
        self._remove(block)
        if block.size > size:
            self._add(_cut(block, size))
        block.used = True
        return block

    def give_back(self, block: Block) -> None:
        """A block that was taken becomes free, and one with its free neighbours."""
        block.used = False
        self._settle(block)

    def empty_cache(self) -> None:
        """Takes the whole pages inside of free blocks away."""
        for _, _, block in list(self._free):
            start = _round_up(block.address, self.page)
            stop = (block.address + block.size) // self.page * self.page
            if start < stop:
                self._unmap(block, start, stop)

    def _cached(self, size: int) -> Block | None:
        """The smallest free block that is large enough; of the last one before unmapped addresses, what it could grow
        to counts."""
        place = bisect_left(self._free, (size,))
        if place == len(self._free):
            return None
        block = self._free[place][2]
        for _, _, following in islice(self._free, place + 1, None):
            if _could_grow_to(following) >= _could_grow_to(block):
                break
            block = following
        return block

    def _grown(self, size: int) -> Block:
        """A free block that is large enough, at the lowest address where pages can make one."""
        block = next(filter(None, (_room(each, size) for _, each in self._unmapped)))
        if not block.mapped:
            self._map(block, min(block.size, size))
        while block.size < size:
            following = block.after
            assert following is not None
            self._map(following, min(size - block.size, following.size))
        return block

    def _map(self, block: Block, size: int) -> None:
        """Backs the start of an unmapped block with pages; it becomes free, and part of a free one before it."""
        pages = _round_up(size, self.page)
        self.mapped += pages
        self._remove(block)
        if pages < block.size:
            self._add(_cut(block, pages))
        block.mapped = True
        self._settle(block)

    def _unmap(self, block: Block, start: int, stop: int) -> None:
        """Takes the pages between two addresses inside of a free block away."""
        self._remove(block)
        middle = _cut(block, start - block.address) if start > block.address else block
        if middle is not block:
            self._add(block)
        if stop < middle.address + middle.size:
            self._add(_cut(middle, stop - middle.address))
        middle.mapped = False
        self.mapped -= middle.size
        self._settle(middle)

    def _settle(self, block: Block) -> None:
        """Adds a block that nobody uses, as one with neighbours of its kind."""
        before, after = block.before, block.after
        if after is not None and not after.used and after.mapped == block.mapped:
            self._remove(after)
            _join(block, after)
        if before is not None and not before.used and before.mapped == block.mapped:
            self._remove(before)
            _join(before, block)
            block = before
        self._add(block)

    def _add(self, block: Block) -> None:
        """A block that nobody uses."""
        if block.mapped:
            insort(self._free, (block.size, block.address, block))
        else:
            insort(self._unmapped, (block.address, block))

    def _remove(self, block: Block) -> None:
        """A block that was added."""
        if block.mapped:
            del self._free[bisect_left(self._free, (block.size, block.address))]
        else:
            del self._unmapped[bisect_left(self._unmapped, (block.address,))]


class CudaAllocator:
    """The allocator of one device, asked by one stream. Its keys are anything that names a living storage."""

    def __init__(self) -> None:
        self.small, self.large = Pool(SMALL_PAGE), Pool(LARGE_PAGE)
        self._held: dict[Hashable, tuple[Pool, Block]] = {}

    @property
    def held(self) -> int:
        """Bytes that the device has given and not got back: `torch.cuda.memory_reserved`."""
        return self.small.mapped + self.large.mapped

    def born(self, key: Hashable, size: int, mapped: bool = False) -> None:
        """Finds a block for so many bytes; none is asked for where there are none.

        Args:
            mapped: is there for the sake of the host's heap, which maps some blocks by themselves.
        """
        if size:
            rounded = _round_up(size, MIN_BLOCK)
            pool = self.small if rounded <= SMALL else self.large
            self._held[key] = pool, pool.take(rounded)

    def died(self, key: Hashable) -> None:
        """Gives a block back to its pool."""
        if key in self._held:
            pool, block = self._held.pop(key)
            pool.give_back(block)

    def trim(self) -> None:
        """Nothing: what trims the host's heap leaves a device alone."""

    def empty_cache(self) -> None:
        """Gives back what the device can take: whole pages that are free."""
        for pool in (self.small, self.large):
            pool.empty_cache()


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
