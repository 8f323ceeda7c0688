"""What `bench.page_grid` traces, a method and a model at a time."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

METHODS = {"sft": "1024", "dpo": "512+512+512"}
"""By method, the rows of which a micro-batch is made."""
ROWS = (1, 64)
CUDA = "H100-80GB"


def devices() -> list[Any]:
    """GPUs with bfloat16, in the order in which they are listed."""
    from lowtide.planner.answers.device_table import as_bought
    from lowtide.planner.answers.traces import kind_of
    from lowtide.planner.devices import DEVICES

    return [each for each in sorted(DEVICES.values(), key=as_bought) if kind_of(each) == "cuda"]


def on_the_page(stage: Any) -> bool:
    """Whether the page has these settings: with checkpointing, those that are traced in seconds."""
    from lowtide.planner.answers.ways import SAVING, SIXTEEN

    return stage.name == SAVING and stage.way != SIXTEEN


def stages() -> Iterator[tuple[str, str]]:
    """Ways to train, with the keys of their settings."""
    from lowtide.planner.answers.ways import ways_of

    for way in ways_of(run_of_model("Qwen/Qwen2.5-0.5B", "sft")):
        for stage in way.stages:
            if on_the_page(stage):
                yield way.name, key_of(stage)


def traced(task: tuple[str, str, str, str]) -> dict[str, Any] | str:
    """The peaks of one way's settings, in MiB, and tokens a second by device; or why there are none."""
    from lowtide.planner.answers.traces import point_of
    from lowtide.planner.answers.ways import run_of, ways_of

    name, method, way_name, key = task
    asked = run_of_model(name, method)
    way = next(each for each in ways_of(asked) if each.name == way_name)
    stage = next(each for each in way.stages if key_of(each) == key)
    spaces = max((each.workspaces for each in devices()), key=sum)
    held: list[dict[str, int]] = []
    try:
        for rows in ROWS:
            several = 1 if stage.whole else 2
            batch = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": several}
            run = run_of(replace(asked, requested={**asked.requested, **batch}), way)
            point = point_of(run, rows_of(method, rows, asked), stage.options, [spaces])
            held.append({phase: size >> 20 for phase, size in point.phases[spaces].items()})
        speeds = [round(point.tokens_per_second(device)) for device in devices()]
    except ValueError as reason:
        return str(reason)
    return {"peaks": envelope(held), "speeds": speeds}


def envelope(held: list[dict[str, int]]) -> list[list[int]]:
    """Of each phase what is held at the sizes that were traced; of phases that another is above at all of them none."""
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
    requested = {"rehearsal": False, "save_strategy": "no", "eval_strategy": "no"}
    return PlannedRun(method_named(method), described, requested, DEVICES[CUDA], prepared=True)


def key_of(stage: Any) -> str:
    """Of settings, in the grid."""
    return f"{stage.way} {stage.name}"


def written(settings: Mapping[str, Any]) -> str:
    """As a command line has them, each with a space behind it."""
    words = (f"--{name} " if value is True else f"--{name} {str(value).lower()} " for name, value in settings.items())
    return "".join(words)
