"""`python -m bench.devices`: models of 7, 70 and 405 billion parameters planned for 8 to 1,024 GPUs, and rows
of 1,000,000 and 2,000,000 tokens for 8 of them.

No GPU is needed: `lowtide plan --devices` chooses how a run is spread and its techniques, and all numbers are
predictions. The long rows have fixed settings, which are lowtide's form of those in TRL's guide to such rows; the
longer is run in pieces. The figure beside them is what TRL says of its own. `make docs` writes what was recorded into
docs/planning-devices.md.
"""

import argparse
import dataclasses
import functools
import itertools
import sys
import tempfile
from collections.abc import Mapping
from typing import Any

from rich.console import Console

from bench.measure import GIGABYTE
from bench.processes import ROOT
from bench.results import DEVICES, dated, merged, versions, write
from bench.shapes import LLAMA_7B, LLAMA_70B, LLAMA_405B, QWEN3_8B

SUMMARY = (
    "Predict how models of 7B, 70B and 405B parameters spread over 8 to 1,024 GPUs, and a row of 1,000,000 tokens."
)
NAME = "devices"
PAGE = ROOT / "docs" / "planning-devices.md"
MARKS = {
    "tables": ("<!-- tables: written by `make docs` from bench/results -->", "<!-- /tables -->"),
    "row": ("<!-- row: written by `make docs` from bench/results -->", "<!-- /row -->"),
}
DEVICE, PER_NODE = "H100-80GB", 8
MODELS: Mapping[str, dict[str, Any]] = {"7B": LLAMA_7B, "70B": LLAMA_70B, "405B": LLAMA_405B}
SIZES = (8, 16, 64, 256, 1024)
LENGTH, ROWS = 4096, 4
"""Of a row in tokens, and rows of a step for each device."""
ROW = 1_000_000
TRL_GB, TRL_TOKENS, TRL_SECONDS = 56.2, 1_048_576, 380
TRL_SOURCE = "https://huggingface.co/docs/trl/en/long_context_training"
"""Measured by TRL's authors on 8 H100, in the release notes of TRL 1.13 too."""
WEIGHTS = ("float32", "bfloat16")
"""As they are stored; computed is in bfloat16 in any case."""
MOST_GB = {ROW: TRL_GB, 2 * ROW: 70.0}
"""Tokens of the long rows, and what each is to take of a device at most."""
IN_PIECES = {"tokens_per_microbatch": 262_144, "chain_storage": "host"}
"""Of a row above `ROW`: each piece is split over the ranks."""
ROW_SHARDING = "sp8+fsdp2"
ROW_OPTIONS = {
    "per_device_train_batch_size": 1,
    "max_length": ROW,
    "bf16": True,
    "gradient_checkpointing": True,
    "activation_offloading": True,
    "mlp_tile_tokens": 8192,
}


def main(argv: list[str] | None = None) -> int:
    """Predicts, prints and records; returns 1 where the long row takes more than TRL's."""
    from lowtide.planner.tracing_process import tracing_here

    options, console = parse(argv), Console()
    for model in options.models:
        for devices in options.sizes:
            with console.status(f"{model} on {devices}"), tracing_here():
                run = planned(model, devices)
            console.print(cells(run))
            if options.record:
                record(run)
    if not options.row:
        return 0
    met = True
    for tokens, weights in itertools.product(MOST_GB, WEIGHTS):
        with console.status(f"a row of {tokens:,} tokens, {weights} weights"):
            run = long_row(weights, tokens)
        console.print(row_cells(run))
        met &= run["peak_bytes"] <= MOST_GB[tokens] * GIGABYTE
        if options.record:
            record(run)
    return 0 if met else 1


