"""The page of a `LengthReport` (see `lowtide.html_shell`). Whatever comes from the data is escaped."""

import math
from collections.abc import Callable, Iterable
from html import escape
from pathlib import Path

import numpy as np

from lowtide.data.report.lengths import MAX_ROWS_CUT, MAX_TOKENS_CUT, LengthChoice, LengthReport, share
from lowtide.data.report.lengths_plot import brief, octaves
from lowtide.html_shell import facts, page
from lowtide.own_files import write_output

PERCENTILES = (1, 5, 25, 50, 75, 90, 95, 99, 99.9, 100)


def write_html(report: LengthReport, path: Path, source: str, tokenizer: str) -> None:
    """Write the report about `source`, tokenized by `tokenizer`, to `path`."""
    write_output(path, _page(report, source, tokenizer))


def _page(report: LengthReport, source: str, tokenizer: str) -> str:
    best = report.recommended
    return page(
        f"Row lengths of {source}",
        f"""<h1>Row lengths</h1>
<p class="about"><b>{escape(source)}</b>, tokenized by <b>{escape(tokenizer)}</b></p>
<section class="advice">
<p class="label">Recommended <code>max_length</code></p>
<p class="value">{best.max_length:,}</p>
<p>{escape(report.reason)}</p>
</section>
{_facts(report)}
<h2>How long the rows are</h2>
{_histogram(report)}
<h2>What a <code>max_length</code> cuts</h2>
{_cut_curves(report)}
<h2>Candidates</h2>
{_candidates(report)}
<h2>Percentiles</h2>
{_percentiles(report)}""",
        style=STYLE,
    )


def _facts(report: LengthReport) -> str:
    values = {
        "rows": report.rows,
        "tokens": report.tokens,
        "mean": round(report.tokens / report.rows),
        "median": report.percentile(50),
        "95% are up to": report.percentile(95),
        "longest": report.longest,
    }
    return facts({name: f"{value:,}" for name, value in values.items()})


def _histogram(report: LengthReport) -> str:
    edges, rows = report.histogram()
    across = _across(report)
    tallest = rows.max()
    bars = []
    for first, after, count in zip(edges[:-1].tolist(), edges[1:].tolist(), rows.tolist(), strict=True):
        span = f"{first:,}" if after == first + 1 else f"{first:,} to {after - 1:,}"
        text = f"{span} tokens: {count:,} rows, {share(count / report.rows)}"
        left, right = across(first), across(after)
        bars.append(
            f'<i class="bar" title="{text}" style="left:{left:.3f}%;width:{right - left:.3f}%;'
            f'height:{100 * count / tallest:.3f}%"></i>'
        )
    ups = {f"{share(part * tallest / report.rows)}": 100 * part for part in (0, 0.5, 1)}
    return _plot("".join(bars), report, ups, "Share of the rows, by tokens in a row", "tokens in a row")


def _cut_curves(report: LengthReport) -> str:
    across, ticks = _across(report), octaves(report)
    grid = np.unique(np.geomspace(ticks[0], ticks[-1], 240).astype(np.int64)).tolist()
    tokens, rows = zip(*(report.cut(at) for at in grid), strict=True)

    def line(name: str, shares: Iterable[float]) -> str:
        points = " ".join(f"{across(at):.2f},{100 - _up(cut):.2f}" for at, cut in zip(grid, shares, strict=True))
        return f'<polyline class="{name}" points="{points}"/>'

    def limit(name: str, most: float) -> str:
        return f'<i class="limit {name}" style="bottom:{_up(most):.2f}%"></i>'

    curves = f'<svg viewBox="0 0 100 100" preserveAspectRatio="none">{line("rows", rows)}{line("tokens", tokens)}</svg>'
    ups = {f"{tick:.3g}%": _up(tick / 100) for tick in (0, 0.1, 1, 10, 100)}
    inner = curves + limit("rows", MAX_ROWS_CUT) + limit("tokens", MAX_TOKENS_CUT)
    legend = (
        '<p class="legend"><span class="rows">share of the rows</span><span class="tokens">share of the tokens</span>'
        '<span class="limits">the most that is recommended</span></p>'
    )
    return legend + _plot(inner, report, ups, "Share of the rows and of the tokens cut, by max_length", "max_length")


