"""The picture of a `Profile`: living tensors over time by category, as a PNG."""

from __future__ import annotations

from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from lowtide.data.report.lengths_plot import shorten
from lowtide.memory.allocators.measure import bytes_text
from lowtide.own_files import writing
from lowtide.planner.profiling.profile import Profile, ticks

COLORS = {
    "weights": "#4c78a8",
    "gradients": "#5ba8a0",
    "optimizer": "#8f7bb5",
    "reference": "#a0785a",
    "activations": "#e0893c",
    "head": "#cf5b6b",
    "other": "#a3a39d",
}
"""Those of the page in its light setting."""
SHADES = {"forward": "#7fb2d9", "head": "#cf5b6b", "backward": "#d9b36a", "optimizer": "#9b86c4"}


def write_png(profile: Profile, path: Path) -> None:
    """Draw the timeline to `path`."""
    figure = Figure(figsize=(11, 4.4), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    title = axes.set_title(
        f"{profile.run.method} of {shorten(profile.run.model)}: {bytes_text(profile.peak_bytes)} of tensors at most, "
        f"in {profile.peak_phase}",
        fontsize=11,
        loc="left",
        pad=14,
    )
    title.set_parse_math(False)  # a `$` in a model's name is only a `$`
    names = list(profile.bytes)
    axes.stackplot(
        profile.seconds,
        *profile.bytes.values(),
        labels=names,
        colors=[COLORS[name] for name in names],
        step="post",
        linewidth=0,
    )
    top = 1.12 * profile.peak_bytes
    for span in profile.spans:
        if span.phase in SHADES:
            axes.axvspan(span.start, span.end, ymin=0.965, color=SHADES[span.phase], linewidth=0)
    if profile.predicted_bytes is not None:
        axes.axhline(profile.predicted_bytes, color="#22262b", linewidth=1, linestyle=":", label="predicted peak")
        top = max(top, 1.12 * profile.predicted_bytes)
    for step, start in {span.step: span.start for span in reversed(profile.spans)}.items():
        axes.axvline(start, color="#888888", linewidth=0.5)
        axes.text(start, 1.005, f" {step}" if step else " before", transform=axes.get_xaxis_transform(), fontsize=7)
    axes.set_xlim(profile.seconds[0], profile.seconds[-1])
    axes.set_ylim(0, top)
    marks = ticks(int(top))
    axes.set_yticks(list(marks.values()), list(marks))
    axes.set_xlabel("seconds; above, the step, and its phases as bands")
    axes.spines[["top", "right"]].set_visible(False)
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], frameon=False, fontsize=8.5, loc="center left", bbox_to_anchor=(1, 0.5))
    with writing(path) as beside:
        figure.savefig(beside, format=path.suffix[1:])
