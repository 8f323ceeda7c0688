"""`python -m bench.recipes`: predicts what each recipe of lowtide takes, from its model's config alone.

No weights, no GPU and no network: the shapes are those of `bench.inputs.shapes`. `make docs` writes what was recorded
into docs/recipes.md.
"""

import argparse
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.measuring.results import RECIPES, merged, versions, write
from bench.recipes.cases import GIB, RECIPES_BY_FILE
from lowtide.cli.recipes import recipes

SUMMARY = "Predict what each recipe takes, for its device, from its model's config alone."
NAME = "recipes"


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
        run = read_recipe(recipes()[name], recipe.method, Path(folder))
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
    from lowtide.cli.training import train

    parser = train.add_parser(argparse.ArgumentParser().add_subparsers(), method)
    return train.read_run(parser.parse_args(["--config", str(path)]), has_rows=True, output_dir=str(output))


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.recipes", description=SUMMARY)
    parser.add_argument("--only", nargs="*", choices=RECIPES_BY_FILE, help="recipes by the names of their files")
    parser.add_argument("--no-record", dest="record", action="store_false", help="print only")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
