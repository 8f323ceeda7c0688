"""An option is a dataclass field with the sentence that documents it; the command line and the docs read both."""

from __future__ import annotations

import copy
from dataclasses import field
from typing import Any


def option(default: Any, help: str, **metadata: Any) -> Any:
    """A field of an options class: its default, and the one sentence that documents it."""
    if isinstance(default, dict | list):
        return field(default_factory=lambda: copy.copy(default), metadata={"help": help, **metadata})
    return field(default=default, metadata={"help": help, **metadata})
