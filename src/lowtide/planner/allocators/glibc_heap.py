"""What glibc's heap holds resident while blocks come and go: the living ones, and the holes that they leave.

A model of `malloc` as `lowtide.memory.allocators.host_heap` sets it up: a block takes the smallest hole of the heap
that is large enough (best fit, holes side by side are one). Where there is none, one above a threshold is mapped by
itself, and given back when it dies; the others take from the heap's end, which never goes back. A trim gives the pages
of all holes back until they are used again. Source: glibc's malloc/malloc.c (`_int_malloc`, `_int_memalign`, `mtrim`),
version 2.36.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable

ALIGNMENT = 64
"""Of torch's tensors on a CPU; `memalign` takes as much more, so that it can align."""
PAGE = 4096
SMALL_SHARE, SMALL_MOST = 0.1, 34 << 20
"""The share of its extent, and the most bytes, that a heap which is never trimmed holds in holes of small objects. By
`mallinfo2` at the peak of a run of 22M parameters 40 MB of 137 MB are free, and the replay of tensors knows of 26."""
CUT_SHARE = 0.15
"""And the share of its extent in holes that are too short for what they held, where a thread's cache gives slivers of
them away (`lowtide.memory.allocators.settings`): by chance, from run to run elsewhere, between nothing and a third."""
LEAST = 1024
"""Bytes below which a block lies among the small ones, which are not modelled."""


class GlibcHeap:
    """Bytes that are resident for blocks of so many bytes.

    Args:
        mmap_above: blocks from which bytes on are mapped by themselves.
        trim_above: bytes of holes from which a trim is made.
        near: the share of the most it ever held within which a trim is made.
        thread_cache: whether each thread has its cache.
    """

    def __init__(self, mmap_above: int, trim_above: int, *, near: float = 1.0, thread_cache: bool = False) -> None:
        self.mmap_above, self.trim_above, self.near, self.thread_cache = mmap_above, trim_above, near, thread_cache
        self.mapped = 0
        self.end = 0
        self.most = 0
        """Bytes that were ever resident."""
        self.cold = 0
        """Bytes inside the heap that a trim gave back."""
        self._placed: dict[Hashable, tuple[int, int]] = {}
        self._by_size: list[tuple[int, int]] = []
        self._at: dict[int, tuple[int, int]] = {}
        """Start of a hole -> its size, and how much of that is cold."""
        self._ends: dict[int, int] = {}
        self._free = 0
        self.trimmed = False

    @property
    def held(self) -> int:
        """Bytes resident now."""
        whole = self._touched
        if self.trimmed or not self.end:
            return whole
        small = min(int(SMALL_SHARE * self.end), SMALL_MOST)
        return whole + small + (int(CUT_SHARE * self.end) if self.thread_cache else 0)

    @property
    def _touched(self) -> int:
        return self.mapped + self.end - self.cold

    def born(self, key: Hashable, size: int, mapped: bool = False) -> None:
        """A block, by a key that is its own.

        Args:
            mapped: maps it whatever its size, as glibc does before it is told how.
        """
        if size >= LEAST:
            self._place(key, size, mapped)
            self.most = max(self.most, self._touched)

    def _place(self, key: Hashable, size: int, mapped: bool) -> None:
        need = _rounded(size + 16, ALIGNMENT) + ALIGNMENT
        place = bisect_left(self._by_size, (need, -1))
        if mapped or (place == len(self._by_size) and size >= self.mmap_above):
            self._placed[key] = (-1, _rounded(size, PAGE))
            self.mapped += self._placed[key][1]
            return
        if place == len(self._by_size):
            self._placed[key] = self._from_the_end(need), need
            return
        room, start = self._by_size[place]
        cold = self._take(start)
        warmed = max(0, need - (room - cold))
        self.cold -= warmed
        if room > need:
            self._leave(start + need, room - need, cold - warmed)
        self._placed[key] = start, need

    def died(self, key: Hashable) -> None:
        """The same block goes."""
        start, size = self._placed.pop(key, (0, 0))
        if start < 0:
            self.mapped -= size
        elif size:
            self._give(start, size)

    def empty_cache(self) -> None:
        """Nothing: that is of a device's allocator."""

    def trim(self) -> None:
        """Holes go back to the system if they add up, near the most that was ever held."""
        self.trimmed = True
        if self._free <= self.trim_above or self._touched < self.most * (1 - self.near):
            return
        for start, (size, cold) in self._at.items():
            whole = (start + size) // PAGE * PAGE - _rounded(start, PAGE)
            if whole > cold:
                self.cold += whole - cold
                self._at[start] = size, whole

    def _from_the_end(self, need: int) -> int:
        """The last hole, if it lies at the end, is the beginning of what is taken."""
        start = self._ends.get(self.end)
        if start is None:
            start = self.end
        else:
            self.cold -= self._take(start)
        self.end = start + need
        return start

    def _give(self, start: int, size: int) -> None:
        cold = 0
        before = self._ends.get(start)
        if before is not None:
            room = self._at[before][0]
            cold += self._take(before)
            start, size = before, size + room
        after = self._at.get(start + size)
        if after is not None:
            cold += self._take(start + size)
            size += after[0]
        self._leave(start, size, cold)

    def _leave(self, start: int, size: int, cold: int) -> None:
        self._at[start] = size, cold
        self._ends[start + size] = start
        insort(self._by_size, (size, start))
        self._free += size

    def _take(self, start: int) -> int:
        """Removes a hole; returns how much of it is cold."""
        size, cold = self._at.pop(start)
        del self._ends[start + size]
        del self._by_size[bisect_left(self._by_size, (size, start))]
        self._free -= size
        return cold


def _rounded(size: int, unit: int) -> int:
    return -(-size // unit) * unit
