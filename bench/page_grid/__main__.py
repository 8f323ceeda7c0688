"""`python -m bench.page_grid`: traces the numbers of the page of devices (`lowtide page`), for well-known models.

Nothing is measured: each number is the predicted peak, in MiB, of some settings at two sizes of a micro-batch, on a
GPU with bfloat16, its context not counted; speeds are a roofline at the rates of each device's data sheet. Models of
one shape share their numbers. It takes some 15 minutes on two cores, and what is there already is kept, so that an
interrupted run goes on. Speeds are by the number of a device, so that nothing is kept where the devices are others.
"""

import argparse
import json
import sys
import time
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.page_grid.tracing import METHODS, ROWS, devices, key_of, on_the_page, run_of_model, stages, traced, written

SUMMARY = "Trace the numbers of the page of devices, for well-known models."


def main(argv: list[str] | None = None) -> int:
    """Traces what is missing, and writes the grid; returns 1 where something could not be traced."""
    parser = argparse.ArgumentParser(prog="python -m bench.page_grid", description=SUMMARY)
    parser.add_argument("--again", action="store_true", help="trace all of it, also what is there")
    parser.add_argument("--methods", nargs="*", choices=METHODS, default=list(METHODS), help="of these methods alone")
    parser.add_argument("--models", nargs="*", metavar="NAME", help="of these models alone")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so many seconds")
    options, console, start = parser.parse_args(argv), Console(), time.perf_counter()
    from lowtide.planner.answers.known_models import known_models
    from lowtide.planner.parallel import each_of

    path = grid_path()
    found = json.loads(path.read_text(encoding="utf-8")) if path.exists() and not options.again else {}
    grid = {**frame(), "peaks": {}, "speeds": {}}
    if grid["devices"] == found.get("devices"):
        grid |= {part: found[part] for part in ("peaks", "speeds")}
    failed = False
    for name in options.models or known_models():
        shape = grid["models"][name]
        missing = [method for method in options.methods if method not in grid["peaks"].get(shape, {})]
        if not missing or time.perf_counter() - start > options.seconds:
            continue
        began = time.perf_counter()
        tasks = [(name, method, way, stage) for method in missing for way, stage in stages()]
        for (_, method, _, stage), result in zip(tasks, each_of(traced, tasks), strict=True):
            if isinstance(result, str):
                console.print(f"{name}, {method}, {stage}: {result}", markup=False)
                failed = True
                continue
            grid["peaks"].setdefault(shape, {}).setdefault(method, {})[stage] = result["peaks"]
            grid["speeds"].setdefault(shape, {}).setdefault(method, {})[stage] = result["speeds"]
        grid["methods"] = complete(grid)
        path.write_text(json.dumps(grid, separators=(",", ":")) + "\n", encoding="utf-8")
        console.print(f"{name}: {len(tasks)} settings, {time.perf_counter() - began:.0f} s")
    console.print(f"{path}: {path.stat().st_size / 1000:.0f} kB, {len(grid['peaks'])} shapes")
    return int(failed)


def grid_path() -> Path:
    """Where the grid lies, in the package."""
    import lowtide.planner.answers as answers
    from lowtide.planner.answers.page import GRID

    return Path(next(iter(answers.__path__))) / GRID


def frame() -> dict[str, Any]:
    """All of the grid that is not traced."""
    from lowtide.planner.answers.known_models import known_models
    from lowtide.planner.answers.ways import ways_of

    models, positions, shapes = {}, {}, {}
    for name, each in known_models().items():
        config = {key: value for key, value in each["config"].items() if key != "max_position_embeddings"}
        shape = shapes.setdefault(json.dumps(config, sort_keys=True), str(len(shapes)))
        models[name] = shape
        positions[name] = each["config"]["max_position_embeddings"]
    ways = [
        {
            "name": way.name,
            "written": written(way.written),
            "changes": way.changes,
            "stages": [
                {"key": key_of(stage), "whole": stage.whole, "written": written(stage.options)}
                for stage in way.stages
                if on_the_page(stage)
            ],
        }
        for way in ways_of(run_of_model("Qwen/Qwen2.5-0.5B", "sft"))
        if any(map(on_the_page, way.stages))
    ]
    factors = {method: sum(map(int, parts.split("+"))) / 1024 for method, parts in METHODS.items()}
    return {
        "date": date.today().isoformat(),
        "methods": list(METHODS),
        "models": models,
        "positions": positions,
        "factors": factors,
        "tokens": {method: [round(1024 * rows * factor) for rows in ROWS] for method, factor in factors.items()},
        "ways": ways,
        "devices": [
            {"name": each.name, "memory": each.memory_bytes, "context": each.context_bytes, "number": number}
            for number, each in enumerate(devices())
        ],
    }


def complete(grid: Mapping[str, Any]) -> list[str]:
    """The methods of which all shapes are traced that have any numbers."""
    return [method for method in METHODS if all(method in each for each in grid["peaks"].values())]


if __name__ == "__main__":
    sys.exit(main())
