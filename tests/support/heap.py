"""Keeps full garbage collections short."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


def leave_out() -> None:
    """Full garbage collections look no more at what is there now."""
    gc.collect()
    gc.freeze()


@contextlib.contextmanager
def young_heap() -> Iterator[None]:
    """A training begins with a full garbage collection, which takes longer than its steps unless what is there already
    is left out of it."""
    leave_out()
    try:
        yield
    finally:
        gc.unfreeze()
