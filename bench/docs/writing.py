"""Writes what was recorded into pages, between two marks."""

from pathlib import Path


def write_between(page: Path, mark: str, lines: list[str], end: str) -> None:
    before, rest = page.read_text(encoding="utf-8").split(mark)
    _, after = rest.split(end)
    page.write_text("\n".join([before + mark, *lines, end]) + after, encoding="utf-8")
