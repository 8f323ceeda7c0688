"""Records the storages of a run on the CPU: each operation's results are looked at, and each storage as it is freed.

The same idea as `tracing.trace`, on tensors that hold memory: nothing is estimated. What a kernel takes and gives back
inside of one operation is not seen.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterable
from typing import Any, Self

from torch import Tensor

from lowtide.compat.torch import BACKWARD, TorchDispatchMode, backward_sequence_number, next_sequence_number, parts_of
from lowtide.planner.profiling.recording import BORN_IN, Block, Recording, is_internal, short_file
from lowtide.planner.tracing.storage_watch import StorageWatch
from lowtide.step.phases import BETWEEN


class LiveStorages(StorageWatch[int], TorchDispatchMode):
    """Records while it is entered; a storage has its block's number.

    Attributes:
        step: number of the step, set by whoever runs it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.recording = Recording()
        self.step = 0
        self._phase = BETWEEN
        self._start = time.perf_counter()
        self._size: dict[int, int] = {}
        """Of each living block."""
        self._lines: dict[int, str] = {}
        """From the sequence number of an autograd node to the line that made it."""

    def enter(self, ended: str, begins: str) -> None:
        """A phase begins: a listener of `Phases`."""
        self._phase = begins
        self.recording.enter(begins, self.step, self._now())

    def belongs(self, tensors: Iterable[tuple[str, Tensor]], category: str) -> None:
        """Says what some tensors are, by name; those that were not seen being born have been there before."""
        for name, tensor in tensors:
            for part in parts_of(tensor):
                block = self._see(part, name, "")
                if block.category != category:
                    block.category, block.made = category, name

    def finished(self) -> Recording:
        """What was recorded; nothing is added to it any more."""
        self.forget()
        return self.recording

    def __enter__(self) -> Self:
        self._start = time.perf_counter()
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        line = self._line()
        out = func(*args, **(kwargs or {}))
        name = func.name().removeprefix("aten::").partition(".")[0]
        for each in out if isinstance(out, tuple | list) else (out,):
            if isinstance(each, Tensor):
                for part in parts_of(each):
                    self._see(part, name, line)
        return out

    def _see(self, tensor: Tensor, made: str, line: str) -> Block:
        storage = tensor.untyped_storage()
        number, size = self.block_of(storage), storage.nbytes()
        if number is None:
            number = len(self.recording.blocks)
            category = self.owner or BORN_IN.get(self._phase, "other")
            dtype = str(tensor.dtype).removeprefix("torch.")
            self.recording.blocks.append(
                Block(category, self._phase, self.step, made, tuple(tensor.shape), dtype, line)
            )
            self.follow(storage, number)
            self._size[number] = 0
        if size != self._size[number]:  # new, or resized in place
            self.recording.add(number, size - self._size[number], self._now())
            self._size[number] = size
        return self.recording.blocks[number]

    def freed(self, block: int) -> None:
        self.recording.add(block, -self._size.pop(block), self._now())

    def _now(self) -> float:
        return time.perf_counter() - self._start

    def _line(self) -> str:
        """The line that asks for an operation; in backward, where no Python does, the one whose gradient it forms.

        Autograd numbers the nodes of a thread, and a node is made before its operation runs.
        """
        frame = inspect.currentframe()
        for _ in range(2):  # this one, and that of the dispatch
            frame = frame and frame.f_back
        while frame is not None and frame.f_code.co_name != BACKWARD:
            if not is_internal(frame.f_code.co_filename):
                code = frame.f_code
                line = f"{short_file(code.co_filename)}:{frame.f_lineno} in {code.co_qualname}"
                return self._lines.setdefault(next_sequence_number() - 1, line) and line
            frame = frame.f_back
        number = backward_sequence_number()
        forward = None if number is None else self._lines.get(number)
        return f"backward of {forward}" if forward else ""
