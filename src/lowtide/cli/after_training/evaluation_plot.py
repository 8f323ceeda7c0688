"""The picture of `lowtide evaluate`: a panel for each metric, a bar for each model and what it was measured on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from lowtide.data.report.lengths_plot import shorten
from lowtide.own_files import writing

COLOURS = ("#2f7ea8", "#c2553f", "#2d7d46", "#8a6bb1", "#b08a2e", "#5f6b73")
"""Of models, which begin again where there are more."""
DEVIATION = "_stderr"
"""How lm-eval names a metric's standard error."""
BAR = 0.32
"""Inches."""
Measured = Mapping[str, Mapping[str, Mapping[str, float]]]
"""By what was measured on and model, numbers by metric."""


def write_picture(found: Measured, path: Path, title: str) -> None:
    """Draw the metrics to `path`, whose suffix says the format: `.png` or `.svg`."""
    panels = panels_of(found)
    models = list(dict.fromkeys(model for of in found.values() for model in of))
    heights = [BAR * (len(models) + 0.6) * len(each) + 0.7 for each in panels.values()]
    legend = 0.3 * len(models) if len(models) > 1 else 0.0
    figure = Figure(figsize=(8, sum(heights) + 0.6 + legend), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    grid: Any = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)
    for axes, (metric, bars) in zip(grid[:, 0], panels.items(), strict=True):
        _draw(axes, metric, bars, models)
    heading = figure.suptitle(shorten(title), fontsize=12, fontweight="bold")
    heading.set_parse_math(False)  # a `$` in a file's name is only a `$`
    if len(models) > 1:
        handles, _ = grid[0, 0].get_legend_handles_labels()
        shown = figure.legend(handles, [shorten(each) for each in models], frameon=False, loc="outside lower left")
        for text in shown.get_texts():
            text.set_parse_math(False)
    with writing(path) as beside:
        figure.savefig(beside, format=path.suffix[1:].lower())


def panels_of(found: Measured) -> dict[str, dict[str, dict[str, tuple[float, float]]]]:
    """By metric, what was measured on and model: the number and its standard error, 0 where none is known."""
    panels: dict[str, dict[str, dict[str, tuple[float, float]]]] = {}
    for where, models in found.items():
        for model, numbers in models.items():
            for metric, value in numbers.items():
                if DEVIATION in metric:
                    continue
                name, comma, of = metric.partition(",")
                error = numbers.get(f"{name}{DEVIATION}{comma}{of}", 0.0)
                panels.setdefault(metric, {}).setdefault(where, {})[model] = (value, error)
    return panels


def _draw(axes: Axes, metric: str, bars: Mapping[str, Mapping[str, tuple[float, float]]], models: list[str]) -> None:
    width = 1 / (len(models) + 0.6)
    for number, model in enumerate(models):
        there = [(place, of[model]) for place, of in enumerate(bars.values()) if model in of]
        places = [place + (number - (len(models) - 1) / 2) * width for place, _ in there]
        values, errors = ([pair[k] for _, pair in there] for k in (0, 1))
        colour = COLOURS[number % len(COLOURS)]
        shown = axes.barh(places, values, width * 0.92, color=colour, label=model, xerr=errors if any(errors) else None)
        axes.bar_label(shown, [f"{value:.4g}" for value in values], padding=3, fontsize=8.5)
    labels = axes.set_yticks(range(len(bars)), [shorten(each, 30) for each in bars])
    for label in [*labels, axes.set_title(metric, fontsize=10, loc="left")]:
        getattr(label, "label1", label).set_parse_math(False)
    axes.set_ylim(len(bars) - 0.45, -0.55)  # the first at the top
    axes.margins(x=0.14)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="x", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
