"""A run as the commands that only look at it have it: its method, its options, its rows; no weights are loaded."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import tempfile
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lowtide.cli.endings import UsageError
from lowtide.cli.options import read_options
from lowtide.cli.training import train
from lowtide.cli.training.run_file import read_run_file
from lowtide.compat.argparse import ArgumentGroup, Subparsers
from lowtide.compat.hub import go_offline_if_unreachable
from lowtide.methods import METHODS

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset
    from rich.table import Table
    from rich.text import Text

    from lowtide.planner.estimate import Estimate


@dataclasses.dataclass(frozen=True)
class DescribedRun:
    """What a method's own command would run."""

    run: train.TrainingCommand
    values: Mapping[str, Any]
    """The options that were given."""
    requested: Mapping[str, Any]
    """Those of the method's config."""
    lengths: str | None = None
    """The lengths of its rows, in the place of a dataset."""
    device: str | None = None
    """Where it would run; None for many places."""

    @property
    def method(self) -> str:
        return self.run.method

    @functools.cached_property
    def model(self) -> str:
        """Its name or folder; of one that begins with random weights a folder of the command's own."""
        if self.run.what.model is not None:
            return self.run.what.model
        if self.lengths is not None:
            raise UsageError("--lengths needs --model: a model that begins with random weights is made for its rows")
        from lowtide.run.inputs.beginning import beginning_of

        return beginning_of(self.run.config(output_dir=self._folder.name), self.rows())

    @functools.cached_property
    def _folder(self) -> tempfile.TemporaryDirectory:
        return tempfile.TemporaryDirectory()

    def written(self) -> dict[str, Any]:
        """What a run file has to say so that this run is run: the options that were given but for access tokens, and
        those that `--lengths` stands for."""
        from lowtide.run.options.secrets import SECRET, without_secrets

        given = without_secrets(
            {name: value for name, value in self.values.items() if name not in {"memory_budget", *SECRET}}
        )
        if self.lengths is None:
            return given
        from lowtide.planner.answers.row_lengths import options_of_lengths, row_lengths

        return given | options_of_lengths(row_lengths(self.lengths, METHODS[self.method]), given)

    def rows(self) -> Dataset | IterableDataset:
        """The rows to train on."""
        return self.run.load(evaluates=False)[0]

    def tokenizer(self) -> Any:
        """The model's own; None where rows are tokens already."""
        from lowtide.engine.weights.loading import load_tokenizer

        if (self.requested.get("dataset_kwargs") or {}).get("skip_prepare_dataset"):
            return None
        trusts = bool(self.values.get("trust_remote_code"))
        return load_tokenizer(self.model, trust_remote_code=trusts, revision=self.run.what.model_revision)

    def inputs(self) -> dict[str, Any]:
        """Options, rows or their lengths, rewards, adapters and quantization, as the functions of `lowtide.planning`
        take them.

        Raises:
            UsageError: there are both rows and lengths.
        """
        own, fp16, bf16 = self.run.adapters, bool(self.requested.get("fp16")), self.requested.get("bf16")
        if bf16 is None:
            bf16 = not fp16 and self._has_bf16()
        return {
            "config": self.requested,
            **self._data(),
            **({"reward_funcs": self.values["reward_funcs"]} if self.values.get("reward_funcs") else {}),
            "peft_config": own.peft_config(),
            "quantization_config": own.quantization_config(bf16=bool(bf16), fp16=fp16),
        }

    def _data(self) -> dict[str, Any]:
        if self.lengths is None:
            return {"dataset": self.rows(), "processing_class": self.tokenizer()}
        if self.run.what.dataset or self.run.what.datasets:
            raise UsageError("--lengths and --dataset both say what a step will see: leave one of them out")
        return {"lengths": self.lengths}

    def _has_bf16(self) -> bool:
        """Whether the device computes in bfloat16 where nobody says otherwise; of no device most GPUs do."""
        from lowtide.planner.devices import device_named

        return self.device is None or device_named(self.device).has_bf16


def add_description(
    subparsers: Subparsers, command: str, method: str | None, description: str
) -> tuple[argparse.ArgumentParser, ArgumentGroup | None]:
    """Add a command that describes a run, with a group for its own options where a method follows it."""
    own, group = train.add_command(subparsers, command, method, description)
    if group is not None:
        names = "cpu, cuda, or a GPU such as H100-80GB (default: what is here)"
        group.add_argument("--device", metavar="NAME", help=names)
        add_lengths(group)
        group.add_argument("--json", action="store_true", help="print JSON")
    return own, group


def add_lengths(group: ArgumentGroup, default: str | None = None) -> None:
    """Add the option that stands for a dataset."""
    asked = f"default: {default}" if default else "in place of --dataset"
    help = f"tokens and number of the rows of a batch: 1024x8, or their parts, 512+256+256x8 ({asked})"
    group.add_argument("--lengths", metavar="TOKENSxROWS", default=default, help=help)


def style_of(fits: bool | None) -> str:
    """How a verdict is shown."""
    return "bold green" if fits else "bold red"


def noted(text: str, style: str = "dim") -> Text:
    """A paragraph, as they stand beneath a table."""
    from rich.text import Text

    return Text(text, style=style)


def of_the_start(estimate: Estimate) -> list[str]:
    """That a run holds most as it starts, in a line; nothing of one that holds more as it trains."""
    from lowtide.memory.allocators.measure import bytes_text

    if estimate.start_bytes < estimate.peak_bytes:
        return []
    return [f"It holds most while it starts: {bytes_text(estimate.start_bytes)} before the first forward."]


def plain_table(title: str) -> Table:
    """A table with a line beneath its head."""
    from rich import box
    from rich.table import Table

    return Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)


def described_run(arguments: argparse.Namespace) -> DescribedRun:
    """The run that a command line describes.

    Raises:
        UsageError: an option is missing, contradicts another, or means nothing.
    """
    _check_names(arguments)
    options = arguments.options
    values = read_run_file(arguments.config, options) if arguments.config else {}
    values |= read_options(arguments, options)
    with tempfile.TemporaryDirectory() as folder:  # nothing is written where the run would write
        run = train.read_run(arguments, has_rows=arguments.lengths is not None, output_dir=folder)
    _reach_hub(run.what.model, run.what.dataset)
    config = train.config_of(run.method)
    given = {name: value for name, value in values.items() if name in train.option_names(config)}
    if run.what.model_init():
        given["model_init_kwargs"] = run.what.model_init()
    one = hasattr(arguments, "device") and not getattr(arguments, "devices", None)
    device = device_of(arguments) if one else None
    return DescribedRun(run, values, given, arguments.lengths, device)


def _reach_hub(model: str | None, dataset: str | None) -> None:
    """Says where the hub cannot be reached that has them; the shapes of well-known models are built in."""
    from lowtide.planner.answers.known_models import known_config

    built_in = model is not None and known_config(model) is not None
    go_offline_if_unreachable([None if built_in else model, dataset])


def _check_names(arguments: argparse.Namespace) -> None:
    """Refuses devices and budgets that are none, before torch is imported."""
    from lowtide.planner.budget import bytes_of, is_auto
    from lowtide.planner.cluster import Cluster
    from lowtide.planner.devices import device_named

    given = vars(arguments)
    if given.get("device"):
        device_named(given["device"])
    if given.get("devices"):
        Cluster.of(given["devices"], 1 if given.get("nodes") is None else given["nodes"])
    if given.get("budget") and not is_auto(given["budget"]):
        bytes_of(given["budget"])


def device_of(arguments: argparse.Namespace) -> str:
    """The device that is named; by default this machine's GPU, if it has one."""
    import torch

    return arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
