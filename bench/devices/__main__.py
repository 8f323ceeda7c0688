"""`python -m bench.devices`: models of 7, 70 and 405 billion parameters planned for 8 to 1,024 GPUs, and rows
of 1,000,000 and 2,000,000 tokens for 8 of them.

No GPU is needed: `lowtide plan --devices` chooses how a run is spread and its techniques, and all numbers are
predictions. The long rows have fixed settings, which are lowtide's form of those in TRL's guide to such rows; the
longer is run in pieces. The figure beside them is what TRL says of its own. `make docs` writes what was recorded into
docs/plan.md.
"""

import argparse
import dataclasses
import functools
import itertools
import sys
import tempfile
from typing import Any

from rich.console import Console

from bench.devices.cases import (
    DEVICE,
    IN_PIECES,
    LENGTH,
    MODELS,
    MOST_GB,
    PER_NODE,
    ROW,
    ROW_OPTIONS,
    ROW_SHARDING,
    ROWS,
    WEIGHTS,
)
from bench.devices.tables import cells, row_cells
from bench.inputs.shapes import QWEN3_8B
from bench.measuring.measure import GIGABYTE
from bench.measuring.results import DEVICES, merged, versions, write

SUMMARY = (
    "Predict how models of 7B, 70B and 405B parameters spread over 8 to 1,024 GPUs, and a row of 1,000,000 tokens."
)
NAME = "devices"
SIZES = (8, 16, 64, 256, 1024)


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
    from lowtide.planner.budget import read_budget
    from lowtide.planner.cluster import Cluster
    from lowtide.planner.plan import PlanError, make_plan

    run = {"case": model, "devices": devices, "length": LENGTH, "rows": ROWS, "device": DEVICE}
    described, rows = described_run(model)
    cluster = Cluster.of(f"{PER_NODE}x{DEVICE}", devices // PER_NODE)
    try:
        room = read_budget("auto", described.device).bytes
        plan = make_plan(dataclasses.replace(described, cluster=cluster), rows, room, explain=False)
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


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.devices", description=SUMMARY)
    parser.add_argument("--models", nargs="*", choices=MODELS, default=list(MODELS), help="of the tables")
    parser.add_argument("--sizes", nargs="*", type=int, choices=SIZES, default=SIZES, help="numbers of devices")
    parser.add_argument("--no-row", dest="row", action="store_false", help="leave the long row out")
    parser.add_argument("--no-record", dest="record", action="store_false", help="print only")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
