"""Records the blocks of a run on CUDA, from the history that torch's caching allocator keeps of itself.

The allocator says when each block was given out, at which address and from which lines of Python; the phases, and
which tensors lie where, are noted here by the same clock. Sizes are the allocator's, rounded up to 512 bytes.
Workspaces that libraries keep are no tensors, and are left out. For the format of a history see
`torch.cuda.memory._snapshot`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from lowtide.compat.torch import cuda_history, end_cuda_history, record_cuda_history
from lowtide.planner.devices import device_named
from lowtide.planner.profiling.recording import BORN_IN, Block, Recording, is_internal, short_file
from lowtide.step.phases import BETWEEN

MAX_ENTRIES = 2_000_000
"""Of the history; a few steps have some ten thousand."""


@dataclass(frozen=True)
class Note:
    """From a time on: the phase and the owner of what is made."""

    time_us: int
    step: int
    phase: str
    owner: str | None


@dataclass(frozen=True)
class Named:
    """At a time, what lay at an address."""

    time_us: int
    address: int
    size: int
    category: str
    name: str
    shape: tuple[int, ...]
    dtype: str


class CudaHistory:
    """Records while it is entered; the same interface as `LiveStorages`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.step = 0
        self._phase = BETWEEN
        self._owner: str | None = None
        self._notes: list[Note] = []
        self._named: list[Named] = []
        self._last: dict[int, tuple[str, str]] = {}

    def enter(self, ended: str, begins: str) -> None:
        """A phase begins: a listener of `Phases`."""
        self._phase = begins
        self._notes.append(Note(_now_us(), self.step, begins, self._owner))

    @contextlib.contextmanager
    def owned_by(self, category: str) -> Iterator[None]:
        """While it lasts, what is made is of a category, whatever the phase."""
        before, self._owner = self._owner, category
        self.enter(self._phase, self._phase)
        try:
            yield
        finally:
            self._owner = before
            self.enter(self._phase, self._phase)

    def belongs(self, tensors: Iterable[tuple[str, Tensor]], category: str) -> None:
        """Says what some tensors are, by name."""
        for name, tensor in tensors:
            if tensor.device.type != "cuda":
                continue
            storage = tensor.untyped_storage()
            address = storage.data_ptr()
            if self._last.get(address) != (category, name):
                self._last[address] = category, name
                dtype = str(tensor.dtype).removeprefix("torch.")
                found = (address, storage.nbytes(), category, name, tuple(tensor.shape), dtype)
                self._named.append(Named(_now_us(), *found))

    def finished(self) -> Recording:
        """What was recorded."""
        number = torch.cuda.current_device() if self.device.index is None else self.device.index
        history = cuda_history(number)
        end_cuda_history()
        return recording_of(history, self._notes, self._named, device_named("cuda").workspaces)

    def __enter__(self) -> Self:
        record_cuda_history(MAX_ENTRIES)
        return self

    def __exit__(self, *error: Any) -> None:
        if error[0] is not None:
            end_cuda_history()


def recording_of(
    history: Sequence[Mapping[str, Any]],
    notes: Sequence[Note],
    named: Sequence[Named],
    workspaces: Collection[int] = (),
) -> Recording:
    """The recording of an allocator's history.

    Args:
        history: its entries, of one device.
        notes: in the order of time.
        named: likewise; an address that no entry knows has held its tensor from before.
        workspaces: bytes of blocks that are a library's, if they stay to the end and nothing names them.
    """
    recording = Recording()
    living: dict[int, tuple[int, int]] = {}
    start = min([*(entry["time_us"] for entry in history), *(each.time_us for each in (*notes, *named))], default=0)
    now = Note(start, 0, BETWEEN, None)

    def born(address: int, size: int, block: Block, seconds: float) -> None:
        living[address] = len(recording.blocks), size
        recording.blocks.append(block)
        recording.add(living[address][0], size, seconds)

    kept = _last_at_each_address(history)
    known = [
        (entry["time_us"], 1, entry)
        for entry in history
        if entry["action"] in ("alloc", "free_completed")
        and not (entry["size"] in workspaces and entry is kept[entry["addr"]])
    ]
    told = [(each.time_us, 0 if isinstance(each, Note) else 2, each) for each in (*notes, *named)]
    for time_us, _, each in sorted(known + told, key=lambda item: item[:2]):
        seconds = (time_us - start) / 1e6
        if isinstance(each, Note):
            now = each
            recording.enter(now.phase, now.step, seconds)
        elif isinstance(each, Named):
            if each.address not in living:
                born(each.address, each.size, Block(each.category, now.phase, now.step, each.name), seconds)
            block = recording.blocks[living[each.address][0]]
            block.category, block.made, block.shape, block.dtype = each.category, each.name, each.shape, each.dtype
        elif each["action"] == "alloc":
            category = now.owner or BORN_IN.get(now.phase, "other")
            block = Block(category, now.phase, now.step, "", line=_line(each.get("frames", ())))
            born(each["addr"], each["size"], block, seconds)
        elif each["addr"] in living:
            number, size = living.pop(each["addr"])
            recording.add(number, -size, seconds)
    return recording


def _last_at_each_address(history: Sequence[Mapping[str, Any]]) -> dict[int, Mapping[str, Any] | None]:
    """The entry that gave out the block which is at an address in the end; None where there is none."""
    found: dict[int, Mapping[str, Any] | None] = {}
    for entry in sorted(history, key=lambda entry: entry["time_us"]):
        if entry["action"] in ("alloc", "free_completed"):
            found[entry["addr"]] = entry if entry["action"] == "alloc" else None
    return found


def _line(frames: Sequence[Mapping[str, Any]]) -> str:
    """The innermost line outside of torch."""
    for frame in frames:
        if not is_internal(frame["filename"]):
            return f"{short_file(frame['filename'])}:{frame['line']} in {frame['name']}"
    return ""


def _now_us() -> int:
    return time.time_ns() // 1000
