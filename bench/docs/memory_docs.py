"""What the docs say of memory techniques: their own table, what each costs and saves, and the longest rows."""

import re
from collections import Counter
from pathlib import Path
from typing import Any

from bench.longest.tables import cells as longest_cells
from bench.measuring.measure import GIGABYTE
from bench.measuring.results import dated, described
from bench.memory.cases import BATCH, CASES
from bench.memory.tables import cells
from lowtide.memory.table import PACKAGES, TECHNIQUES

CHECKPOINTING, STATES = "memory/checkpointing.md", "memory/optimizer-states.md"
PAGES = {
    "gradient checkpointing": CHECKPOINTING,
    "checkpointing that keeps attention": CHECKPOINTING,
    "checkpointing that keeps products": CHECKPOINTING,
    "checkpointing of recurrences alone": CHECKPOINTING,
    "checkpointing of every k-th layer": CHECKPOINTING,
    "activation offloading": "memory/activation-offloading.md",
    "fused head": "memory/fused-head.md",
    "tiled MLP": "memory/tiled-mlp.md",
    "attention heads in turn": "memory/attention-heads.md",
    "optimizer in backward": "memory/optimizer-in-backward.md",
    "optimizer in backward, two passes": "memory/optimizer-in-backward.md",
    "streamed base weights": "memory/streamed-weights.md",
    "FP8 base weights": "memory/base-dtype.md",
    "NVFP4 base weights": "memory/base-dtype.md",
    "FP8 products": "memory/precision.md",
    "streamed trained weights": "memory/streamed-weights.md",
    "bfloat16 mixed precision": "memory/precision.md",
    "liger kernels": "memory/liger.md",
    "fused layers": "memory/fused-layers.md",
    "compiled layers": "memory/compile.md",
    "compiled layers within an activation budget": "memory/compile.md",
    "LoRA-FA": "memory/adapters.md",
    "padding-free batches": "padding-free.md",
    "packing": "packing.md",
    "prefix sharing": "prefix-sharing.md",
    "token budget": "gradient-accumulation.md",
    "gradient accumulation": "gradient-accumulation.md",
    "rehearsal": "memory/out-of-memory.md",
}
"""Where a technique is explained; all others are optimizers."""
MEASURED = re.compile(r"(<!-- measured: (.*?) -->).*?(<!-- /measured -->)", re.DOTALL)
ALIKE_BYTES, ALIKE_SECONDS = 0.02, 0.1
"""Shares by which two runs of the same settings may differ."""


def techniques_table() -> list[str]:
    """Returns a line for each memory technique, in the order of their table."""
    lines = ["| technique | saves | numbers | switched on by |", "|---|---|---|---|"]
    for technique in TECHNIQUES.values():
        options = ", ".join(f"`{name}={value!r}`" for name, value in technique.options.items()) or "always on"
        needs = "".join(f"; `pip install {PACKAGES[package]}`" for package in technique.needs)
        name = f"[{technique.name}]({PAGES.get(technique.name, STATES)})"
        lines.append(f"| {name} | {technique.saves} | {technique.changes or 'exact'} | {options}{needs} |")
    return lines


def memory_section(results: dict[str, Any]) -> str:
    """Returns a table of peaks by technique and length for each batch size that was measured."""
    on_cuda = "gpu" in results["hardware"]
    what = (
        "the allocator's peak, bfloat16 mixed precision"
        if on_cuda
        else "the resident peak minus what the imports take, float32 unless the row says otherwise"
    )
    of_cores = "" if on_cuda else " on one core, as the kernel counts them, which other processes hardly change"
    batches = sorted({run["batch"] for run in results["runs"]})
    tables = [line for batch in batches for line in memory_table(results, batch)]
    command = "python -m bench.memory" + " --quick" * (BATCH not in batches)
    return "\n".join(
        [
            "## What each memory technique saves: Qwen2.5-0.5B",
            "",
            f"Two steps of supervised fine-tuning with gradient checkpointing: {what}, and the seconds of the second "
            f"step{of_cores}. Loading the model is not counted. Weights, gradients and AdamW's moments are 16 bytes a "
            "parameter, 7.90 GB. Each technique is added alone to the plain run. All runs have a token budget of one "
            "row, except those that step in backward. Rows in italics change the numbers beyond rounding. "
            f"Targets are for {BATCH} rows of 1,024 tokens on a CPU.",
            "",
            *tables,
            f"{described(results['hardware'])}. The last run: {dated(results['runs'][-1]['versions'])}.",
            f"Measured with `{command}`.",
            "",
        ]
    )