def planned(model: str, devices: int) -> dict[str, Any]:
    """What is chosen for a model on so many devices, and what is predicted of it; or why nothing fits."""
    from lowtide.planner.budget import budget_bytes
    from lowtide.planner.cluster import Cluster
    from lowtide.planner.over_devices import plan_over
    from lowtide.planner.plan import PlanError

    run = {"case": model, "devices": devices, "length": LENGTH, "rows": ROWS, "device": DEVICE}
    described, rows = described_run(model)
    cluster = Cluster.of(f"{PER_NODE}x{DEVICE}", devices // PER_NODE)
    try:
        room = budget_bytes("auto", described.device)
        plan = plan_over(dataclasses.replace(described, cluster=cluster), rows, room, explain=False)
    except PlanError as error:
        return run | {"refused": str(error), "least_bytes": error.peak_bytes}
    assert plan.spread is not None
    return run | {
        "way": plan.chosen.way,
        "settings": dict(plan.settings),
        "peak_bytes": plan.chosen.peak_bytes,
        "host_bytes": plan.spread.host_bytes,
        "loading_bytes": plan.spread.loading_bytes,
        "tokens_per_second": plan.spread.tokens_per_second,
    }


@functools.cache
def described_run(model: str) -> tuple[Any, Any]:
    """The run of a model, whose traces all numbers of devices share, and its rows."""
    from datasets import Dataset
    from transformers import AutoConfig

    from lowtide.planner.candidate import PlannedRun
    from lowtide.planner.devices import device_named
    from lowtide.run.options.configs import method_named

    tokens = [1] * LENGTH
    config: dict[str, Any] = {"per_device_train_batch_size": ROWS, "max_length": LENGTH}
    config["dataset_kwargs"] = {"skip_prepare_dataset": True}
    run = PlannedRun(method_named("sft"), AutoConfig.for_model(**MODELS[model]), config, device_named(DEVICE))
    return run, Dataset.from_list([{"input_ids": tokens, "labels": tokens}] * ROWS)


def long_row(weights: str, tokens: int = ROW) -> dict[str, Any]:
    """What is predicted of a step of a long row, with weights and states stored in a dtype.

    Args:
        tokens: of the row; one above `ROW` is run in pieces, whose keys wait on the host.
    """
    from transformers import AutoConfig

    import lowtide

    options: dict[str, Any] = ROW_OPTIONS | ({"max_length": tokens, **IN_PIECES} if tokens > ROW else {})
    described: dict[str, Any] = QWEN3_8B | {"max_position_embeddings": tokens}
    with tempfile.TemporaryDirectory() as folder:
        config = lowtide.SFTConfig(
            folder, use_cpu=True, report_to="none", model_init_kwargs={"dtype": weights}, **options
        )
        found = lowtide.estimate(
            config,
            AutoConfig.for_model(**described),
            lengths=[tokens],
            device=DEVICE,
            world_size=PER_NODE,
            sharding=ROW_SHARDING,
        )
    assert found.time is not None
    return {
        "case": f"Qwen3-8B, a row of {tokens:,} tokens, {weights} weights",
        "tokens": tokens,
        "weights": weights,
        "devices": PER_NODE,
        "device": DEVICE,
        "sharding": ROW_SHARDING,
        "options": dict(options),
        "peak_bytes": found.peak_bytes,
        "phase": found.phase,
        "phases": found.phases,
        "host_bytes": found.host_bytes * PER_NODE,
        "seconds": found.time.seconds,
    }


def record(run: dict[str, Any]) -> None:
    """Puts a run beside the others, over an earlier one of the same model and devices."""
    hardware = {"gpu": f"{DEVICE} predicted"}
    runs = merged(NAME, hardware, run | {"versions": versions()}, key=("case", "devices"))
    write(NAME, {"kind": DEVICES, "hardware": hardware, "runs": runs})


def cells(run: dict[str, Any], before: dict[str, Any] | None = None) -> list[str]:
    """A run's cells in a table; `before` is the smallest number of devices that the model fits."""
    if "refused" in run:
        least = (
            f"nothing fits; at least {run['least_bytes'] / GIGABYTE:,.0f} GB each"
            if run["least_bytes"]
            else "nothing fits"
        )
        return [f"{run['devices']:,}", least, "", "", "", "", ""]
    shown = {name: value for name, value in run["settings"].items() if name not in SAID_BY_WAY}
    settings = ", ".join(f"`{name}={value!r}`" for name, value in shown.items()) or "the defaults"
    host = f"{run['host_bytes'] / GIGABYTE:,.0f} GB" if run["host_bytes"] else "nothing"
    cost = "1.00" if before is None else f"{device_seconds(run) / device_seconds(before):.2f}"
    return [
        f"{run['devices']:,}",
        run["way"],
        settings,
        f"{run['peak_bytes'] / GIGABYTE:.1f} GB",
        f"{host}, {run['loading_bytes'] / GIGABYTE:,.0f} GB",
        f"{run['tokens_per_second']:,.0f}",
        cost,
    ]


SAID_BY_WAY = ("fsdp", "fsdp_config", "parallelism_config")
"""Settings that the name of a way says already."""


def device_seconds(run: dict[str, Any]) -> float:
    """Of a token."""
    return run["devices"] / run["tokens_per_second"]


def tables(results: dict[str, Any]) -> list[str]:
    """Returns a table for each model, a row for each number of devices."""
    lines = []
    for model in MODELS:
        runs = sorted((run for run in results["runs"] if run["case"] == model), key=lambda run: run["devices"])
        if not runs:
            continue
        first = next((run for run in runs if "refused" not in run), None)
        lines += [
            "",
            f"**{model}**, {ROWS} rows of {LENGTH:,} tokens a device:",
            "",
            "| H100 | engine and degrees | settings | peak each | a node's host: training, loading | tokens/s | cost |",
            "|---:|---|---|---:|---:|---:|---:|",
            *(f"| {' | '.join(cells(run, first))} |" for run in runs),
        ]
    return [*lines, "", f"{dated(results['runs'][-1]['versions'])}. From `python -m bench.devices`.", ""]


def row_cells(run: dict[str, Any]) -> list[str]:
    """The cells of a long row in a table."""
    piece = run["options"].get("tokens_per_microbatch")
    pieces = f", in pieces of {piece:,} tokens" if piece else ""
    return [
        f"lowtide, {run['weights']} weights{pieces}, predicted",
        f"{run.get('tokens', ROW):,}",
        f"{run['peak_bytes'] / GIGABYTE:.1f} GB",
        f"{run['host_bytes'] / GIGABYTE:,.0f} GB",
        f"{run['seconds']:,.0f} s",
    ]


def row_section(results: dict[str, Any]) -> list[str]:
    """Returns the lines of the page on the long row, beside what TRL says of its own."""
    runs = sorted((run for run in results["runs"] if "weights" in run), key=lambda run: run.get("tokens", ROW))
    theirs = f"TRL, [measured by its authors]({TRL_SOURCE})"
    return [
        "",
        "| | tokens | peak a device | the host holds | a step |",
        "|---|---:|---:|---:|---:|",
        *(f"| {' | '.join(row_cells(run))} |" for run in runs),
        f"| {theirs} | {TRL_TOKENS:,} | {TRL_GB} GB | not said | {TRL_SECONDS} s |",
        "",
        f"{dated(runs[-1]['versions'])}. From `python -m bench.devices`.",
        "",
    ]


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.devices", description=SUMMARY)
    parser.add_argument("--models", nargs="*", choices=MODELS, default=list(MODELS), help="of the tables")
    parser.add_argument("--sizes", nargs="*", type=int, choices=SIZES, default=SIZES, help="numbers of devices")
    parser.add_argument("--no-row", dest="row", action="store_false", help="leave the long row out")
    parser.add_argument("--no-record", dest="record", action="store_false", help="print only")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
