"""The demo: make a model and data, train with the real command, and examine before and after.

Nothing is special about the training: it is `lowtide sft`, or another method of `LESSONS`, on a model folder and a
JSONL file, which stay in the output folder to be tried again by hand.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
import yaml
from rich.table import Table
from rich.text import Text

from lowtide.demo.data import Question, make_questions, write_rows
from lowtide.demo.lessons import COMMON, LESSONS, Finding, Lesson
from lowtide.memory.allocators.measure import bytes_text, resident_bytes
from lowtide.terminal import Console

Sample = tuple[Question, Finding, Finding]
Training = Callable[[str, Path], int]
"""Runs `lowtide METHOD --config FILE` by the method's name and the file, and gives its exit status."""


@dataclass(frozen=True)
class Sizes:
    """How much is done."""

    steps: int | None = None
    """None: the method's own."""
    questions: int | None = None
    """Questions to train on; None: all that are not held out."""
    held_out: int = 200
    samples: int = 5


def run_demo(
    folder: Path, train: Training, *, method: str = "sft", sizes: Sizes | None = None, seed: int = 0
) -> dict[str, Any] | None:
    """Run the demo; gives what `report.json` holds, or None where training failed.

    Args:
        folder: where everything is written; what an earlier demo left there is replaced.
        train: runs a method's command.
        method: one of `LESSONS`.
        sizes: how much is done; by default what reaches 90% of right answers.
        seed: of data and weights.
    """
    start = time.perf_counter()
    sizes, lesson = sizes or Sizes(), LESSONS[method]
    torch.set_num_threads(1)  # the matrices are tiny: a second thread would mostly wait, and change the rounding
    transformers.utils.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    base, model, data, memory = folder / "base", folder / "model", folder / "train.jsonl", folder / "memory.json"
    questions, held_out = make_questions(sizes.held_out, seed)
    for path, asked in (
        (data, questions[: sizes.questions or lesson.questions]),
        (folder / "held_out.jsonl", held_out),
    ):
        write_rows((row for question in asked for row in lesson.rows(question)), path)
    lesson.base(base, seed)
    models = _taught(folder, base, questions, lesson, train, seed)
    if models is None:
        return None
    before = lesson.examine(Path(models["model"]), held_out, "answers before", seed)

    import_module("lowtide.trainers.public")  # whose own memory is none of the training's
    held = resident_bytes()
    settings = {**models, "dataset": str(data), "output_dir": str(model), "memory_report": str(memory)}
    steps = {"max_steps": lesson.steps if sizes.steps is None else sizes.steps, "seed": seed}
    run_file = folder / f"{method}.yaml"
    run_file.write_text(yaml.safe_dump(settings | COMMON | dict(lesson.settings) | steps, sort_keys=False))
    if train(method, run_file):
        return None
    after = lesson.examine(model, held_out, "answers after ", seed)

    measured = json.loads(memory.read_text())
    report = {
        f"{lesson.measure}_before": _share(before),
        f"{lesson.measure}_after": _share(after),
        "states_bytes": measured["states_bytes"],
        "states": measured["states"],
        "peak_bytes": measured["peak_bytes"],
        "resident_bytes_before_training": held,
        "tokens_per_second": measured["tokens_per_second"],
        "ledger": measured["ledger"],
        "model": str(model),
        "seconds": time.perf_counter() - start,
    }
    (folder / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    _show(report, lesson, list(zip(held_out, before, after, strict=True))[: sizes.samples], folder, Console())
    return report


def _taught(
    folder: Path, base: Path, questions: Sequence[Question], lesson: Lesson, train: Training, seed: int
) -> dict[str, str] | None:
    """The option of the model to begin with and, where there is a teacher, its own: a base model, after supervised
    fine-tuning where the lesson says so. None where that failed."""
    models, base_of_teacher = {"model": str(base)}, base
    if lesson.teacher_base is not None:
        base_of_teacher = folder / "teacher" / "base"
        lesson.teacher_base(base_of_teacher, seed)
    for name, option, begun, steps in (
        ("taught", "model", base, lesson.taught),
        ("teacher", "teacher_model_name_or_path", base_of_teacher, lesson.teacher),
    ):
        if not steps:
            continue
        data, model = folder / name / "train.jsonl", folder / name / "model"
        write_rows((row for question in questions for row in lesson.taught_rows(question)), data)
        settings = {"model": str(begun), "dataset": str(data), "output_dir": str(model)}
        run_file = folder / name / "sft.yaml"
        last = {"max_steps": steps, "seed": seed}
        run_file.write_text(yaml.safe_dump(settings | COMMON | dict(LESSONS["sft"].settings) | last, sort_keys=False))
        if train("sft", run_file):
            return None
        models[option] = str(model)
    return models


def _share(findings: Sequence[Finding]) -> float:
    return sum(finding.right for finding in findings) / len(findings)


def _show(report: dict[str, Any], lesson: Lesson, samples: Sequence[Sample], folder: Path, console: Console) -> None:
    table = Table(title="Held-out questions", title_justify="left", caption=lesson.note, caption_justify="left")
    for column in ("question", "before", "after"):
        table.add_column(column, no_wrap=True)
    for question, before, after in samples:
        style = "green" if after.right else "red"
        table.add_row(lesson.asked(question), _one_line(before.text), _one_line(after.text, style))
    console.print(table)
    shares = [report[f"{lesson.measure}_{when}"] for when in ("before", "after")]
    states = report["states"]
    facts = {
        lesson.words: f"{shares[0]:.1%} before, {shares[1]:.1%} after",
        "states predicted": f"{bytes_text(report['states_bytes'])} = "
        + " + ".join(f"{name} {bytes_text(count)}" for name, count in states.items()),
        "peak measured": f"{bytes_text(report['peak_bytes'])} resident, "
        f"{bytes_text(report['resident_bytes_before_training'])} of it before training",
        "model": str(folder / "model"),
        "report": str(folder / "report.json"),
        "time": f"{report['seconds']:.0f} s",
    }
    for name, text in facts.items():
        console.print(f"[bold]{name:17}[/bold]", Text(text), soft_wrap=True)


def _one_line(text: str, style: str = "") -> Text:
    """An answer as it is, but on one line: an untrained model's may be all line ends."""
    return Text(text.replace("\n", "⏎"), style, overflow="ellipsis")
