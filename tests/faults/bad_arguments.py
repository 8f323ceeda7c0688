"""trainer arguments that mean nothing are refused at construction with one clear error"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import DatasetDict, IterableDataset
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    EarlyStoppingCallback,
    PreTrainedTokenizerFast,
    PrinterCallback,
    TrainingArguments,
)

import lowtide
from lowtide.demo.model import make_tokenizer

from .case import Case
from .tiny_world import METHODS, dataset, model, world

Make = Callable[[Path], Any]
"""Makes an argument, in the case's process and folder."""


def plain(value: Any) -> Make:
    """An argument that is there already."""
    return lambda folder: value


def classifier(labels: int) -> Any:
    """A model that classifies sequences, of the same sizes."""
    config = model().config
    config.num_labels = labels
    return AutoModelForSequenceClassification.from_config(config)


def frozen() -> Any:
    """A model of which nothing is trained."""
    return model().requires_grad_(False)


def adapted() -> Any:
    """A model with an adapter on it."""
    return get_peft_model(model(), LoraConfig(target_modules=["q_proj"]))


def other_vocabulary() -> Any:
    """A model with fewer tokens than the tokenizer has."""
    made = model()
    made.resize_token_embeddings(8)
    return made


def to_model(folder: Path) -> lowtide.SFTConfig:
    """Options of a run that would write over its model."""
    return lowtide.SFTConfig(str(world(folder) / "model"), use_cpu=True, max_steps=1, report_to="none")


def collate_nothing(rows: list) -> dict:
    """A collator that loses all."""
    return {}


