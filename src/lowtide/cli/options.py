"""Options on the command line: an argument each, whose text `lowtide.option_values` converts."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from lowtide.cli.endings import UsageError
from lowtide.compat.argparse import Arguments
from lowtide.option_values import WORDS, Option

MOST_CHOICES = 5
"""With more, an option's help lists them, and not its usage."""


def whole_number(least: int = 1, why: str = ",") -> Callable[[str], int]:
    """The type of an argument that is a whole number.

    Args:
        least: that it may be.
        why: it may not be less, as the rest of the sentence has it.
    """

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"must be a whole number from {least} on{why} not {text!r}")
        return int(text)

    return read


def add_options(parser: Arguments, options: Iterable[Option], *, shown: bool = True) -> None:
    """Add options to an argument parser, which collects their text; `read_options` converts it."""
    for option in options:
        settings: dict[str, Any] = {"dest": option.name, "default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
        if option.is_switch:
            parser.add_argument(f"--no_{option.name}", action="store_const", const="false", **settings)
            settings |= {"nargs": "?", "const": "true"}
        elif list in option.kinds:
            settings |= {"nargs": "+"}
        for alias in option.aliases:
            parser.add_argument(f"--{alias}", **settings)
        if shown:
            settings |= {"help": _help(option).replace("%", "%%"), "metavar": _metavar(option)}
        parser.add_argument(f"--{option.name}", **settings)


def read_options(arguments: argparse.Namespace, options: Mapping[str, Option]) -> dict[str, Any]:
    """The values of the options that a command line gives.

    Raises:
        UsageError: a value is none of its option's; names the option.
    """
    values = {}
    for name, value in vars(arguments).items():
        if name in options:
            one = isinstance(value, list) and len(value) == 1
            try:
                values[name] = options[name].convert(value[0] if one else value)
            except ValueError as error:
                raise UsageError(f"--{error}") from None
    return values


def words_of(values: Mapping[str, Any], options: Mapping[str, Option]) -> list[str]:
    """Options as a command line has them, quoted for a shell; `read_options` reads them back."""
    words = []
    for name, value in values.items():
        words.append(f"--{name}")
        if value is True and name in options and options[name].is_switch:
            continue
        words += [shlex.quote(_word(each)) for each in (value if isinstance(value, list) else [value])]
    return words


def _word(value: Any) -> str:
    if isinstance(value, dict):
        return json.dumps(value)
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _help(option: Option) -> str:
    text = option.help if len(option.help) < 120 else option.help.split(". ")[0]
    if len(option.choices) > MOST_CHOICES:
        text += f" Of {', '.join(option.choices)}."
    if option.range is not None and str(option.range) != "finite":
        text = f"{text.rstrip('.')} ({option.range})."
    return text if option.default in (None, "", []) else f"{text} [{_text(option.default)}]"


def _metavar(option: Option) -> str:
    if option.choices and len(option.choices) <= MOST_CHOICES:
        return "{" + ",".join(option.choices) + "}"
    kind = next(kind for kind in WORDS if kind in option.kinds)
    return {int: "N", float: "X", bool: "BOOL", dict: "JSON", list: "NAME"}.get(kind, "TEXT")


def _text(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)