def memory_table(results: dict[str, Any], batch: int) -> list[str]:
    """Returns the lines of one batch size: a row for each technique, a column for each length, and the target."""
    runs = {(run["case"], run["length"]): run for run in results["runs"] if run["batch"] == batch}
    lengths = sorted({length for _, length in runs})
    names = [name for name in CASES if any(case == name for case, _ in runs)]
    lines = [
        f"{batch} rows a step:",
        "",
        f"| tokens in a row | {' | '.join(f'{length:,}' for length in lengths)} | target at {BATCH} x 1,024 |",
        f"| --- | {' ---: |' * (len(lengths) + 1)}",
    ]
    for name in names:
        case = CASES[name]
        title = name if case.exact else f"*{name}*"
        target = f"{case.target_gb} GB" if case.target_gb else ""
        measured = [memory_cell(runs.get((name, length))) for length in lengths]
        lines.append(f"| {title} | {' | '.join(measured)} | {target} |")
    return [*lines, ""]


def memory_cell(run: dict[str, Any] | None) -> str:
    if run is None:
        return ""
    seconds = seconds_of(run)
    return cells(run)[1] + (f", {seconds:.0f} s" if seconds else "")


def seconds_of(run: dict[str, Any]) -> float | None:
    """Of the second step: the clock's where a GPU works, else those of the cores together; None where unmeasured."""
    return run.get("step_seconds") if run.get("reserved_bytes") else run.get("step_cpu_seconds")


def costs_table(results: list[dict[str, Any]]) -> list[str]:
    """Returns, for each machine, which technique makes a step smaller and which faster, against the plain run.

    Of the lengths that were measured it is the one with the most rows, and the longer of two.
    """
    lines = []
    for result in results:
        runs = [run for run in result["runs"] if run.get("peak_bytes") and seconds_of(run)]
        sizes = Counter((run["batch"], run["length"]) for run in runs)
        if not sizes:
            continue
        size = max(sizes, key=lambda each: (sizes[each], each))
        here = {run["case"]: run for run in runs if (run["batch"], run["length"]) == size}
        if "plain" not in here:
            continue
        lines += [
            "",
            f"Qwen2.5-0.5B, {size[0]} rows of {size[1]:,} tokens; {described(result['hardware'])}:",
            "",
            "| technique | smaller? | peak | faster? | time of a step |",
            "|---|---|---:|---|---:|",
            *(cost_line(name, here[name], here["plain"]) for name in CASES if name in here and name != "plain"),
        ]
    return [*lines, ""]


def cost_line(name: str, run: dict[str, Any], plain: dict[str, Any]) -> str:
    """Returns a technique's peak and time as multiples of the plain run's, and whether they are less."""
    peak = run["peak_bytes"] / plain["peak_bytes"]
    time = (seconds_of(run) or 0.0) / (seconds_of(plain) or 1.0)
    return f"| {name} | {verdict(peak, ALIKE_BYTES)} | {peak:.2f}x | {verdict(time, ALIKE_SECONDS)} | {time:.2f}x |"


