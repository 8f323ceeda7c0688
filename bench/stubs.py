"""Writes what is known of the classes that the table of methods makes before they are: `trainers/public.pyi` for
editors and type checkers, and `cli/training/option_table.json`, against which command lines are checked.

python -m bench.stubs           # part of `make docs`
"""

from __future__ import annotations

import argparse
import functools
import inspect
import json
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import fields
from enum import Enum
from pathlib import Path
from types import NoneType
from typing import get_args, get_type_hints

from transformers import TrainingArguments

from lowtide.cli.training.option_table import TABLE, table
from lowtide.cli.training.train import declared_options
from lowtide.methods import METHODS
from lowtide.methods.method import Method
from lowtide.option import PATH
from lowtide.option_values import Option, options_of
from lowtide.run.options.configs import public_name
from lowtide.run.options.training import TrainingConfig
from lowtide.trainers.signatures import signature_of

STUB = Path(__file__).parent.parent / "src/lowtide/trainers/public.pyi"
TYPES = {
    "model": "str | os.PathLike | nn.Module",
    "ref_model": "str | os.PathLike | nn.Module | None",
    "teacher_model": "str | os.PathLike | nn.Module | None",
    "args": "TrainingArguments | None",
    "data_collator": "Callable | None",
    "train_dataset": "Dataset | IterableDataset | None",
    "eval_dataset": "Dataset | IterableDataset | Mapping[str, Dataset] | None",
    "processing_class": "PreTrainedTokenizerBase | None",
    "compute_loss_func": "Callable | None",
    "compute_metrics": "Callable | None",
    "callbacks": "list | None",
    "optimizers": "tuple",
    "optimizer_cls_and_kwargs": "tuple | None",
    "preprocess_logits_for_metrics": "Callable | None",
    "formatting_func": "Callable | None",
    "tokenizer": "PreTrainedTokenizerBase | None",
    "model_init": "Callable | None",
    "peft_config": "PeftConfig | None",
    "quantization_config": "QuantizationConfigMixin | dict | None",
    "reward_funcs": "Rewarding | list[Rewarding] | None",
    "reward_processing_classes": "PreTrainedTokenizerBase | list[PreTrainedTokenizerBase | None] | None",
    "tools": "list[Callable] | None",
    "environment_factory": "Callable | None",
    "rollout_func": "Callable | None",
    "judge": "BasePairwiseJudge | None",
    "value_model": "str | os.PathLike | nn.Module | None",
}
"""By argument; the others are of any type."""
SHARED = "_Config"
"""The class of the options that all configs share."""
OF_ALL = {"tokenizer", "model_init"}
"""What all trainers take and no signature names."""


def stub() -> str:
    """The text of the stub."""
    methods = [METHODS[name] for name in METHODS]
    parts = ["# Written by `python -m bench.stubs` from the table of methods.\n\n"]
    parts += ["import os\nfrom collections.abc import Callable, Mapping\nfrom dataclasses import dataclass\n"]
    parts += ["from typing import Any, Literal, TypedDict, Unpack\n\n"]
    parts += ["from datasets import Dataset, IterableDataset\nfrom peft import PeftConfig\nfrom torch import nn\n"]
    parts += ["from transformers import PreTrainedTokenizerBase, TrainingArguments\n"]
    parts += ["from transformers.trainer_utils import HubStrategy, IntervalStrategy, SaveStrategy, SchedulerType\n"]
    parts += ["from transformers.training_args import OptimizerNames\n"]
    parts += ["from transformers.utils.quantization_config import QuantizationConfigMixin\n\n"]
    options = sorted({(each.options.__module__, each.options.__name__) for each in methods})
    imports = [
        *(f"from {module} import {name}\n" for module, name in options),
        "from lowtide.methods.method import Method\n",
        "from lowtide.rollout.judges import BasePairwiseJudge\n",
        "from lowtide.run.options.training import TrainingConfig\n",
        "from lowtide.trainers.method import MethodTrainer\n",
        "from lowtide.trainers.reference import ReferenceTrainer\n",
    ]
    parts += sorted(imports, key=lambda line: line.split()[1])
    parts += ["\nRewarding = str | nn.Module | Callable[..., Any]\n"]
    parts += ["\ndef trainer_class(method: Method) -> type[MethodTrainer]: ...\n"]
    parts += [_config(SHARED, "TrainingConfig", choices_of(TrainingConfig))]
    named = [named_alone(method) for method in methods]
    of_all = frozenset[str].intersection(*named)
    parts += [_dictionary("Arguments", "TypedDict", of_all | OF_ALL)]
    dictionaries: dict[frozenset[str], str] = {}
    for method, names in zip(methods, named, strict=True):
        if names not in dictionaries:
            dictionaries[names] = f"{public_name(method)}Arguments"
            parts += [_dictionary(dictionaries[names], "Arguments", names - of_all)]
    ways = [
        (_kind(method), *positional(method), dictionaries[names]) for method, names in zip(methods, named, strict=True)
    ]
    first = {way: method for method, way in reversed([*zip(methods, ways, strict=True)])}
    parts += [_way(first[way], way[-1]) for way in dict.fromkeys(ways)]
    parts += [_classes(method, f"_As{public_name(first[way])}") for method, way in zip(methods, ways, strict=True)]
    return laid_out("".join(parts))


