"""`LogCompletionsCallback`: what the model writes to some prompts, as training goes on."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import Any

import torch
from accelerate.utils import gather_object
from rich.table import Table
from rich.text import Text
from transformers import GenerationConfig, TrainerCallback

from lowtide.score_rules import IGNORE
from lowtide.scripts.rows import maybe_apply_chat_template
from lowtide.terminal import Console

COLUMNS = ("step", "prompt", "completion")
TRACKERS = ("wandb", "comet_ml", "trackio")
"""The trackers that show a table."""


class LogCompletionsCallback(TrainerCallback):
    """Writes completions of the evaluation set's prompts every so many steps.

    They go as a table to those of wandb, comet_ml and trackio that `report_to` names, and to the terminal if it names
    none of them. `table` has all rows so far. They are written as the model's own generation config says, unless there
    is a `generation_config`.

    Args:
        trainer: whose `eval_dataset` has a column `prompt`, of texts or conversations; of rows that are prepared the
            prompt is what comes before the first scored token.
        generation_config: how completions are written.
        num_prompts: the first so many of the prompts; by default all.
        freq: every so many steps; by default the trainer's `eval_steps`.

    Raises:
        ValueError: there is no evaluation set, or it has no prompts.
    """

    def __init__(
        self,
        trainer: Any,
        generation_config: GenerationConfig | None = None,
        num_prompts: int | None = None,
        freq: int | None = None,
    ) -> None:
        self.eval_dataset = eval_prompts(trainer, type(self).__name__, num_prompts)
        self.trainer = trainer
        self.generation_config = generation_config
        self.freq = freq
        self.table: list[tuple[str, str, str]] = []
        self._last_step = -1

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        every = self.freq or state.eval_steps
        if state.global_step == self._last_step or not every or state.global_step % every:
            return
        self._last_step = state.global_step
        pairs = written_pairs(self.trainer, self.eval_dataset, self.generation_config, args.per_device_eval_batch_size)
        if self.trainer.accelerator.is_main_process:
            rows = [(str(state.global_step), *pair) for pair in pairs]
            self.table += rows
            show("Completions", COLUMNS, rows, args.report_to, self.table)


def eval_prompts(trainer: Any, title: str, count: int | None) -> Any:
    """The first rows of a trainer's evaluation set, all by default, which have prompts.

    Raises:
        ValueError: there is none, or it has none; `title` is the callback's name.
    """
    rows = trainer.eval_dataset
    if rows is None:
        raise ValueError(f"{title} reads prompts from the trainer's eval_dataset: pass one to it")
    if not {"prompt", "prompt_ids", "labels"} & set(getattr(rows, "column_names", None) or []):
        raise ValueError(
            f"{title} reads the column `prompt` of eval_dataset, which is no dataset that has one: evaluate on rows "
            "with prompts"
        )
    return rows if count is None else rows.select(range(min(count, len(rows))))


def prompts_of(rows: Any, tokenizer: Any) -> list[str]:
    """The prompts of rows as text, by the chat template where they are conversations."""
    if "prompt" in rows.column_names:
        return [maybe_apply_chat_template({"prompt": prompt}, tokenizer)["prompt"] for prompt in rows["prompt"]]
    if "prompt_ids" in rows.column_names:
        return tokenizer.batch_decode(list(rows["prompt_ids"]))
    return [
        tokenizer.decode([token for token, _ in takewhile(lambda pair: pair[1] == IGNORE, zip(*row, strict=True))])
        for row in zip(rows["input_ids"], rows["labels"], strict=True)
    ]


def written_pairs(trainer: Any, rows: Any, config: GenerationConfig | None, batch_size: int) -> list[tuple[str, str]]:
    """The prompts of rows with what a trainer's model writes to them, each rank to some; all of them on each rank."""
    accelerator, tokenizer = trainer.accelerator, trainer.processing_class
    with accelerator.split_between_processes(prompts_of(rows, tokenizer)) as prompts:
        model = accelerator.unwrap_model(trainer.model_wrapped)
        completions = write(model, tokenizer, prompts, config, batch_size)
    return list(zip(gather_object(prompts), gather_object(completions), strict=True))


@torch.no_grad()
def write(
    model: Any, tokenizer: Any, prompts: Sequence[str], config: GenerationConfig | None, batch_size: int
) -> list[str]:
    """A completion of each prompt, as text without special tokens. The model and tokenizer stay as they were."""
    completions: list[str] = []
    with _generating(model, tokenizer):
        for start in range(0, len(prompts), batch_size):
            batch = tokenizer(
                list(prompts[start : start + batch_size]), return_tensors="pt", padding=True, add_special_tokens=False
            ).to(model.device)
            batch.pop("token_type_ids", None)
            written = model.generate(**batch, generation_config=config)
            completions += tokenizer.batch_decode(written[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    return completions


@contextlib.contextmanager
def _generating(model: Any, tokenizer: Any) -> Iterator[None]:
    """In evaluation mode, without checkpointing, which would switch the cache off; padded on the left; and the random
    state put back, so that training goes on as if nothing had been written."""
    training, side, pad = model.training, tokenizer.padding_side, tokenizer.pad_token
    layers = [each for each in model.modules() if getattr(each, "gradient_checkpointing", False)]
    devices = [model.device] if model.device.type == "cuda" else []
    tokenizer.padding_side, tokenizer.pad_token = "left", pad or tokenizer.eos_token
    for layer in layers:
        layer.gradient_checkpointing = False
    try:
        with torch.random.fork_rng(devices):
            model.eval()
            yield
    finally:
        model.train(training)
        tokenizer.padding_side, tokenizer.pad_token = side, pad
        for layer in layers:
            layer.gradient_checkpointing = True


def show(
    title: str,
    columns: Sequence[str],
    new: Sequence[Sequence[str]],
    report_to: Any,
    table: Sequence[Sequence[str]] | None = None,
) -> None:
    """Shows new rows of texts on the terminal, or hands them to the trackers that are reported to; to these the whole
    `table`, where they belong to one."""
    if trackers_of(report_to):
        import pandas

        data = [list(row) for row in (new if table is None else table)]
        hand_to_trackers(pandas.DataFrame(columns=list(columns), data=data), report_to)
        return
    shown = Table(*columns, title=title, title_justify="left", show_lines=True)
    for row in new:
        shown.add_row(*(Text(text) for text in row))
    Console(file=sys.stderr).print(shown)


def trackers_of(report_to: Any) -> set[str]:
    """The trackers that take tables, of those that are reported to."""
    return {report_to} & set(TRACKERS) if isinstance(report_to, str) else set(report_to or []) & set(TRACKERS)


def hand_to_trackers(frame: Any, report_to: Any) -> None:
    """Logs a pandas table of completions to the trackers that are reported to."""
    names = trackers_of(report_to)
    if "wandb" in names:
        import wandb

        wandb.log({"completions": wandb.Table(dataframe=frame)})
    if "trackio" in names:
        import trackio

        trackio.log({"completions": trackio.Table(dataframe=frame)})
    if "comet_ml" in names:
        import comet_ml

        experiment = comet_ml.get_running_experiment()
        if experiment is not None:
            experiment.log_table(tabular_data=frame, filename="completions.csv")