def write_measured(page: Path, results: list[dict[str, Any]]) -> None:
    """Writes between a page's marks, `<!-- measured: NAME | NAME -->`, what was measured of these rows."""
    before = page.read_text(encoding="utf-8")

    def measured(marks: re.Match) -> str:
        return "\n".join([marks[1], *measured_lines(results, marks[2].split(" | ")), marks[3]])

    after = MEASURED.sub(measured, before)
    page.write_text(after, encoding="utf-8")


def measured_lines(results: list[dict[str, Any]], names: list[str]) -> list[str]:
    """Returns a table of some rows beside the plain run, for each machine and size of a batch.

    Raises:
        ValueError: the benchmark has no such row.
    """
    if unknown := [name for name in names if name not in CASES]:
        raise ValueError(f"a page wants what is no row of bench.memory: {', '.join(unknown)}")
    lines = []
    for result in results:
        for batch in sorted({run["batch"] for run in result["runs"]}):
            runs = {(run["case"], run["length"]): run for run in result["runs"] if run["batch"] == batch}
            there = [name for name in ("plain", *names) if any(case == name for case, _ in runs)]
            lengths = sorted({length for name, length in runs if name in names})
            if not lengths:
                continue
            gpu = result["hardware"].get("gpu")
            where = f", bfloat16 on one {gpu}" if gpu else ""
            lines += [
                "",
                f"| Qwen2.5-0.5B{where}, {batch} rows of | {' | '.join(f'{length:,}' for length in lengths)} tokens |",
                f"|---|{'---:|' * len(lengths)}",
            ]
            for name in there:
                cells = [_measured(runs.get((name, length)), runs.get(("plain", length))) for length in lengths]
                lines.append(f"| {name} | {' | '.join(cells)} |")
    return [*lines, ""]


def _measured(run: dict[str, Any] | None, plain: dict[str, Any] | None) -> str:
    if run is None or not run.get("peak_bytes"):
        return ""
    took, usual = seconds_of(run), seconds_of(plain or {})
    time = f", {took / usual:.2f}x the time" if took and usual and run is not plain else ""
    return f"{run['peak_bytes'] / GIGABYTE:.2f} GB{time}"


def verdict(ratio: float, alike: float) -> str:
    """Returns whether a ratio is below one, by more than what two equal runs may differ by."""
    return "yes" if ratio < 1 - alike else "no" if ratio > 1 + alike else "the same"


def longest_section(results: dict[str, Any]) -> str:
    """Returns the longest row by technique, for each device and number of layers, and what offloading costs there."""
    runs = results["runs"]
    machine = f"{described(results['hardware'])}. " if "cpu" in results["hardware"] else ""
    lines = []
    for device, layers in sorted({(run["device"], run["layers"]) for run in runs}):
        here = [run for run in runs if (run["device"], run["layers"]) == (device, layers)]
        where = device if device != "cuda" else results["hardware"]["gpu"]
        lines += ["", f"| {where}, {layers} layers | predicted | trained | not trained |", "|---|---:|---:|---:|"]
        lines += [f"| {' | '.join(longest_cells(run))} |" for run in here if "predicted" in run]
        costs = [f"{run['case'].removeprefix('offloading ')} {run['ratio']:.2f}" for run in here if "ratio" in run]
        lines += ["", f"Seconds of a step with offloading over those without: {', '.join(costs)}."] if costs else []
    return "\n".join(
        [
            "## The longest row that one GPU trains: Llama-3.1-8B",
            "",
            "One row per step, weights in bfloat16, and either LoRA of rank 16 on all linear layers or all weights "
            "trained. Lengths are in tokens, to a sixteenth. *Predicted* is the longest row that fits by the planner, "
            "without a GPU, with at most 512 GiB of host memory. *Trained* is the longest row that ran two steps on a "
            "GPU, and *not trained* the shortest that did not fit.",
            *lines,
            "",
            f"{machine}{dated(runs[-1]['versions'])}.",
            "From `python -m bench.longest`.",
            "",
        ]
    )
