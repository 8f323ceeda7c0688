"""Charts as SVG, drawn from recorded results and tables: readable in light and dark, on a phone and on paper.

An SVG in a page is an image and cannot see the page's colours, so it brings its own background, and follows the
system's scheme. Names stand above their bars, so that a narrow screen does not cut them.
"""

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, MARGIN, BAR, LINE = 480, 16, 18, 20
LEAST_NAMES = 180
"""Room for the names beside a grid, which is wider than other charts where it has many columns."""
LIGHT = {"paper": "#ffffff", "ink": "#1f2328", "faint": "#57606a", "a": "#1f5fae", "b": "#b4540a", "c": "#2f7d4f"}
DARK = {"paper": "#1c2128", "ink": "#e6edf3", "faint": "#9da7b3", "a": "#6aa9f0", "b": "#f0a35a", "c": "#63c58b"}
KINDS = ("a", "b", "c")
"""The colours of series, in order: blue, orange and green, which colour-blind readers tell apart by their lightness."""


@dataclass(frozen=True)
class Bar:
    """One bar."""

    value: float
    text: str
    """The value as it is written beside the bar."""
    series: int = 0


@dataclass(frozen=True)
class Group:
    """Bars under one name."""

    name: str
    bars: Sequence[Bar]


def bar_chart(title: str, series: Sequence[str], groups: Iterable[Group], *, note: str = "") -> str:
    """Returns a chart of horizontal bars as SVG.

    Args:
        title: what the bars are, with their unit.
        series: what each colour stands for.
        groups: the bars, from the top.
        note: a line beneath.
    """
    groups = list(groups)
    longest = max((bar.value for group in groups for bar in group.bars), default=1.0) or 1.0
    parts, y = [], MARGIN + 14
    parts.append(_text(MARGIN, y, title, "title"))
    y += LINE
    x = MARGIN
    for index, name in enumerate(series):
        parts.append(f'<rect x="{x}" y="{y - 11}" width="12" height="12" rx="2" class="{KINDS[index]}"/>')
        parts.append(_text(x + 18, y, name, "faint"))
        x += 30 + round(7.2 * len(name))
    y += 8
    room = WIDTH - 2 * MARGIN
    for group in groups:
        y += LINE
        parts.append(_text(MARGIN, y, group.name, "name"))
        y += 6
        for bar in group.bars:
            length = max(2.0, 0.72 * room * bar.value / longest)
            parts.append(
                f'<rect x="{MARGIN}" y="{y}" width="{length:.1f}" height="{BAR}" rx="2" class="{KINDS[bar.series]}"/>'
            )
            parts.append(_text(MARGIN + length + 6, y + BAR - 4, bar.text, "value"))
            y += BAR + 3
    if note:
        y += LINE
        parts.append(_text(MARGIN, y, note, "faint"))
    return _svg(title, y + MARGIN, parts)


CELL, NAME_LETTERS, LETTER = 14, 36, 6.2
"""Pixels of a cell of a grid, and letters of a line beside it."""
MARKS = {
    "exact": '<rect x="{x}" y="{y}" width="9" height="9" rx="1.5" class="c"/>',
    "not exact": '<circle cx="{cx}" cy="{cy}" r="3.6" class="ring"/>',
    "no-op": '<rect x="{x}" y="{my}" width="9" height="2" class="faint"/>',
    "refused": '<path d="M{x} {y}l9 9m0-9l-9 9" class="cross"/>',
    "no such option": '<path d="M{x} {y}m2 2h5v5h-5z" class="cross thin"/>',
}
"""How words of a cell are drawn: told by their form as well as by their colour."""


def grid_chart(title: str, cells: Mapping[tuple[str, str], str]) -> str:
    """Returns a grid of marks as SVG: a column for each second name, whose letters stand upright, a row for each first.

    Args:
        title: what it shows.
        cells: by row and column, one of the words of `MARKS`.
    """
    rows, columns = list(dict.fromkeys(row for row, _ in cells)), list(dict.fromkeys(column for _, column in cells))
    parts, y = [_text(MARGIN, MARGIN + 14, title, "title")], MARGIN + 14 + LINE
    x, said = MARGIN, set(cells.values())
    for word in (each for each in MARKS if each in said):
        parts += [_mark(word, x, y - 10), _text(x + 15, y, word, "faint")]
        x += 32 + round(7.2 * len(word))
    y += 18 + round(6.6 * max(map(len, columns)))
    for number, column in enumerate(columns):
        at = MARGIN + number * CELL + 9
        parts.append(f'<text x="{at}" y="{y - 6}" class="small" transform="rotate(-90 {at} {y - 6})">{column}</text>')
    side = MARGIN + len(columns) * CELL + 6
    width = max(WIDTH, side + LEAST_NAMES + MARGIN)
    for row in rows:
        lines = textwrap.wrap(row, min(NAME_LETTERS, int((width - MARGIN - side) / LETTER)))
        parts += [_mark(cells[row, column], MARGIN + number * CELL, y) for number, column in enumerate(columns)]
        for line in lines:
            parts.append(_text(side, y + 9, line, "small"))
            y += 15
        y += 3
    return _svg(title, y + MARGIN, parts, width)


def _mark(word: str, x: int, y: int) -> str:
    return MARKS[word].format(x=x, y=y, cx=x + 4.5, cy=y + 4.5, my=y + 3.5)


def _text(x: float, y: float, text: str, kind: str) -> str:
    return f'<text x="{x:.1f}" y="{y}" class="{kind}">{escape(text)}</text>'


def _svg(title: str, height: int, parts: Sequence[str], width: int = WIDTH) -> str:
    style = _style(LIGHT) + "@media (prefers-color-scheme:dark){" + _style(DARK) + "}"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img">',
            f"<title>{escape(title)}</title>",
            f"<style>text{{font:14px system-ui,sans-serif}}.title,.name{{font-weight:600}}"
            f".small{{font-size:12px}}.ring,.cross{{fill:none;stroke-width:2}}.thin{{stroke-width:1}}{style}</style>",
            f'<rect width="{width}" height="{height}" rx="6" class="paper"/>',
            *parts,
            "</svg>\n",
        ]
    )


def _style(colours: Mapping[str, str]) -> str:
    fills = "".join(f".{name}{{fill:{colour}}}" for name, colour in colours.items())
    strokes = f".ring{{stroke:{colours['b']}}}.cross{{stroke:{colours['faint']}}}"
    return fills + strokes + f".title,.name,.value,.small{{fill:{colours['ink']}}}"
