"""Bar charts as SVG, drawn from recorded results: readable in light and dark, on a phone and on paper.

An SVG in a page is an image and cannot see the page's colours, so it brings its own background, and follows the
system's scheme. Names stand above their bars, so that a narrow screen does not cut them.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, MARGIN, BAR, LINE = 480, 16, 18, 20
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


def _text(x: float, y: float, text: str, kind: str) -> str:
    return f'<text x="{x:.1f}" y="{y}" class="{kind}">{escape(text)}</text>'


def _svg(title: str, height: int, parts: Sequence[str]) -> str:
    style = _style(LIGHT) + "@media (prefers-color-scheme:dark){" + _style(DARK) + "}"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" role="img">',
            f"<title>{escape(title)}</title>",
            f"<style>text{{font:14px system-ui,sans-serif}}.title,.name{{font-weight:600}}{style}</style>",
            f'<rect width="{WIDTH}" height="{height}" rx="6" class="paper"/>',
            *parts,
            "</svg>\n",
        ]
    )


def _style(colours: Mapping[str, str]) -> str:
    fills = "".join(f".{name}{{fill:{colour}}}" for name, colour in colours.items())
    return fills + f".title,.name,.value{{fill:{colours['ink']}}}"
