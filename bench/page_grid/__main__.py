"""`python -m bench.page_grid`: traces the grid from which `lowtide gpus` and `lowtide page` answer.

Nothing is measured: a peak is predicted, in MiB, of all settings that `lowtide gpus` compares at two sizes of a
micro-batch, on a GPU with bfloat16, its context not counted; seconds are a roofline at the rates of each device's data
sheet, which are scaled from the smaller size. Models of one shape share their numbers. What is there already is kept,
so that an interrupted run goes on (`--again` begins anew). Seconds are by the number of a device, so that nothing is
kept where the devices are others.
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

from bench.page_grid.tracing import METHODS, ROW, ROWS, TIMED, devices, key_of, run_of_model, traced, written

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
    grid = {**frame(), "peaks": {}, "seconds": {}}
    if grid["devices"] == found.get("devices"):
        grid |= {part: found[part] for part in ("peaks", "seconds")}
    failed = False
    for name in options.models or known_models():
        shape = grid["models"][name]
        missing = [method for method in options.methods if method not in grid["peaks"].get(shape, {})]
        if not missing or time.perf_counter() - start > options.seconds:
            continue
        began = time.perf_counter()
        for method, result in zip(missing, each_of(traced, [(name, each) for each in missing]), strict=True):
            if isinstance(result, str):
                console.print(f"{name}, {method}, {result}", markup=False)
                failed = True
                continue
            for part, there in result.items():
                grid[part].setdefault(shape, {})[method] = there
        write(grid, path)
        console.print(f"{name}: {', '.join(missing)}, {time.perf_counter() - began:.0f} s")
    write(grid, path)
    console.print(f"{path}: {path.stat().st_size / 1000:.0f} kB, {len(grid['peaks'])} shapes")
    return int(failed)


def write(grid: dict[str, Any], path: Path) -> None:
    """The grid as far as it is there."""
    grid["methods"] = complete(grid)
    path.write_text(json.dumps(grid, separators=(",", ":")) + "\n", encoding="utf-8")


def grid_path() -> Path:
    """Where the grid lies, in the package."""
    import lowtide.planner.answers as answers
    from lowtide.planner.answers.kept_grid import GRID

    return Path(next(iter(answers.__path__))) / GRID


def frame() -> dict[str, Any]:
    """All of the grid that is not traced."""
    from lowtide.planner.answers.known_models import known_models
    from lowtide.planner.answers.ways import PLAIN, ways_of
    from lowtide.planner.estimate import BANDS

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
                {
                    "key": key_of(stage),
                    "whole": stage.whole,
                    "timed": not stage.begins_with,
                    "long": stage.name != PLAIN,
                    "written": written(stage.options),
                }
                for stage in way.stages
            ],
        }
        for way in ways_of(run_of_model("Qwen/Qwen2.5-0.5B", "sft"))
    ]
    factors = {method: sum(map(int, parts.split("+"))) / ROW for method, parts in METHODS.items()}
    sizes = {"tokens": ROWS, "timed": TIMED}
    return {
        "date": date.today().isoformat(),
        "methods": list(METHODS),
        "models": models,
        "positions": positions,
        "row": ROW,
        "band": BANDS["cuda"],
        "parts": {method: len(parts.split("+")) for method, parts in METHODS.items()},
        **{
            name: {method: [round(ROW * rows * factor) for rows in counts] for method, factor in factors.items()}
            for name, counts in sizes.items()
        },
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
