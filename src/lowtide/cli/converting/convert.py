"""`lowtide convert FILE`: a run of Axolotl or LLaMA-Factory as a run file of lowtide."""

from __future__ import annotations

import argparse
import functools
import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from lowtide.cli.converting.axolotl import axolotl
from lowtide.cli.converting.llama_factory import llama_factory
from lowtide.cli.endings import UsageError
from lowtide.cli.new_file import write_new
from lowtide.cli.training.launch import OF_LAUNCHER
from lowtide.compat.argparse import Subparsers
from lowtide.escaping import shown
from lowtide.methods import METHODS
from lowtide.option_values import Option
from lowtide.parsing import parse_yaml
from lowtide.planner.answers.translated import Translated

FIRST = ("model", "dataset", "datasets", "columns", "output_dir")
"""Options that a run file begins with."""
SUMMARY = "write a run of Axolotl or LLaMA-Factory as a run file, naming what it leaves out"


def add_parser(subparsers: Subparsers) -> None:
    """Add the subcommand to `lowtide`'s parser."""
    parser = subparsers.add_parser(
        "convert",
        help=SUMMARY,
        description="Read a YAML file of Axolotl or LLaMA-Factory, and write the same run in lowtide's words. What "
        "lowtide has no word for is named in the file, and printed.",
        allow_abbrev=False,
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="the YAML file of the other trainer")
    parser.add_argument("--output", type=Path, metavar="RUN.yaml", help="where to write (default: run.yaml)")
    parser.set_defaults(run=run)


@dataclass(frozen=True)
class Converted:
    """A run in the words of lowtide."""

    trainer: str
    """Whose it was."""
    method: str
    values: Mapping[str, Any]
    lacks: Mapping[str, str]
    """What is not in it, and what follows."""

    def text(self, source: Path, output: Path) -> str:
        """The run file."""
        head = [f"From {source} of {self.trainer}.", self.command(output)]
        head += ["Not in it:"] if self.lacks else []
        head += [f"- {name}: {why}" for name, why in self.lacks.items()]
        values = {name: _as_typed(value) for name, value in self.values.items()}
        return "".join(f"# {line}\n" for line in head) + yaml.safe_dump(values, sort_keys=False, allow_unicode=True)

    def command(self, output: Path) -> str:
        return f"lowtide {self.method} --config {shlex.quote(str(output))}"


def converted(file: Path) -> Converted:
    """The run of a file of another trainer.

    Raises:
        UsageError: it is no such file, or of a method that lowtide lacks.
        OSError: it cannot be read.
    """
    try:
        found = parse_yaml(file.read_text(encoding="utf-8"))
    except (ValueError, yaml.YAMLError) as error:
        raise UsageError(f"{file}: {error}") from None
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        raise UsageError(f"{file} is no mapping of options")
    if "base_model" in found:
        trainer, translate = "Axolotl", axolotl
    elif found.keys() & {"stage", "finetuning_type", "cutoff_len"}:
        trainer, translate = "LLaMA-Factory", functools.partial(llama_factory, folder=file.parent)
    else:
        raise UsageError(
            f"{file} is of neither Axolotl (`base_model`) nor LLaMA-Factory (`stage`, `finetuning_type`, `cutoff_len`)"
        )
    given = Translated(found)
    try:
        method = translate(given)
    except (AttributeError, KeyError, TypeError, ValueError) as error:  # a mapping where a list is wanted, say
        raise UsageError(f"{file} is not as {trainer} has it: {error}") from error
    if method not in METHODS:
        raise UsageError(f"{file}: {trainer}'s {method} is no method of lowtide, which has {', '.join(METHODS)}")
    return Converted(trainer, method, *_checked(given, _options(method)))


def _checked(given: Translated, options: Mapping[str, Option]) -> tuple[dict[str, Any], dict[str, str]]:
    """The options that the method has, and takes these values of; the others beside what was left out."""
    known = {alias: option for option in options.values() for alias in (option.name, *option.aliases)}
    same = {name: value for name, value in given.left.items() if name in known}
    values, lacks = {}, dict(given.lacks)
    for name, value in {**given.written, **same}.items():
        if name in OF_LAUNCHER:
            values[name] = value
            continue
        option = known.get(name)
        if option is None:
            lacks[_pair(name, value)] = "not of this method"
            continue
        try:
            found = option.convert(value)
        except ValueError as error:
            lacks[_pair(name, value)] = str(error)
        else:
            values[name] = found if isinstance(value, str) else value  # YAML takes 2e-5 for text
    for name, value in given.left.items():
        if name not in same and value not in (None, False, "", [], {}):
            lacks[_pair(name, value)] = "no word for it"
    first = {name: values[name] for name in FIRST if name in values}
    return first | values, lacks


def _as_typed(value: Any) -> Any:
    """`5e-6` in the place of YAML's `5.0e-06`, for the value of an option, which is read from either."""
    digits, _, power = repr(value).partition("e")
    return f"{digits}e{int(power)}" if isinstance(value, float) and digits.lstrip("-").isdigit() and power else value


def _options(method: str) -> Mapping[str, Option]:
    from lowtide.cli.training.train import options_of_command

    return options_of_command(method).options


def _pair(name: str, value: Any) -> str:
    return f"{name} ({value if isinstance(value, str) else json.dumps(value, default=str)})"


def run(arguments: argparse.Namespace) -> int:
    """Write the run file; the exit status.

    Raises:
        UsageError: the file is of no trainer that is known, or the run file is there already.
        OSError: a file cannot be read or written.
    """
    output = Path("run.yaml") if arguments.output is None else arguments.output
    found = converted(arguments.file)
    write_new(output, found.text(arguments.file, output))
    print(shown(f"Written: {output}, a run of `lowtide {found.method}`, from a file of {found.trainer}."))
    for name, why in found.lacks.items():
        print(shown(f"  not in it: {name}: {why}"))
    print(shown(f"Run it: {found.command(output)}"))
    return 0
