"""Settings in the words of one trainer that are told in the words of another: what nothing takes is left, and named."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Translated:
    """Settings, of which a translation takes what the other trainer has a word for."""

    left: dict[str, Any]
    """What nobody has taken yet."""
    written: dict[str, Any] = field(default_factory=dict)
    """In the other trainer's words."""
    lacks: dict[str, str] = field(default_factory=dict)
    """By the option that the other lacks, what follows from that, where a translation says so itself."""

    def take(self, name: str, default: Any = None) -> Any:
        """A setting, which then counts as translated."""
        found = self.left.pop(name, None)
        return default if found is None else found

    def rename(self, names: Mapping[str, str]) -> None:
        """Writes settings under other names; those without a value are left."""
        for here, there in names.items():
            if self.left.get(here) is not None:
                self.written[there] = self.left.pop(here)

    def same(self, names: Iterable[str]) -> None:
        """Writes settings under their own names."""
        self.rename({name: name for name in names})
