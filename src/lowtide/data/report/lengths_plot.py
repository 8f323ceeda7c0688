"""The picture of a `LengthReport`: how long rows are, and what a `max_length` cuts, as a PNG."""

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from lowtide.data.report.lengths import MAX_ROWS_CUT, MAX_TOKENS_CUT, LengthReport
from lowtide.own_files import writing

ROWS, TOKENS, CHOSEN = "#2f7ea8", "#c2553f", "#2d7d46"


def write_png(report: LengthReport, path: Path, source: str) -> None:
    """Draw the report about `source` to `path`."""
    figure = Figure(figsize=(11, 4.4), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    spread, cut = figure.subplots(1, 2)
    title = figure.suptitle(f"Row lengths of {shorten(source)}", fontsize=12, fontweight="bold")
    title.set_parse_math(False)  # a `$` in a file's name is only a `$`
    _draw_spread(spread, report)
    _draw_cut(cut, report)
    for axes in (spread, cut):
        axes.set_xscale("log", base=2)
        ticks = octaves(report)
        axes.set_xlim(ticks[0], ticks[-1])
        axes.xaxis.set_major_locator(FixedLocator(ticks))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: brief(value)))
        axes.axvline(report.recommended.max_length, color=CHOSEN, linewidth=1.5, linestyle="--", zorder=3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#dddddd", linewidth=0.6)
        axes.set_axisbelow(True)
    with writing(path) as beside:
        figure.savefig(beside, format=path.suffix[1:])


def _draw_spread(axes: Axes, report: LengthReport) -> None:
    edges, rows = report.histogram()
    axes.bar(edges[:-1], rows / report.rows, width=np.diff(edges), align="edge", color=ROWS, edgecolor="white")
    axes.set_title("How long the rows are", fontsize=10, loc="left")
    axes.set_xlabel("tokens in a row")
    axes.set_ylabel("share of the rows")
    marks = {"50%": report.percentile(50), "95%": report.percentile(95), "99%": report.percentile(99)}
    text = "\n".join(f"{name} of the rows: up to {tokens:,} tokens" for name, tokens in marks.items())
    axes.set_ylim(0, 1.3 * float(rows.max()) / report.rows)  # room for the text above the bars
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g}%" if value <= 1 else ""))
    background = {"facecolor": "white", "edgecolor": "none", "pad": 2}
    axes.text(0.02, 0.98, text, transform=axes.transAxes, fontsize=8.5, va="top", bbox=background)


def _draw_cut(axes: Axes, report: LengthReport) -> None:
    ticks = octaves(report)
    grid = np.unique(np.geomspace(ticks[0], ticks[-1], 400).astype(np.int64))
    tokens, rows = zip(*(report.cut(int(at)) for at in grid), strict=True)
    axes.plot(grid, rows, color=ROWS, label="rows")
    axes.plot(grid, tokens, color=TOKENS, label="tokens")
    axes.axhline(MAX_ROWS_CUT, color=ROWS, linewidth=0.9, linestyle=":")
    axes.axhline(MAX_TOKENS_CUT, color=TOKENS, linewidth=0.9, linestyle=":")
    axes.set_yscale("symlog", linthresh=MAX_TOKENS_CUT, linscale=0.3)
    axes.set_ylim(0, 1)
    axes.set_yticks([0, 0.001, 0.01, 0.1, 1], ["0%", "0.1%", "1%", "10%", "100%"])
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_title("What a max_length cuts (dotted: the most that is recommended)", fontsize=10, loc="left")
    axes.set_xlabel("max_length")
    axes.set_ylabel("share cut")
    axes.plot([], [], color=CHOSEN, linestyle="--", label=f"recommended: {report.recommended.max_length:,}")
    axes.legend(frameon=False, fontsize=8.5, loc="center left")


def octaves(report: LengthReport) -> list[int]:
    """Powers of two around all lengths and candidates: the ticks of a length axis."""
    shortest = max(int(report.lengths[0]), 1)
    largest = max(report.longest, report.candidates[-1].max_length)
    first, last = shortest.bit_length() - 1, (largest - 1).bit_length()
    return [2**exponent for exponent in range(first, max(last, first + 1) + 1)]


def brief(tokens: float) -> str:
    """A length in few characters: 512, 1k, 128k, 1M."""
    for unit, name in ((1024**2, "M"), (1024, "k")):
        if tokens >= unit:
            return f"{tokens / unit:g}{name}"
    return f"{tokens:g}"


def shorten(text: str, most: int = 80) -> str:
    """The text's end, where it is long: a path's end says more than its start."""
    return text if len(text) <= most else f"…{text[1 - most :]}"
