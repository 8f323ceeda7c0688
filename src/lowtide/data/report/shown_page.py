"""Rows as the model will see them, as HTML: context, what is scored and what is dropped, coloured. All text is escaped.

In a notebook, `ShownRow` shows itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from lowtide.data.report.row_parts import KINDS, ShownSegment
from lowtide.html_shell import page
from lowtide.own_files import writing

STYLE = (
    ".shown { white-space: pre-wrap; overflow-wrap: anywhere; font-family: monospace; }"
    ".shown .context { opacity: .6; } .shown .scored { background: #2d7d4640; font-weight: 700; }"
    ".shown .dropped { text-decoration: line-through; color: #c0392b; }"
)


@dataclass(frozen=True)
class ShownRow:
    """A row of a dataset, by its number, and its segments."""

    number: int
    segments: Sequence[ShownSegment]

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return f"<style>{STYLE}</style>{self.html()}"

    def html(self) -> str:
        """The row, without the style of its parts."""
        return "\n".join(self._of(place, segment) for place, segment in enumerate(self.segments, start=1))

    def _of(self, place: int, segment: ShownSegment) -> str:
        counts, where = segment.counts, segment.where
        told = ", ".join(f"{count:,} {kind}" for kind, count in counts.items())
        if where:
            where = f'<p class="note">{where}<code>{escape(segment.before)}</code></p>'
        parts = "".join(f'<span class="{part.kind}">{escape(part.text)}</span>' for part in segment.parts)
        named = segment.title(place, len(self.segments))
        heading = f"Row {self.number}, {named}: {sum(counts.values()):,} tokens: {told}"
        return f'<h2>{escape(heading)}</h2>{where}<div class="shown">{parts}</div>'


def write_html(rows: Iterable[ShownRow], path: Path, title: str) -> None:
    """Writes rows as one page."""
    about = " ".join(f'<span class="shown"><span class="{kind}">{kind}</span></span>' for kind in KINDS)
    body = f"<h1>{escape(title)}</h1><p>{about}</p>" + "\n".join(row.html() for row in rows)
    with writing(path) as unfinished:
        unfinished.write_text(page(title, body, style=STYLE), encoding="utf-8")
