"""A run as the commands that only look at it have it: its method, its options, its rows; no weights are loaded."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowtide.cli.adapters import AdapterOptions
from lowtide.cli.main import METHODS, UsageError
from lowtide.cli.options import Option, add_options
from lowtide.cli.train import RunOptions, classes_of, names_of, only, options_for, read_values

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

SHOWN = ("model", "dataset", "max_length", "use_peft", "per_device_train_batch_size", "gradient_accumulation_steps")
"""Options that the help of these commands names; the others are those of the method's own command."""


@dataclass(frozen=True)
class DescribedRun:
    """What a method's own command would run."""

    method: str
    what: RunOptions
    adapters: AdapterOptions
    values: Mapping[str, Any]
    """All options that were given."""
    given: Mapping[str, Any]
    """Those of the method's config."""

    def rows(self) -> Dataset | IterableDataset:
        """The rows to train on."""
        return self.what.load(evaluates=False)[0]

    def tokenizer(self) -> Any:
        """The model's own."""
        from lowtide.engine.loading import load_tokenizer

        revision, trusts = self.what.model_revision, bool(self.values.get("trust_remote_code"))
        return load_tokenizer(self.what.model or "", trust_remote_code=trusts, revision=revision)


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """Add the method, and all options of all methods."""
    parser.add_argument("method", choices=METHODS, metavar="METHOD", help=", ".join(METHODS))
    parser.add_argument("--config", type=Path, metavar="FILE", help="a run file: YAML with options of the run")
    parser.add_argument(
        "--device", metavar="NAME", help="cpu, cuda, or a GPU such as H100-80GB (default: this machine's)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    options: dict[str, Option] = {}
    for method in METHODS:
        options = options_for(classes_of(method)[0]) | options
    add_options(parser.add_argument_group("the run"), [options.pop(name) for name in SHOWN])
    add_options(parser, options.values(), shown=False)
    parser.epilog = "All options of `lowtide METHOD` are taken, and say what is not to be chosen or differs."


def described_run(arguments: argparse.Namespace) -> DescribedRun:
    """The run that a command line describes.

    Raises:
        UsageError: an option is of another method, is missing, or means nothing.
    """
    from lowtide.trainers.config import whose

    config = classes_of(arguments.method)[0]
    options = options_for(config)
    for name in vars(arguments):
        if name not in options and whose(name):
            raise UsageError(f"{arguments.method} has no option --{name}{whose(name)}")
    values = read_values(arguments, options)
    what, adapters = only(RunOptions, values), only(AdapterOptions, values)
    what.check(padding_free=values.get("padding_free", True))
    adapters.check()
    if adapters.load_in_4bit or adapters.load_in_8bit:
        raise UsageError("quantized weights are not traced: leave load_in_4bit and load_in_8bit out, or run the method")
    given = {name: value for name, value in values.items() if name in names_of(config)}
    if what.model_init():
        given["model_init_kwargs"] = what.model_init()
    return DescribedRun(arguments.method, what, adapters, values, given)


def device_of(arguments: argparse.Namespace) -> str:
    """The device that is named; by default this machine's GPU, if it has one."""
    import torch

    return arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
