"""What the project takes from the inside of PEFT."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


def adapters_switched_off(model: Any) -> bool:
    """Whether this is inside of `disable_adapter` of a model with virtual tokens, which keeps a private flag for it."""
    return bool(getattr(model, "_adapters_disabled", False))


@contextlib.contextmanager
def caches_kept(tuner: Any) -> Iterator[None]:
    """A layer's small cache is afterwards as it was: a merge that is only looked at leaves nothing in it (DoRA's
    norm of the weights, for one)."""
    caches: dict[str, Any] | None = getattr(tuner, "_caches", None)
    before = None if caches is None else dict(caches)
    try:
        yield
    finally:
        if before is not None:
            tuner._caches = before
