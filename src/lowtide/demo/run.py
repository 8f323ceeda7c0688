"""The demo: make a model and data, fine-tune with the real command, and ask before and after.

Nothing is special about the training: it is `lowtide sft` on a model folder and a JSONL file, which stay in the
output folder to be tried again by hand.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lowtide.demo.answers import answers, exact_match
from lowtide.demo.data import Question, make_questions, write_dialogues
from lowtide.demo.model import save
from lowtide.memory.measure import resident_bytes
from lowtide.trainers.report import bytes_text

SETTINGS: dict[str, Any] = {
    "assistant_only_loss": True,
    "max_length": 64,
    "learning_rate": 4e-3,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 40,
    "weight_decay": 0.1,
    "adam_beta2": 0.95,
    "per_device_train_batch_size": 128,
    "gradient_checkpointing": False,
    "logging_steps": 10,
    "save_strategy": "no",
    "use_cpu": True,
}
"""What `lowtide sft` is told. The model is so small that checkpointing would cost more than it saves."""


@dataclass(frozen=True)
class Sizes:
    """How much is done."""

    steps: int = 360
    held_out: int = 200
    samples: int = 5


def run_demo(
    folder: Path, train: Callable[[Path], int], *, sizes: Sizes | None = None, seed: int = 0
) -> dict[str, Any] | None:
    """Run the demo; gives what `report.json` holds, or None where training failed.

    Args:
        folder: where everything is written; what an earlier demo left there is replaced.
        train: runs `lowtide sft --config` on a run file, gives its exit status.
        sizes: how much is done; by default what reaches 90% of exact answers.
        seed: of data and weights.
    """
    start = time.perf_counter()
    sizes = sizes or Sizes()
    torch.set_num_threads(1)  # the matrices are tiny: a second thread would mostly wait, and change the rounding
    transformers.utils.logging.disable_progress_bar()
    base, model, data, memory = folder / "base", folder / "model", folder / "train.jsonl", folder / "memory.json"
    questions, held_out = make_questions(sizes.held_out, seed)
    write_dialogues(questions, data)
    write_dialogues(held_out, folder / "held_out.jsonl")
    save(base, seed)
    before = answers(base, held_out, "answers before")

    import_module("lowtide.trainers.sft")  # whose own memory is none of the training's
    held = resident_bytes()
    settings = {"model": str(base), "dataset": str(data), "output_dir": str(model), "memory_report": str(memory)}
    run_file = folder / "sft.yaml"
    run_file.write_text(yaml.safe_dump(settings | SETTINGS | {"max_steps": sizes.steps, "seed": seed}, sort_keys=False))
    if train(run_file):
        return None
    after = answers(model, held_out, "answers after ")

    measured = json.loads(memory.read_text())
    report = {
        "exact_match_before": exact_match(before, held_out),
        "exact_match_after": exact_match(after, held_out),
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
    samples = list(zip(held_out, before, after, strict=True))[: sizes.samples]
    _show(report, samples, folder, Console())
    return report


def _show(report: dict[str, Any], samples: Sequence[tuple[Question, str, str]], folder: Path, console: Console) -> None:
    table = Table(title="Held-out questions", title_justify="left")
    for column in ("question", "before", "after"):
        table.add_column(column, no_wrap=True)
    for question, before, after in samples:
        right = after == question.answer
        table.add_row(question.text, _one_line(before), _one_line(after, "green" if right else "red"))
    console.print(table)
    states = report["states"]
    facts = {
        "exact answers": f"{report['exact_match_before']:.1%} before, {report['exact_match_after']:.1%} after",
        "states foretold": f"{bytes_text(report['states_bytes'])} = "
        + " + ".join(f"{name} {bytes_text(count)}" for name, count in states.items()),
        "peak measured": f"{bytes_text(report['peak_bytes'])} resident, "
        f"{bytes_text(report['resident_bytes_before_training'])} of it before training",
        "model": str(folder / "model"),
        "report": str(folder / "report.json"),
        "time": f"{report['seconds']:.0f} s",
    }
    for name, text in facts.items():
        console.print(f"[bold]{name:16}[/bold]", Text(text), soft_wrap=True)


def _one_line(text: str, style: str = "") -> Text:
    """An answer as it is, but on one line: an untrained model's may be all line ends."""
    return Text(text.replace("\n", "⏎"), style, overflow="ellipsis")
