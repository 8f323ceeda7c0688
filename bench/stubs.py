"""Writes what is known of the classes that the table of methods makes before they are: `trainers/public.pyi` for
editors and type checkers, and `cli/training/option_table.json`, against which command lines are checked.

python -m bench.stubs           # part of `make docs`
"""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Iterable
from pathlib import Path

from lowtide.cli.training.option_table import TABLE, table
from lowtide.cli.training.train import declared_options
from lowtide.methods import METHODS
from lowtide.methods.method import Method
from lowtide.run.options.configs import public_name
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
}
"""By argument; the others are of any type."""
OF_ALL = {"tokenizer", "model_init"}
"""What all trainers take and no signature names."""


def stub() -> str:
    """The text of the stub."""
    methods = [METHODS[name] for name in METHODS]
    parts = ["# Written by `python -m bench.stubs` from the table of methods.\n\n"]
    parts += ["import os\nfrom collections.abc import Callable, Mapping\nfrom dataclasses import dataclass\n"]
    parts += ["from typing import Any, TypedDict, Unpack\n\n"]
    parts += ["from datasets import Dataset, IterableDataset\nfrom torch import nn\n"]
    parts += ["from transformers import PreTrainedTokenizerBase, TrainingArguments\n\n"]
    options = sorted({(each.options.__module__, each.options.__name__) for each in methods})
    imports = [
        *(f"from {module} import {name}\n" for module, name in options),
        "from lowtide.methods.method import Method\n",
        "from lowtide.run.options.training import TrainingConfig\n",
        "from lowtide.trainers.method import MethodTrainer\n",
        "from lowtide.trainers.reference import ReferenceTrainer\n",
    ]
    parts += sorted(imports, key=lambda line: line.split()[1])
    parts += ["\ndef trainer_class(method: Method) -> type[MethodTrainer]: ...\n"]
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
    return "".join(parts)


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
    return (
        f"\n@dataclass\nclass {public_name(method)}Config({method.options.__name__}, TrainingConfig): ...\n\n"
        f"class {public_name(method)}Trainer({way}): ...\n"
    )


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    STUB.write_text(stub())
    TABLE.write_text(table({name: declared_options(name) for name in METHODS}))
