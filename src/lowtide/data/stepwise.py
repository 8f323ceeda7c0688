"""Answers in steps, each with a judgement, to token rows with labels at the ends of steps. The tokens are those of the
`PRMTrainer` that TRL had: the prompt after the tokenizer's first token, then each step with the separator behind it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from datasets import Dataset, Features, IterableDataset, List, Value
from transformers import PreTrainedTokenizerBase

from lowtide.compat.datasets import fingerprint_of
from lowtide.data.batches.token_rows import IGNORED
from lowtide.data.cache.cached_map import reading
from lowtide.data.cache.fingerprint import VERSION, combine, tokenizer_fingerprint
from lowtide.data.sources.titles import entitled, title_of
from lowtide.spelling import nearest

COLUMNS = ("prompt", "completions", "labels")
FEATURES = Features({"input_ids": List(Value("int64")), "labels": List(Value("int64"))})


@dataclass(frozen=True)
class StepEncoder:
    """From a prompt, steps and their labels to token ids and their labels, `IGNORED` but at the ends of steps."""

    tokenizer: PreTrainedTokenizerBase
    separator: str
    """What stands behind each step."""
    most: int | None = None
    """Tokens of a row at most; its start is kept."""
    most_of_prompt: int | None = None
    """Likewise of a prompt; its end is kept."""
    most_of_steps: int | None = None
    """Likewise of all steps; their start is kept."""
    last_alone: bool = False
    """Whether the last step alone is labelled."""
    source: str = "the train dataset"

    def __call__(self, row: Mapping[str, Any], number: int) -> dict[str, list[int]]:
        """The columns of `FEATURES`.

        Raises:
            ValueError: the row has no steps, or not a label for each, or no step's end is left; names it.
        """
        steps, judged = self._checked(row, number)
        prompt = self._tokens(row["prompt"])
        if self.tokenizer.bos_token_id is not None:
            prompt = [self.tokenizer.bos_token_id, *prompt]
        ids, labels = [], []
        for place, (step, label) in enumerate(zip(steps, judged, strict=True)):
            own = [*self._tokens(step), *self._tokens(self.separator)]
            counts = place == len(steps) - 1 or not self.last_alone
            ids += own
            labels += [*[IGNORED] * (len(own) - 1), int(label) if counts else IGNORED]
        prompt = prompt if self.most_of_prompt is None else prompt[-self.most_of_prompt :]
        ids, labels = ids[: self.most_of_steps], labels[: self.most_of_steps]
        return {
            "input_ids": [*prompt, *ids][: self.most],
            "labels": [*[IGNORED] * len(prompt), *labels][: self.most],
        }

    def _tokens(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _checked(self, row: Mapping[str, Any], number: int) -> tuple[list[str], list[bool | int]]:
        """The steps and the labels of a row."""
        prompt, steps, labels = (row[name] for name in COLUMNS)
        where = f"{self.source}, row {number}"
        if not isinstance(prompt, str) or not isinstance(steps, list) or not all(isinstance(s, str) for s in steps):
            raise ValueError(f"{where}: `prompt` must be a text, and `completions` a list of steps, each a text")
        if not steps or not isinstance(labels, list) or len(labels) != len(steps):
            count = len(labels) if isinstance(labels, list) else 0
            raise ValueError(
                f"{where}: {len(steps)} steps in `completions` and {count} `labels`: at least one step, and a label "
                "for each"
            )
        wrong = next((each for each in labels if not isinstance(each, bool | int) or each not in (0, 1)), None)
        if wrong is not None:
            raise ValueError(f"{where}: the label {wrong!r} is neither true (a right step) nor false")
        return steps, labels


def prepare_steps(
    dataset: Dataset | IterableDataset, encoder: StepEncoder, *, num_proc: int | None = None
) -> Dataset | IterableDataset:
    """Rows of token ids with labels, of rows of prompts and steps; rows of token ids stay as they are.

    Raises:
        ValueError: a column is missing, or a row cannot be used; names it.
    """
    with reading(dataset, encoder.source, "prompt, completions and labels") as first:
        columns = list(first)
    if "input_ids" in columns:
        return dataset
    for name in COLUMNS:
        if name not in columns:
            raise ValueError(
                f"{encoder.source} has no column `{name}`{nearest(name, columns)}, only {', '.join(sorted(columns))}: "
                "rows have a `prompt`, its steps in `completions`, and in `labels` whether each is right"
            )
    if isinstance(dataset, IterableDataset):
        return dataset.map(encoder, with_indices=True, remove_columns=columns, features=FEATURES)
    limits = (encoder.separator, encoder.most, encoder.most_of_prompt, encoder.most_of_steps, encoder.last_alone)
    named = combine(VERSION, "steps", fingerprint_of(dataset), tokenizer_fingerprint(encoder.tokenizer), limits)
    found = dataset.with_format(None).map(
        encoder,
        with_indices=True,
        num_proc=num_proc or None,
        remove_columns=columns,
        features=FEATURES,
        new_fingerprint=named,
        desc=f"Preparing {encoder.source}",
    )
    return entitled(found, title_of(dataset, encoder.source.removeprefix("the ").removesuffix(" dataset")))
