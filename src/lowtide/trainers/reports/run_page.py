"""`report.html` of a run (see `lowtide.html_shell`): loss, memory, rows, settings and versions in one file that asks
nothing of the network. Whatever comes from a run is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from lowtide.html_shell import facts, page
from lowtide.memory.allocators.measure import bytes_text
from lowtide.own_files import writing

PAGE = "report.html"
CURVES = {"loss": ("loss", "eval_loss"), "reward": ("reward", "eval_reward")}
"""The plots, and the logged numbers in each."""
COLOURS = ("var(--best)", "#c2602d")
STYLE = """
.frame svg polyline { fill: none; stroke-width: 2; vector-effect: non-scaling-stroke; }
.told td { text-align: left; white-space: normal; overflow-wrap: anywhere; }
.told td:first-child { white-space: nowrap; }
"""


@dataclass(frozen=True, kw_only=True)
class RunPage:
    """What the page of a run says."""

    title: str
    about: str
    """What was trained, on what."""
    facts: Mapping[str, str]
    logs: Sequence[Mapping[str, Any]]
    """What the run logged, each with its `step`."""
    lines: Iterable[tuple[str, str]]
    """The start-up report."""
    raised: Mapping[str, int]
    """The peak in bytes as each phase that raised it ended."""
    states: Mapping[str, int | None]
    """The bytes that stay, by what they are."""
    ledger: Iterable[tuple[str, str, str]]
    """What became of the rows: a name, a number, a note."""
    settings: Mapping[str, Any]
    versions: Mapping[str, str]

    def write(self, path: Path) -> None:
        """Writes the page, whole or not at all."""
        with writing(path) as beside:
            beside.write_text(self.html(), encoding="utf-8")

    def html(self) -> str:
        """The page."""
        states = {name: bytes_text(size) for name, size in self.states.items() if size}
        raised = [
            (f"peak after {phase}", bytes_text(size))
            for phase, size in sorted(self.raised.items(), key=lambda each: each[1])
        ]
        parts = [
            f'<h1>{escape(self.title)}</h1>\n<p class="about">{escape(self.about)}</p>\n{facts(self.facts)}',
            curves(self.logs),
            _section("Memory", [*states.items(), *raised]),
            _section("Rows", self.ledger),
            _section("The run", self.lines),
            _section("The last evaluation", _evaluation(self.logs)),
            _section("Settings", ((name, str(value)) for name, value in self.settings.items())),
            _section("Versions", self.versions.items()),
        ]
        return page(self.title, "\n".join(filter(None, parts)), style=STYLE)


def _section(title: str, rows: Iterable[Sequence[str]]) -> str:
    """A heading and a table; nothing where there is no row."""
    cells = ("".join(f"<td>{escape(each)}</td>" for each in row) for row in rows)
    table = "".join(f"<tr>{row}</tr>" for row in cells)
    return f'<h2>{escape(title)}</h2>\n<div class="scroll told"><table>{table}</table></div>' if table else ""


def _evaluation(logs: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    last: Mapping[str, Any] = next((each for each in reversed(logs) if "eval_runtime" in each), {})
    return [(name, f"{value:.4g}") for name, value in last.items() if isinstance(value, float)]


def curves(logs: Sequence[Mapping[str, Any]]) -> str:
    """The plots of what was logged, as HTML for a page with `STYLE`."""
    return "\n".join(filter(None, (_curves(name, names, logs) for name, names in CURVES.items())))


def _curves(title: str, names: Iterable[str], logs: Sequence[Mapping[str, Any]]) -> str:
    """A plot of logged numbers over steps; nothing of those that were not logged."""
    found = {name: [(each["step"], each[name]) for each in logs if isinstance(each.get(name), float)] for name in names}
    found = {name: points for name, points in found.items() if points}
    if not found:
        return ""
    steps = [step for points in found.values() for step, _ in points]
    values = [value for points in found.values() for _, value in points]
    first, width = min(steps), max(max(steps) - min(steps), 1)
    low, height = min(values), max(max(values) - min(values), 1e-12)
    lines, legend = [], []
    for colour, (name, points) in zip(COLOURS, found.items(), strict=False):
        at = " ".join(f"{100 * (x - first) / width:.2f},{100 - 100 * (y - low) / height:.2f}" for x, y in points)
        lines.append(f'<polyline style="stroke:{colour}" points="{at}"/>')
        legend.append(f'<span style="color:{colour}">{escape(name)}</span>')
    marks = (0.0, 0.25, 0.5, 0.75, 1.0)
    sides = "".join(f'<span style="bottom:{100 * n:.0f}%">{low + n * height:.4g}</span>' for n in marks)
    rules = "".join(f'<i class="rule" style="bottom:{100 * n:.0f}%"></i>' for n in marks)
    downs = "".join(f'<span style="left:{100 * n:.0f}%">{first + n * width:,.0f}</span>' for n in (0.0, 0.5, 1.0))
    return f"""<h2>{escape(title)}</h2>
<p class="legend">{"".join(legend)}</p>
<figure role="img" aria-label="{escape(title)} over steps"><div class="side">{sides}</div>\
<div class="frame">{rules}<svg viewBox="0 0 100 100" preserveAspectRatio="none">{"".join(lines)}</svg></div>\
<div class="down">{downs}</div><figcaption>step</figcaption></figure>"""