def laid_out(text: str) -> str:
    """A stub's text in lines that fit, as ruff breaks them."""
    words = [sys.executable, "-m", "ruff", "format", "--stdin-filename", str(STUB), "-"]
    return subprocess.run(words, input=text, capture_output=True, text=True, check=True).stdout


def positional(method: Method) -> list[str]:
    """The arguments that scripts give by position: `args`, and those before it."""
    names = [*signature_of(method).parameters]
    return names[: names.index("args") + 1]


def named_alone(method: Method) -> frozenset[str]:
    """The other arguments, without `older`: editors should not offer those."""
    return frozenset(signature_of(method).parameters) - {*positional(method), "older"}


def _dictionary(name: str, base: str, names: Iterable[str]) -> str:
    return "\n".join(
        [
            f"\nclass {name}({base}, total=False):",
            *([f"    {each}: {TYPES.get(each, 'Any')}" for each in sorted(names)] or ["    pass"]),
            "",
        ]
    )


def _kind(method: Method) -> str:
    return "ReferenceTrainer" if method.compares else "MethodTrainer"


def _way(method: Method, arguments: str) -> str:
    """How a trainer is made: one class for all methods whose trainers take the same arguments."""
    lines = [f"\nclass _As{public_name(method)}({_kind(method)}):", "    def __init__(", "        self,"]
    parameters = signature_of(method).parameters
    for name in positional(method):
        default = "" if parameters[name].default is inspect.Parameter.empty else " = ..."
        lines.append(f"        {name}: {TYPES.get(name, 'Any')}{default},")
    return "\n".join([*lines, f"        **named: Unpack[{arguments}],", "    ) -> None: ...", ""])


def _classes(method: Method, way: str) -> str:
    config = _config(f"{public_name(method)}Config", f"{method.options.__name__}, {SHARED}", choices_of(method.options))
    return f"{config}\nclass {public_name(method)}Trainer({way}): ...\n"


def _config(name: str, bases: str, choices: Mapping[str, str]) -> str:
    """A class of options, of which those with choices are declared anew."""
    lines = [f"    {option}: {kind} = ..." for option, kind in choices.items()]
    return "\n".join([f"\n@dataclass(kw_only=True)\nclass {name}({bases}):{'' if lines else ' ...'}", *lines, ""])


def choices_of(config: type) -> dict[str, str]:
    """By option whose values are a few words, its type; where a path of one's own may stand among them, any text is
    right. What `transformers.TrainingArguments` has too may be a member of an enumeration there."""
    there = {name: each for name, each in options_of(config).items() if each.choices and PATH not in each.choices}
    return {name: " | ".join([_kinds(each), *enumerations().get(name, ())]) for name, each in there.items()}


@functools.cache
def enumerations() -> dict[str, tuple[str, ...]]:
    """By option of `TrainingArguments`, the enumerations whose members it takes."""
    kinds = get_type_hints(TrainingArguments)
    return {
        each.name: tuple(
            kind.__name__ for kind in get_args(kinds[each.name]) if isinstance(kind, type) and issubclass(kind, Enum)
        )
        for each in fields(TrainingArguments)
    }


def _kinds(option: Option) -> str:
    words = f"Literal[{', '.join(map(json.dumps, option.choices))}]"
    written = {str: words, list: f"list[{words}]", bool: "bool", int: "int", float: "float", NoneType: "None"}
    return " | ".join(text for kind, text in written.items() if kind in option.kinds)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    STUB.write_text(stub())
    TABLE.write_text(table({name: declared_options(name) for name in METHODS}))
