"""What a user hands a trainer beside its options, looked at before anything is loaded or computed."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from datasets import Dataset, IterableDataset
from peft import PeftConfig
from torch import nn
from transformers import PreTrainedTokenizerBase, TrainerCallback, TrainingArguments
from transformers.utils.quantization_config import QuantizationConfigMixin

from lowtide.compat.torch import FakeTensor
from lowtide.compat.transformers import attention_implementation
from lowtide.engine.forward import causal_model
from lowtide.engine.heads.head import Head
from lowtide.option_values import shown


@dataclass(frozen=True)
class Argument:
    """What a trainer's argument may be, beside None."""

    accepts: Callable[[Any], bool]
    wanted: str
    """In words, for a message."""


def _are_callbacks(value: Any) -> bool:
    if not isinstance(value, list):
        return False
    return all(
        isinstance(each, TrainerCallback) or (isinstance(each, type) and issubclass(each, TrainerCallback))
        for each in value
    )


def _is_optimizer_with_schedule(value: Any) -> bool:
    if not isinstance(value, list | tuple) or len(value) != 2:
        return False
    optimizer, schedule = value
    return (optimizer is None or hasattr(optimizer, "param_groups")) and (
        schedule is None or callable(getattr(schedule, "step", None))
    )


def _is_class_with_arguments(value: Any) -> bool:
    return isinstance(value, tuple | list) and len(value) == 2 and callable(value[0]) and isinstance(value[1], Mapping)


MODEL = Argument(
    lambda value: isinstance(value, str | os.PathLike | nn.Module), "a model's name or folder, or a loaded model"
)
ARGUMENTS: dict[str, Argument] = {
    "model": MODEL,
    "ref_model": MODEL,
    "teacher_model": MODEL,
    "args": Argument(lambda value: isinstance(value, TrainingArguments), "a config: {config}(...)"),
    "processing_class": Argument(
        lambda value: isinstance(getattr(value, "tokenizer", value), PreTrainedTokenizerBase),  # a processor has one
        "a tokenizer: AutoTokenizer.from_pretrained(...)",
    ),
    "data_collator": Argument(callable, "a function of a list of rows"),
    "formatting_func": Argument(callable, "a function of a row"),
    "compute_loss_func": Argument(callable, "a function of outputs, labels and num_items_in_batch"),
    "preprocess_logits_for_metrics": Argument(callable, "a function of logits and labels"),
    "compute_metrics": Argument(callable, "a function of an EvalPrediction"),
    "callbacks": Argument(_are_callbacks, "a list of TrainerCallback"),
    "optimizers": Argument(_is_optimizer_with_schedule, "a pair (optimizer, scheduler), of which each may be None"),
    "optimizer_cls_and_kwargs": Argument(_is_class_with_arguments, "a pair (optimizer class, its arguments as a dict)"),
    "peft_config": Argument(lambda value: isinstance(value, PeftConfig), "a PEFT config, such as LoraConfig(...)"),
    "quantization_config": Argument(
        lambda value: isinstance(value, QuantizationConfigMixin | Mapping),
        "a quantization config, such as BitsAndBytesConfig(...)",
    ),
}
DATASETS: dict[str, str] = {
    "DatasetDict": "pass one of its splits, such as dataset['train']",
    "IterableDatasetDict": "pass one of its splits, such as dataset['train']",
    "DataFrame": "pass Dataset.from_pandas(frame)",
    "list": "pass Dataset.from_list(rows)",
    "dict": "pass Dataset.from_dict(columns)",
    "str": "pass datasets.load_dataset(...)",
    "PosixPath": "pass datasets.load_dataset(...)",
}
"""By the name of a type that is no dataset, how to make one of it."""


def check_arguments(config: str, **given: Any) -> None:
    """Refuses arguments of a wrong type.

    Args:
        config: the name of the trainer's config class.
        given: the trainer's arguments by name. None stands for one that was left out.

    Raises:
        ValueError: naming the argument, what it is and what it must be.
    """
    for name, value in given.items():
        argument = ARGUMENTS[name]
        if argument.accepts(value) or (value is None and name != "model"):
            continue
        raise ValueError(f"{name} must be {argument.wanted.format(config=config)}, not {shown(value)}")


def check_dataset(dataset: Any, title: str) -> None:
    """Refuses what is no dataset.

    Raises:
        ValueError: says how to make one of it.
    """
    if not isinstance(dataset, Dataset | IterableDataset):
        kind = type(dataset).__name__
        remedy = f": {DATASETS[kind]}" if kind in DATASETS else ""
        raise ValueError(f"{title} must be a datasets.Dataset or a stream of datasets, not of type {kind}{remedy}")


def check_kind(model: nn.Module, *, head: type[Head], name: str = "model") -> None:
    """Refuses a model without weights, or without the head that a method reads.

    Args:
        head: the one that the method reads.
        name: the argument that the model came in.

    Raises:
        ValueError: says how to load it.
    """
    inner = causal_model(model)
    known = ((key, p) for key, p in inner.named_parameters() if not isinstance(p, FakeTensor))
    empty = next((key for key, p in known if p.device.type == "meta"), None)
    if empty is not None:
        raise ValueError(
            f"{name} is on the meta device ({empty}, ...), which holds no weights: load it with from_pretrained, or "
            "fill it (to_empty, load_state_dict) before it is passed"
        )
    if reason := head.why_not(inner):
        values = ", ".join(f"{key}={value}" for key, value in head.config_values.items())
        call = f"{head.auto_class.__name__}.from_pretrained" + (f"(..., {values})" if values else "")
        raise ValueError(
            f"{name} is of class {type(inner).__name__}, which {reason}: load it with {call}, or pass its name"
        )


def check_attention(model: nn.Module, args: Any) -> None:
    """Refuses an attention implementation of GPUs on the padded path of a CPU; without padding another one is used.

    Raises:
        ValueError: naming the implementation.
    """
    asked = str(attention_implementation(causal_model(model).config))
    if "flash_attention" in asked and not args.padding_free and args.device.type == "cpu":
        raise ValueError(f"attn_implementation={asked!r} needs a GPU, and this run is on a CPU: take 'sdpa'")
