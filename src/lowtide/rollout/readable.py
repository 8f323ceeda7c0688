"""Text that every reader takes: JSON can spell halves of surrogate pairs, which UTF-8, and so tokenizers and files, has
not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def readable(value: Any) -> Any:
    """A text, or lists and dicts of texts, with a question mark for each half of a surrogate pair.

    Raises:
        RecursionError: it is nested too deep.
    """
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, Mapping):
        return {readable(key): readable(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [readable(each) for each in value]
    return value
