"""A file of completions that is written batch by batch: after an interruption the same command goes on behind the last
row that is whole."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lowtide.cli.endings import UsageError
from lowtide.parsing import parse_json
from lowtide.trainers.checkpoints.durable import flush, write_text

SETTINGS = ".settings.json"
"""The end of the name of the file that says with which settings an output was written."""


@dataclass(frozen=True)
class Output:
    """A JSONL file that grows, and beside it the settings that it was begun with."""

    path: Path
    lines_a_row: int

    @property
    def _settings(self) -> Path:
        return self.path.with_name(self.path.name + SETTINGS)

    def begin(self, settings: Mapping[str, Any], *, overwrite: bool) -> int:
        """Gets the file ready; the rows that it has already. Of a row that is not whole nothing stays.

        Args:
            settings: what the rows depend on, as JSON has it.

        Raises:
            UsageError: it was begun with other settings, or written by something else.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if overwrite or not self.path.exists() or self.path.stat().st_size == 0:
            write_text(self._settings, json.dumps(settings, indent=2) + "\n")
            write_text(self.path, "")
            return 0
        others = self._differing(settings)
        if others:
            raise UsageError(f"--output {self.path} {others}: give another file, or --overwrite to write it anew")
        return self._cut()

    def append(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Adds lines, which are on the disk afterwards."""
        with self.path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows)
        flush(self.path)

    def _differing(self, settings: Mapping[str, Any]) -> str:
        """What keeps the file from being gone on with, as a part of a sentence; empty if nothing does."""
        try:
            known = parse_json(self._settings.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return f"is there, and no {self._settings.name} beside it says what wrote it"
        given = json.loads(json.dumps(settings))
        for name in [*known, *given]:
            if known.get(name) != given.get(name):
                was = f" ({known.get(name)!r}, now {given.get(name)!r})" if name not in ("prompts", "weights") else ""
                return f"was begun with other {name}{was}"
        return ""

    def _cut(self) -> int:
        """Cuts off what is behind the last whole row; how many there are."""
        ends, place = [0], 0
        with self.path.open("rb") as file:
            for line in file:
                place += len(line)
                if line.endswith(b"\n"):
                    ends.append(place)
        rows = (len(ends) - 1) // self.lines_a_row
        with self.path.open("r+b") as file:
            file.truncate(ends[rows * self.lines_a_row])
        return rows


def digest(value: Any) -> str:
    """A short name of a value that JSON can express."""
    return hashlib.blake2b(json.dumps(value, sort_keys=True, default=str).encode(), digest_size=16).hexdigest()


def weights_of(folder: str) -> str | None:
    """A short name of the weights in a folder, by their files' sizes and times; None of a name on the hub."""
    files = sorted(Path(folder).glob("*.safetensors")) if Path(folder).is_dir() else []
    return digest([(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]) if files else None
