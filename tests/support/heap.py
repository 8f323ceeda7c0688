"""Keeps full garbage collections short."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def young_heap() -> Iterator[None]:
    """A training begins with a full garbage collection, which takes longer than its steps unless what is there already
    is left out of it."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
