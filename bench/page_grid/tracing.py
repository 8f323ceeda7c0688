"""What `bench.page_grid` traces, a method and a model at a time."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

METHODS = {"sft": "1024", "dpo": "512+512+512"}
"""By method, the rows of which a micro-batch is made: of one part, or of several with half of `ROW` each."""
ROW = 1024
"""Tokens of a row of one part, and of each of the two sequences of a pair."""
ROWS = (1, 64)
"""Of the micro-batches that are traced."""
TIMED = (1, 8, 64)
"""Of those whose seconds are kept, the default of `lowtide gpus` among them."""
DIGITS = 3
CUDA = "H100-80GB"


def devices() -> list[Any]:
    """GPUs with bfloat16, in the order in which they are listed."""
    from lowtide.planner.answers.device_table import as_bought
    from lowtide.planner.answers.traces import kind_of
    from lowtide.planner.devices import DEVICES

    return [each for each in sorted(DEVICES.values(), key=as_bought) if kind_of(each) == "cuda"]


def traced(task: tuple[str, str]) -> dict[str, Any] | str:
    """Of a model and a method the lines of each stage's phases, in MiB, and its seconds by device; or why there are
    none."""
    from lowtide.planner.answers.ways import LORA, QLORA, ways_of

    name, method = task
    asked = run_of_model(name, method)
    spaces = max((each.workspaces for each in devices()), key=sum)
    points: dict[tuple[str, str], list[Any]] = {}
    found: dict[str, Any] = {"peaks": {}, "seconds": {}}
    try:
        for way in ways_of(asked):
            for stage in way.stages:
                # The way of QLoRA differs from LoRA's by how frozen weights are stored, which no row changes.
                like = (LORA, stage.name) if way.name == QLORA else stage.grows_like
                low, high = points.get((way.name, stage.begins_with)), points.get(like) if like else None
                small = low[0] if low else point(asked, way, stage, ROWS[0], spaces)
                large = small.grown(*high) if high else point(asked, way, stage, ROWS[1], spaces)
                points[way.name, stage.name] = [small, large]
                found["peaks"][key_of(stage)] = envelope(points[way.name, stage.name], spaces)
                if not stage.begins_with:
                    found["seconds"][key_of(stage)] = [seconds(small, device) for device in devices()]
    except ValueError as reason:
        return f"{key_of(stage)}: {reason}"
    return found


def point(asked: Any, way: Any, stage: Any, rows: int, spaces: tuple[int, ...]) -> Any:
    """One trace: a micro-batch of so many rows; where a batch may have several, another one's gradients are there."""
    from lowtide.planner.answers.traces import point_of
    from lowtide.planner.answers.ways import run_of

    several = 1 if stage.whole else 2
    batch = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": several, "eval_strategy": "no"}
    run = run_of(replace(asked, requested={**asked.requested, **batch}), way)
    return point_of(run, rows_of(asked.method.name, rows, asked), stage.options, [spaces])


def seconds(traced: Any, device: Any) -> list[float]:
    """In ms: of a micro-batch of each size of `TIMED`, of the attention of the largest of them, of what a step does
    once."""
    times = [traced.micro_batch_seconds(device, rows / ROWS[0]) for rows in TIMED]
    attention = traced.micro_batch_seconds(device, TIMED[-1] / ROWS[0], attention=True)
    return [rounded(1000 * each) for each in (*times, attention, traced.step_seconds(device))]


def rounded(number: float) -> float:
    """With a few digits, as JSON has them shortest."""
    short = float(f"{number:.{DIGITS}g}")
    return int(short) if short.is_integer() else short


def envelope(points: list[Any], spaces: tuple[int, ...]) -> list[list[int]]:
    """Of each phase what is held at the sizes that were traced, in MiB; of phases that another is above at all of them
    none."""
    held = [{name: -(-size // (1 << 20)) for name, size in each.phases[spaces].items()} for each in points]
    lines = sorted({tuple(each.get(phase, 0) for each in held) for phase in held[0]}, reverse=True)
    kept: list[tuple[int, ...]] = []
    for line in lines:
        if not any(all(size <= other for size, other in zip(line, above, strict=True)) for above in kept):
            kept.append(line)
    return [list(line) for line in kept]


def rows_of(method: str, rows: int, run: Any) -> Any:
    """So many rows of a method."""
    from lowtide.planner.answers.row_lengths import row_lengths

    return row_lengths(f"{METHODS[method]}x{rows}", run.method)


def run_of_model(name: str, method: str) -> Any:
    """The run of a well-known model, with nothing asked for."""
    from lowtide.planner.answers.known_models import known_config
    from lowtide.planner.candidate import PlannedRun
    from lowtide.planner.devices import DEVICES
    from lowtide.run.options.configs import method_named

    described = known_config(name)
    assert described is not None
    return PlannedRun(method_named(method), described, {}, DEVICES[CUDA], prepared=True)


def key_of(stage: Any) -> str:
    """Of settings, in the grid."""
    return f"{stage.way} {stage.name}"


def written(settings: Mapping[str, Any]) -> str:
    """As a command line has them, each with a space behind it."""
    words = (f"--{name} " if value is True else f"--{name} {str(value).lower()} " for name, value in settings.items())
    return "".join(words)
