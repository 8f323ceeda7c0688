"""Every benchmark answers `--help`, and writes nothing then."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMMANDS = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in (ROOT / "bench").rglob("*.py")
    if path.stem == "__main__" or '__name__ == "__main__"' in path.read_text(encoding="utf-8")
)


def written() -> dict[Path, int]:
    """When each file was written that a benchmark may write."""
    files = [*(ROOT / "bench").rglob("*.json"), *(ROOT / "docs").rglob("*"), ROOT / "README.md"]
    return {path: path.stat().st_mtime_ns for path in files if path.is_file()}


@pytest.mark.parametrize("command", COMMANDS)
def test_help_is_answered_and_nothing_is_written(command, monkeypatch, capsys):
    before = written()
    monkeypatch.setattr(sys, "argv", [command, "--help"])
    monkeypatch.delitem(sys.modules, command, raising=False)
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(command, run_name="__main__")
    assert ended.value.code == 0
    assert "usage:" in capsys.readouterr().out
    assert written() == before
