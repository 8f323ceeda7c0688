"""`python -m bench.anatomy`: the picture and the table of docs/predictions.md, from estimates.

Nothing is trained: the planner traces the runs, of Qwen2.5-0.5B on one H100, and the picture is what its trace says of
the living tensors of one optimizer step.
"""

import sys
import tempfile
from collections import Counter
from typing import Any

from datasets import Dataset
from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from transformers import AutoConfig

from bench.docs.writing import write_between
from bench.inputs.shapes import QWEN_05B
from bench.measuring.arguments import no_options
from bench.measuring.processes import ROOT
from lowtide import SFTConfig
from lowtide.planner.answers.row_lengths import rows_of
from lowtide.planner.devices import device_named
from lowtide.planner.estimate import Estimate
from lowtide.planner.profiling.profile_plot import COLORS, SHADES
from lowtide.planner.tracing.fake_run import FakeRun
from lowtide.planning import estimate
from lowtide.run.options.configs import method_of

PAGE = ROOT / "docs" / "predictions.md"
PICTURE = ROOT / "docs" / "how-much-memory.svg"
MARK, END = "<!-- table: python -m bench.anatomy -->", "<!-- end of table -->"
DEVICE = "H100-80GB"
ROWS, TOKENS = 8, 1_024
GIB = 1 << 30
POINTS = 240
"""Of the picture, from left to right."""
CASES: dict[str, dict[str, Any]] = {
    "mixed precision, checkpointing (the default)": {},
    "without checkpointing": {"gradient_checkpointing": False},
    "8 micro-batches of 1 row": {"tokens_per_microbatch": TOKENS},
    "optimizer in backward": {"optimizer_in_backward": True, "max_grad_norm": 0.0},
    "activations offloaded": {"activation_offloading": True},
    "float32 throughout": {"bf16": False},
    "weights and gradients in bfloat16, stochastic rounding": {"optim": "adamw_stochastic"},
    "ZeRO-2 over 8 devices": {"sharding": "zero2"},
    "ZeRO-3 over 8 devices": {"sharding": "zero3"},
}
COLUMNS = ("weights", "gradients", "optimizer", "activations", "head", "communication", "cache")


def main() -> int:
    """Draws and writes."""
    described = AutoConfig.for_model(**QWEN_05B)
    with tempfile.TemporaryDirectory() as folder:
        draw(described, folder)
        lines = [f"| | peak, GiB | in | {' | '.join(COLUMNS)} |", "|---|---:|---|" + "---:|" * len(COLUMNS)]
        lines += [line(name, predicted(described, folder, dict(options))) for name, options in CASES.items()]
    write_between(PAGE, MARK, lines, END)
    print("\n".join(lines))
    return 0


def config_of(folder: str, **options: Any) -> SFTConfig:
    settings = {"output_dir": folder, "per_device_train_batch_size": ROWS, "use_cpu": True, "report_to": "none"}
    return SFTConfig(**{**settings, "bf16": True, "max_length": TOKENS, **options})


def predicted(described: Any, folder: str, options: dict[str, Any]) -> Estimate:
    sharding = options.pop("sharding", None)
    config = config_of(folder, **options)
    spread = {"world_size": 8, "sharding": sharding} if sharding else {}
    return estimate(config, described, lengths=[TOKENS] * ROWS, device=DEVICE, **spread)


def highest(series: dict[str, list[float]], phases: list[str]) -> list[int]:
    """Of each short stretch within a phase, the moment that holds most: few enough for a small picture."""
    totals = [sum(values) for values in zip(*series.values(), strict=True)]
    stretch = max(1, len(totals) // POINTS)
    found: dict[tuple[str, int], int] = {}
    for number, total in enumerate(totals):
        key = phases[number], number // stretch
        if key not in found or total > totals[found[key]]:
            found[key] = number
    return list(found.values())


def line(name: str, found: Estimate) -> str:
    held = found.phases[found.phase]
    cells = [f"{held.get(column, 0) / GIB:.2f}" for column in COLUMNS]
    total = sum(held.get(column, 0) for column in COLUMNS) / GIB
    return f"| {name} | {total:.2f} | {found.phase} | {' | '.join(cells)} |"


def draw(described: Any, folder: str) -> None:
    """The living bytes of one optimizer step, by category, over the operations that it is made of."""
    config = config_of(folder)
    run = FakeRun(method_of(config), config, described, Dataset.from_list(rows_of([TOKENS] * ROWS)), prepared=True)
    live: Counter[str] = Counter()
    series: dict[str, list[float]] = {name: [] for name in ("weights", "optimizer", "gradients", "activations", "head")}
    phases: list[str] = []
    part = "loading"
    for event in run.traced(device_named(DEVICE)).events:
        if event.block is None:
            part = event.phase if event.born else part
            continue
        live[event.block.category] += event.block.size if event.born else -event.block.size
        if part in ("step", "optimizer"):
            phases.append(event.phase)
            for name, values in series.items():
                values.append(live[name] / GIB)
    kept = highest(series, phases)
    series = {name: [values[number] for number in kept] for name, values in series.items()}
    phases = [phases[number] for number in kept] + ["optimizer"] * (POINTS // 15)
    series = {name: [*values, *[values[-1]] * (POINTS // 15)] for name, values in series.items()}
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    steps = range(len(phases))
    axes.stackplot(
        steps, *series.values(), labels=list(series), colors=[COLORS[name] for name in series], step="post", linewidth=0
    )
    starts = [number for number in steps if number == 0 or phases[number] != phases[number - 1]]
    for start, stop in zip(starts, [*starts[1:], len(phases)], strict=True):
        axes.axvspan(start, stop, ymin=0.965, color=SHADES.get(phases[start], "#cccccc"), linewidth=0)
        if stop - start > len(phases) / 40:
            place = {"transform": axes.get_xaxis_transform(), "ha": "center", "fontsize": 8}
            axes.text((start + stop) / 2, 1.01, phases[start], **place)
    axes.set_xlim(0, len(phases))
    axes.set_ylabel("GiB")
    axes.set_xlabel("allocations and frees of one optimizer step, in order")
    axes.set_xticks([])
    axes.spines[["top", "right"]].set_visible(False)
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    with rc_context({"svg.hashsalt": "lowtide"}):
        figure.savefig(PICTURE, metadata={"Date": None})


if __name__ == "__main__":
    no_options(__doc__)
    sys.exit(main())
