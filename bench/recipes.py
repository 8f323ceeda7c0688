"""`python -m bench.recipes`: predicts what each run file of examples/recipes takes, from its model's config alone.

No weights, no GPU and no network: the shapes are those of `bench.shapes`. `make docs` writes what was recorded into
docs/recipes.md.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.processes import ROOT
from bench.results import RECIPES, dated, merged, versions, write
from bench.shapes import LLAMA_8B, QWEN3_8B, QWEN_05B

SUMMARY = "Predict what each recipe takes, for its device, from its model's config alone."
FOLDER = ROOT / "examples" / "recipes"
PAGE = ROOT / "docs" / "recipes.md"
MARK, END = "<!-- written by `make docs` from bench/results -->", "<!-- /recipes -->"
NAME = "recipes"
GIB = 1 << 30
LONG = 1_000_000


@dataclass(frozen=True)
class Recipe:
    """A run file, and what it is predicted for."""

    title: str
    method: str
    config: Mapping[str, Any]
    """Of its model."""
    memory_gib: float
    """What a process may take of each device."""
    lengths: Sequence[int | Sequence[int]]
    """Of the rows of a step in tokens, as `lowtide.estimate` takes them: the longest that the run file lets through."""
    device: str = "cpu"
    devices: int = 1


RECIPES_BY_FILE: Mapping[str, Recipe] = {
    "qwen-8gb": Recipe("Qwen2.5-0.5B, all weights, on 8 GB", "sft", QWEN_05B, 7.6, [1024] * 16, device="RTX-4090"),
    "llama-8b-qlora-24gb": Recipe("Llama-3-8B, QLoRA, on 24 GB", "sft", LLAMA_8B, 23.6, [8192] * 16, device="RTX-4090"),
    "dpo-laptop": Recipe("DPO on a laptop with 16 GB", "dpo", QWEN_05B, 12, [(512, 512, 512)] * 8),
    "grpo-gsm8k": Recipe("GRPO on GSM8K, on 24 GB", "grpo", QWEN_05B, 23.6, [200] * 8, device="RTX-4090"),
    "llama-8b-8-gpus": Recipe(
        "Llama-3.1-8B, all weights, on 8 GPUs", "sft", LLAMA_8B, 79.1, [8192] * 4, device="H100-80GB", devices=8
    ),
    "million-tokens": Recipe(
        "Rows of a million tokens, on 8 GPUs",
        "sft",
        QWEN3_8B | {"max_position_embeddings": LONG},
        79.1,
        [LONG],
        device="H100-80GB",
        devices=8,
    ),
}
"""By the name of the run file. A GPU of 8 GB is predicted as an RTX 4090, which has the same context; 7.6 GiB are what
torch says such a card has. A laptop's 16 GB are shared with its system and a browser."""


def main(argv: list[str] | None = None) -> int:
    """Predicts, prints and records; returns 1 where a recipe does not fit its device."""
    options, console = parse(argv), Console()
    table = Table("recipe", "predicted", "of", "in", title="memory of each device")
    met = True
    for name in options.only or RECIPES_BY_FILE:
        with console.status(name):
            run = predicted(name)
        table.add_row(
            run["title"], *(f"{run[key] / GIB:.1f} GiB" for key in ("peak_bytes", "memory_bytes")), run["phase"]
        )
        met &= run["peak_bytes"] <= run["memory_bytes"]
        if options.record:
            hardware = {"gpu": "predicted"}
            runs = merged(NAME, hardware, run | {"versions": versions()}, key=("case",))
            write(NAME, {"kind": RECIPES, "hardware": hardware, "runs": runs})
    console.print(table)
    return 0 if met else 1


def predicted(name: str) -> dict[str, Any]:
    """Returns what a recipe takes of each device at most, as the planner predicts it from the run file."""
    from transformers import AutoConfig

    import lowtide
    from lowtide.planner.tracing_process import tracing_here

    recipe = RECIPES_BY_FILE[name]
    with TemporaryDirectory() as folder, tracing_here():
        run = read_recipe(FOLDER / f"{name}.yaml", recipe.method, Path(folder))
        config: Any = run.config(use_cpu=True, report_to="none")
        found = lowtide.estimate(
            config,
            AutoConfig.for_model(**recipe.config),
            lengths=recipe.lengths,
            device=recipe.device,
            world_size=recipe.devices,
            peft_config=run.adapters.peft_config(),
            quantization_config=run.adapters.quantization_config(bf16=bool(config.bf16), fp16=bool(config.fp16)),
        )
    return {
        "case": name,
        "title": recipe.title,
        "device": recipe.device,
        "devices": recipe.devices,
        "memory_bytes": int(recipe.memory_gib * GIB),
        "peak_bytes": found.peak_bytes,
        "phase": found.phase,
        "held": dict(found.phases[found.phase]),
        "host_bytes": found.host_bytes * recipe.devices,
    }


def read_recipe(path: Path, method: str, output: Path) -> Any:
    """Returns the run that a run file asks for, as `lowtide METHOD --config FILE` reads it."""
    from lowtide.cli import train

    parser = train.add_parser(argparse.ArgumentParser().add_subparsers(), method)
    return train.read_run(parser.parse_args(["--config", str(path)]), output_dir=str(output))


def lines(results: dict[str, Any]) -> list[str]:
    """Returns the table of docs/recipes.md."""
    runs = {run["case"]: run for run in results["runs"]}
    rows = [cells(name, runs[name]) for name in RECIPES_BY_FILE if name in runs]
    return [
        "",
        "| recipe | device | predicted peak | the largest parts | in host memory |",
        "|---|---|---:|---|---:|",
        *(f"| {' | '.join(row)} |" for row in rows),
        "",
        f"{dated(results['runs'][-1]['versions'])}. From `python -m bench.recipes`; predicted, not measured.",
        "",
    ]


def cells(name: str, run: dict[str, Any]) -> list[str]:
    """Returns a recipe's cells in the table."""
    largest = sorted(run["held"].items(), key=lambda part: -part[1])[:3]
    parts = ", ".join(f"{what} {size / GIB:.1f}" for what, size in largest)
    memory = f"{run['memory_bytes'] / GIB:.1f} GiB"
    device = "a CPU" if run["device"] == "cpu" else run["device"]
    where = f"8 x {device}" if run["devices"] > 1 else "a GPU of 8 GB" if name.endswith("-8gb") else device
    host = f"{run['host_bytes'] / 1e9:,.0f} GB" if run["host_bytes"] else ""
    return [f"[{run['title']}](#{name})", f"{where}, {memory}", f"**{run['peak_bytes'] / GIB:.1f} GiB**", parts, host]


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.recipes", description=SUMMARY)
    parser.add_argument("--only", nargs="*", choices=RECIPES_BY_FILE, help="recipes by the names of their files")
    parser.add_argument("--no-record", dest="record", action="store_false", help="print only")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
