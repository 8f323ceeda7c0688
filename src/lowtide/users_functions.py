"""Functions that a user passes, such as `compute_metrics`: what they raise goes on, with a note of whose it is.

The traceback is what the function's author needs; among the frames of a training the note says where to look.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def called_for_user(argument: str, function: Any) -> Iterator[None]:
    """Around the call of a function that came as an argument."""
    try:
        yield
    except Exception as error:
        name = getattr(function, "__qualname__", type(function).__name__)
        error.add_note(f"This was raised by {argument}, a function that was passed ({name}).")
        raise
