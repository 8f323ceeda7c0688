"""What a run will take, and which settings fit a budget: known before any weight is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from datasets import Dataset
from transformers import AutoConfig, PretrainedConfig

import lowtide
from lowtide.calibration import process_bytes
from lowtide.planner.devices import device_named
from lowtide.planner.estimate import Estimate, estimate_run
from lowtide.planner.fake_run import FakeRun
from lowtide.planner.sharding import Sharding
from lowtide.trainers.config import TrainingConfig
from lowtide.trainers.method import MethodTrainer


def estimate(
    config: TrainingConfig,
    model: str | PretrainedConfig,
    *,
    lengths: Sequence[int | Sequence[int]] | None = None,
    dataset: Dataset | None = None,
    processing_class: Any = None,
    peft_config: Any = None,
    device: str = "cpu",
    world_size: int = 1,
    sharding: Any = None,
) -> Estimate:
    """What a run will take, on each device; no weight is made.

    Args:
        config: of the trainer, as the run will have it.
        model: its config, or a path or hub name of it.
        lengths: the tokens of each row: a number for `SFTConfig`; for pairs (prompt, chosen, rejected), for single
            completions (prompt, completion).
        dataset: rows to train on, in place of their lengths.
        processing_class: their tokenizer; by default the model's own.
        peft_config: adapters to put on the model.
        device: "cpu", "cuda" (the one that is there), or a name as "H100-80GB".
        world_size: devices that train together.
        sharding: how they share states: "zero3", "fsdp2", "tp2+fsdp2", a DeepSpeed configuration or its path; None
            for equal copies.

    Raises:
        ValueError: the config is of no method, the lengths do not fit it, the device is unknown, or the model's step
            cannot be traced.
    """
    if (lengths is None) == (dataset is None):
        raise ValueError("estimate needs either `lengths` or `dataset`, to know what a step will see")
    described = AutoConfig.from_pretrained(model) if isinstance(model, str) else model
    run = FakeRun(
        trainer_of(config),
        config,
        described,
        Dataset.from_list(rows_of(lengths)) if lengths is not None else dataset,
        processing_class=processing_class,
        peft_config=peft_config,
        prepared=lengths is not None,
    )
    spread = Sharding.read(sharding or "ddp", devices=world_size) if world_size > 1 else None
    where = device_named(device)
    beside = process_bytes(peft_config is not None) if where.kind == "cpu" else 0
    return estimate_run(run, where, sharding=spread, process_bytes=beside)


def trainer_of(config: TrainingConfig) -> type[MethodTrainer]:
    """The trainer whose config this is."""
    name = type(config).__name__.removesuffix("Config") + "Trainer"
    found = getattr(lowtide, name, None)
    if found is None:
        raise ValueError(f"{type(config).__name__} is of no trainer: give the config of a method, SFTConfig say")
    return found


def rows_of(lengths: Sequence[int | Sequence[int]]) -> list[dict]:
    """Prepared rows of such lengths."""
    columns = {
        1: ("input_ids",),
        2: ("prompt_ids", "completion_ids"),
        3: ("prompt_ids", "chosen_ids", "rejected_ids"),
    }
    made = []
    for length in lengths:
        each = (length,) if isinstance(length, int) else tuple(length)
        row: dict[str, Any] = {name: [1] * size for name, size in zip(columns[len(each)], each, strict=True)}
        if "input_ids" in row:
            row["labels"] = row["input_ids"]
        if "completion_ids" in row:
            row |= {"kl_completion_ids": row["completion_ids"], "label": True}
        made.append(row)
    return made