SFT: dict[str, tuple[dict[str, Make], str]] = {
    "no model": ({"model": plain(None)}, "model must be"),
    "a number for a model": ({"model": plain(3)}, "model must be"),
    "a dict for a model": ({"model": plain({})}, "model must be"),
    "a config for a model": ({"model": lambda folder: model().config}, "model must be"),
    "a class for a model": ({"model": plain(AutoModel)}, "model must be"),
    "a module that is no model": ({"model": lambda folder: nn.Linear(2, 2)}, "Linear"),
    "a model on meta": ({"model": lambda folder: model().to("meta")}, "meta device"),
    "a reward model": ({"model": lambda folder: classifier(1)}, "no language-modelling head"),
    "a classifier": ({"model": lambda folder: classifier(3)}, "no language-model"),
    "a model without a head": (
        {"model": lambda folder: AutoModel.from_config(model().config)},
        "no language-modelling",
    ),
    "a folder that is not there": ({"model": plain("./nowhere")}, "./nowhere"),
    "a path that is not there": ({"model": plain(Path("nowhere"))}, "nowhere"),
    "an empty folder": ({"model": lambda folder: str(folder)}, "config.json"),
    "a frozen model": ({"model": lambda folder: frozen()}, "every parameter is frozen"),
    "a model with fewer tokens": ({"model": lambda folder: other_vocabulary()}, "embeddings"),
    "adapters twice": (
        {"model": lambda folder: adapted(), "peft_config": lambda folder: LoraConfig(target_modules=["q_proj"])},
        "has adapters already",
    ),
    "a dict for args": ({"args": plain({"output_dir": "out"})}, "args must be a config: SFTConfig(...)"),
    "text for args": ({"args": plain("out")}, "args must be"),
    "a class for args": ({"args": plain(lowtide.SFTConfig)}, "args must be"),
    "another method's args": ({"args": lambda folder: lowtide.DPOConfig("out", use_cpu=True)}, "DPOConfig"),
    "the model's folder to write to": ({"args": lambda folder: to_model(folder)}, "is the folder of model too"),
    "plain args out of range": (
        {"args": lambda folder: TrainingArguments("out", use_cpu=True, max_grad_norm=-1)},
        "max_grad_norm=-1",
    ),
    "a list of rows": ({"train_dataset": plain([{"text": "1"}])}, "Dataset.from_list"),
    "a dict of columns": ({"train_dataset": plain({"text": ["1"]})}, "Dataset.from_dict"),
    "all splits": ({"train_dataset": lambda folder: DatasetDict(train=dataset())}, "dataset['train']"),
    "a table of pandas": ({"train_dataset": lambda folder: dataset().to_pandas()}, "Dataset.from_pandas"),
    "a file's name": ({"train_dataset": plain("rows.jsonl")}, "load_dataset"),
    "a number for rows": ({"train_dataset": plain(3)}, "train dataset must be"),
    "no rows": ({"train_dataset": lambda folder: dataset().select([])}, "the train dataset has no rows"),
    "rows of another method": ({"train_dataset": lambda folder: dataset("kto").remove_columns("prompt")}, "the train"),
    "a stream without max_steps": (
        {
            "train_dataset": lambda folder: IterableDataset.from_generator(lambda: iter(dataset())),
            "args": lambda folder: lowtide.SFTConfig("out", use_cpu=True),
        },
        "max_steps",
    ),
    "a list to evaluate on": ({"eval_dataset": plain([{"text": "1"}])}, "eval dataset must be"),
    "lists to evaluate on, by name": ({"eval_dataset": plain({"a": [1]})}, "the a dataset must be"),
    "no rows to evaluate on": ({"eval_dataset": lambda folder: dataset().select([])}, "the eval dataset has no rows"),
    "text for a tokenizer": ({"processing_class": plain("gpt2")}, "processing_class must be a tokenizer"),
    "a class for a tokenizer": ({"processing_class": plain(PreTrainedTokenizerFast)}, "processing_class must be"),
    "a number for a tokenizer": ({"processing_class": plain(1)}, "processing_class must be a tokenizer"),
    "no tokenizer": ({"processing_class": plain(None), "model": lambda folder: model()}, "processing_class"),
    "a dict for adapters": ({"peft_config": plain({"r": 4})}, "peft_config must be a PEFT config"),
    "a list for adapters": ({"peft_config": lambda folder: [LoraConfig()]}, "peft_config must be a PEFT config"),
    "a class for adapters": ({"peft_config": plain(LoraConfig)}, "peft_config must be a PEFT config"),
    "modules that are not there": ({"peft_config": lambda folder: LoraConfig(target_modules=["nowhere"])}, "nowhere"),
    "one callback without a list": ({"callbacks": lambda folder: PrinterCallback()}, "callbacks must be a list"),
    "a number for callbacks": ({"callbacks": plain(3)}, "callbacks must be a list"),
    "text among callbacks": ({"callbacks": plain(["x"])}, "callbacks must be a list"),
    "another class among callbacks": ({"callbacks": plain([int])}, "callbacks must be a list"),
    "early stopping without evaluations": (
        {"callbacks": lambda folder: [EarlyStoppingCallback()]},
        "eval_strategy='steps'",
    ),
    "modules to train whole that are not there": (
        {"peft_config": lambda folder: LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_haed"])},
        "modules_to_save names 'lm_haed'",
    ),
    "an expression that is none": (
        {"peft_config": lambda folder: LoraConfig(target_modules="(")},
        "target_modules: '(' is no regular expression",
    ),
    "nothing to evaluate on, by name": ({"eval_dataset": plain({})}, "eval_dataset is a mapping without a dataset"),
    "text for a loss": ({"compute_loss_func": plain("x")}, "compute_loss_func must be a function"),
    "a number to prepare logits": (
        {"preprocess_logits_for_metrics": plain(3)},
        "preprocess_logits_for_metrics must",
    ),
    "text for metrics": ({"compute_metrics": plain("accuracy")}, "compute_metrics must be a function"),
    "a number for a collator": ({"data_collator": plain(3)}, "data_collator must be a function"),
    "a collator that loses rows": ({"data_collator": plain(collate_nothing)}, "data_collator collate_nothing"),
    "a number for optimizers": ({"optimizers": plain(3)}, "optimizers must be a pair"),
    "one of two optimizers": ({"optimizers": plain((None,))}, "optimizers must be a pair"),
    "a class for optimizers": ({"optimizers": plain(torch.optim.SGD)}, "optimizers must be a pair"),
    "an optimizer of other weights": (
        {"optimizers": lambda folder: (torch.optim.SGD([torch.zeros(1, requires_grad=True)]), None)},
        "holds none",
    ),
    "an optimizer's class alone": ({"optimizer_cls_and_kwargs": plain(torch.optim.SGD)}, "optimizer_cls_and_kwargs"),
    "an optimizer's unknown argument": (
        {"optimizer_cls_and_kwargs": plain((torch.optim.SGD, {"rate": 1}))},
        "rate",
    ),
    "a number to format with": ({"formatting_func": plain(3)}, "formatting_func must be a function"),
    "a formatting that fails": ({"formatting_func": plain(len)}, "formatting_func"),
    "a number for quantization": ({"quantization_config": plain(3)}, "quantization_config must be"),
    "an argument that there is not": ({"models": plain(3)}, "models"),
}
"""By name: arguments of `SFTTrainer`, and what the error has to contain."""

REFERENCES: dict[str, tuple[Make, str]] = {
    "a number": (plain(3), "ref_model must be"),
    "a dict": (plain({}), "ref_model must be"),
    "a folder that is not there": (plain("./nowhere"), "./nowhere"),
    "a model on meta": (lambda folder: model().to("meta"), "ref_model is on the meta device"),
    "a reward model": (lambda folder: classifier(1), "ref_model is of class"),
    "another vocabulary": (lambda folder: other_vocabulary(), "vocabulary"),
}
"""By name: reference models of `DPOTrainer`, and what the error has to contain."""

EVERYWHERE: dict[str, tuple[dict[str, Make], str]] = {
    "a dict for args": ({"args": plain({})}, "args must be a config"),
    "no model": ({"model": plain(None)}, "model must be"),
    "a list of rows": ({"train_dataset": plain([{}])}, "the train dataset must be"),
    "text for callbacks": ({"callbacks": plain("none")}, "callbacks must be"),
}
"""The same of every method's trainer."""


def config_of(method: str) -> type:
    """The method's config class."""
    return getattr(lowtide, f"{'Reward' if method == 'reward' else method.upper()}Config")


def check_refused(method: str, given: dict[str, Make], wanted: str, folder: Path) -> None:
    """A trainer is refused with one error of those that a user can mend, and no file is written."""
    there = world(folder)
    name = config_of(method).__name__.replace("Config", "Trainer")
    arguments: dict[str, Any] = {
        "model": str(there / "model"),
        "args": config_of(method)(output_dir="out", use_cpu=True, disable_tqdm=True, max_steps=1, report_to="none"),
        "train_dataset": dataset(method),
        "processing_class": make_tokenizer(),
    }
    arguments |= {key: make(folder) for key, make in given.items()}
    os.chdir(folder)
    with pytest.raises((ValueError, TypeError), match=re.escape(wanted)):
        getattr(lowtide, name)(**arguments)
    left = [path.name for path in folder.rglob("*") if path.is_file()]
    assert not left, f"it left {left}"


def cases(seed: int) -> Iterator[Case]:
    """Arguments of the trainers."""
    for name, (given, wanted) in SFT.items():
        yield Case(f"SFTTrainer: {name}", partial(check_refused, "sft", given, wanted))
    for name, (make, wanted) in REFERENCES.items():
        yield Case(f"DPOTrainer, its reference: {name}", partial(check_refused, "dpo", {"ref_model": make}, wanted))
    for method in METHODS[1:]:
        for name, (given, wanted) in EVERYWHERE.items():
            yield Case(f"{method}: {name}", partial(check_refused, method, given, wanted))
