"""How an exhausted memory shows, and how what can be had back is given back."""

from __future__ import annotations

import gc
import traceback

import torch
from safetensors import SafetensorError

SIGNS = (
    *("out of memory", "can't allocate memory", "not enough memory", "ALLOC_FAILED", "cannot allocate memory"),
    *("std::bad_alloc", "could not create a primitive", "could not create a memory"),
    *("storage size calculation overflowed", "fail to memory allocation"),
)
"""What torch's allocators, cuBLAS, cuDNN, C++, oneDNN, the system and tokenizers say, where the error has no type of
its own; torch also of a tensor of more bytes than it can count."""
OF_RUST = "PanicException"
"""The name of what tokenizers raise where they cannot go on, which is no `Exception`, and which no module has."""


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error, or the one that it was raised from, means that memory ran out, on the device or on the host."""
    if error is None:
        return False
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    unnamed = isinstance(error, RuntimeError | OSError | SafetensorError) or type(error).__name__ == OF_RUST
    said = unnamed and any(sign.lower() in str(error).lower() for sign in SIGNS)
    return said or is_out_of_memory(error.__cause__)


def first_line(error: BaseException) -> str:
    """What an error says, in a line."""
    return str(error).strip().split("\n")[0] or type(error).__name__


def drop_frames(error: BaseException | None) -> None:
    """Empties the frames that an error and those before it passed: they hold the tensors that did not fit."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__


def free_caches() -> None:
    """Collects what only cycles hold, and gives cached blocks back to the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