def _plot(inner: str, report: LengthReport, ups: dict[str, float], summary: str, below: str) -> str:
    """A frame of 100% x 100% with length ticks below, the given ticks at its left, and the recommended length."""
    across = _across(report)
    best = report.recommended.max_length
    ticks = octaves(report)
    shown = ticks[:: math.ceil(len(ticks) / 12)]
    downs = "".join(
        f'<span class="{"spare" if place % 2 else ""}" style="left:{across(tick):.2f}%">{brief(tick)}</span>'
        for place, tick in enumerate(shown)
    )
    sides = "".join(f'<span style="bottom:{at:.2f}%">{text}</span>' for text, at in ups.items())
    rules = "".join(f'<i class="rule" style="bottom:{at:.2f}%"></i>' for at in ups.values())
    side = "left" if across(best) > 50 else "right"
    mark = f'<i class="best {side}" style="left:{across(best):.2f}%"><b>{best:,}</b></i>'
    return (
        f'<figure role="img" aria-label="{escape(summary)}"><div class="side">{sides}</div>'
        f'<div class="frame">{rules}{inner}{mark}</div><div class="down">{downs}</div>'
        f"<figcaption>{escape(below)}</figcaption></figure>"
    )


def _across(report: LengthReport) -> Callable[[float], float]:
    """Where a length stands on the logarithmic length axis, in percent."""
    ticks = octaves(report)
    first, octaves_wide = math.log2(ticks[0]), math.log2(ticks[-1] / ticks[0])
    return lambda tokens: 100 * (math.log2(max(tokens, ticks[0])) - first) / octaves_wide


def _up(cut: float) -> float:
    """Where a share stands on an axis that is logarithmic above 0.1% and linear below, in percent."""
    smallest, decades, foot = 0.001, 3, 10
    if cut < smallest:
        return foot * cut / smallest
    return foot + (100 - foot) * (1 + math.log10(cut) / decades)


def _candidates(report: LengthReport) -> str:
    sizes = list(report.candidates[0].padding)
    head = "".join(f"<th>{size}</th>" for size in sizes)
    body = "".join(_candidate_row(candidate, candidate is report.recommended) for candidate in report.candidates)
    return f"""<div class="scroll"><table>
<thead><tr><th rowspan="2"><code>max_length</code></th><th colspan="2">cut</th>
<th colspan="{len(sizes)}">padding at a batch size of</th><th colspan="2">packed</th></tr>
<tr><th>tokens</th><th>rows</th>{head}<th>fill</th><th>bins</th></tr></thead>
<tbody>{body}</tbody></table></div>
<p class="note">Cut: the share of all tokens, and of all rows. Padding: the share of positions that hold no token when
batches are padded to their longest row, in dataset order; a padding-free run has none at any size. Packed: bins of
<code>max_length</code> tokens by <code>{escape(report.packing_strategy)}</code>.</p>"""


def _candidate_row(candidate: LengthChoice, recommended: bool) -> str:
    cells = [
        f"{candidate.max_length:,}",
        share(candidate.tokens_cut),
        share(candidate.rows_cut),
        *(share(padding) for padding in candidate.padding.values()),
        f"{candidate.fill:.2%}",
        f"{candidate.bins:,}",
    ]
    start = '<tr class="chosen">' if recommended else "<tr>"
    return start + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def _percentiles(report: LengthReport) -> str:
    head = "".join(f"<th>{percent:g}%</th>" for percent in PERCENTILES)
    body = "".join(f"<td>{report.percentile(percent):,}</td>" for percent in PERCENTILES)
    return (
        f'<div class="scroll"><table><thead><tr><th>of the rows</th>{head}</tr></thead>'
        f"<tbody><tr><td>have up to</td>{body}</tr></tbody></table></div>"
    )


STYLE = """
:root { --rows: #2f7ea8; --tokens: #c2553f; }
@media (prefers-color-scheme: dark) { :root { --rows: #6db8de; --tokens: #f08a72; } }
.bar { bottom: 0; background: var(--rows); border-right: 1px solid var(--panel); } .bar:hover { opacity: .7; }
.best { top: 0; bottom: 0; border-left: 2px dashed var(--best); }
.best b { position: absolute; top: 0; padding: 0 .4rem; color: var(--best); background: var(--panel);
  font-style: normal; font-size: .85rem; }
.best.left b { right: .3rem; } .best.right b { left: .3rem; }
polyline { fill: none; stroke-width: 2; vector-effect: non-scaling-stroke; }
polyline.rows { stroke: var(--rows); } polyline.tokens { stroke: var(--tokens); }
.limit { left: 0; right: 0; border-top: 2px dotted; } i.rows { color: var(--rows); } i.tokens { color: var(--tokens); }
.legend .rows::before { color: var(--rows); } .legend .tokens::before { color: var(--tokens); }
.legend .limits::before { border-top: 2px dotted var(--dim); }
.chosen td, .chosen td:first-child { background: var(--tint); font-weight: 600; }
.chosen td:first-child { color: var(--best); }
"""
