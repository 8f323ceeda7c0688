"""Options from dataclasses: a field is an option, and its type hint says what it takes.

Values come from a command line as text, and from YAML as whatever YAML makes of them (`2e-5` is text there, `no` a
boolean); one conversion by the field's type hint makes both the same. `transformers.HfArgumentParser` knows fewer
types and no `none`, and lets YAML's values through unconverted.
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import json
from collections.abc import Callable, Iterable, Mapping
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from lowtide.cli.main import UsageError
from lowtide.spelling import nearest

MOST_CHOICES = 5
"""With more, an option's help lists them, and not its usage."""


@dataclasses.dataclass(frozen=True)
class Option:
    """One option: a dataclass field that text can express."""

    name: str
    kinds: frozenset[type]
    """Of None, bool, int, float, dict, str and list those that it takes."""
    default: Any
    help: str
    choices: tuple[str, ...]
    """The only values; empty where any of its kinds will do."""
    aliases: tuple[str, ...] = ()
    """Other names of it."""

    @classmethod
    def of(cls, field: dataclasses.Field, hint: Any) -> Option:
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        members = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        enums = [each for each in members if isinstance(each, type) and issubclass(each, enum.Enum)]
        kinds = {str if each in enums else get_origin(each) or each for each in members} & CONVERTERS.keys()
        choices = field.metadata.get("choices") or [member.value for each in enums for member in each]
        text = " ".join(str(field.metadata.get("help") or "").replace("%%", "%").split())
        aliases = tuple(field.metadata.get("aliases", ()))
        return cls(field.name, frozenset(kinds), plain(default), text, tuple(choices), aliases)

    @property
    def is_switch(self) -> bool:
        """Whether the bare option means true."""
        return bool in self.kinds and (str not in self.kinds or isinstance(self.default, bool))

    def convert(self, value: Any) -> Any:
        """The value that the field takes, from text or from what YAML made of it.

        Raises:
            UsageError: it is none; says what would be.
        """
        if value is False and "no" in self.choices:
            value = "no"  # which YAML takes for a boolean
        if value is None and self.default == "none":
            value = "none"  # a word of this option's own
        if value in self.choices or (isinstance(value, str) and value == self.default):
            return value
        for kind, convert in CONVERTERS.items():
            if kind in self.kinds and not (self.choices and kind is str):
                try:
                    return convert(value)
                except (TypeError, ValueError):
                    continue
        near = nearest(str(value), self.choices)
        raise UsageError(f"{self.name} is {value!r}; it must be {self.expects()}{near}")

    def expects(self) -> str:
        """What the option takes, in words."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        return " or ".join(words for kind, words in WORDS.items() if kind in self.kinds)


def options_of(config: type) -> dict[str, Option]:
    """The options of a dataclass, by name; a field that only an object can fill is none."""
    hints = get_type_hints(config)
    options = (Option.of(field, hints[field.name]) for field in dataclasses.fields(config) if field.init)
    return {option.name: option for option in options if option.kinds - {NoneType}}


def add_options(parser: argparse._ActionsContainer, options: Iterable[Option], *, shown: bool = True) -> None:
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
            except UsageError as error:
                raise UsageError(f"--{error}") from None
    return values


def plain(value: Any) -> Any:
    """The value of an enumeration's member; others as they are."""
    return value.value if isinstance(value, enum.Enum) else value


def _help(option: Option) -> str:
    text = option.help if len(option.help) < 120 else option.help.split(". ")[0]
    if len(option.choices) > MOST_CHOICES:
        text += f" Of {', '.join(option.choices)}."
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


# -- conversions: TypeError or ValueError where the value is none of the kind -----------------------------------------


def _none(value: Any) -> None:
    if value is not None and str(value).lower() not in ("none", "null"):
        raise ValueError


def _bool(value: Any) -> bool:
    word = str(value).lower()
    if word not in ("true", "yes", "on", "1", "false", "no", "off", "0"):
        raise ValueError
    return word in ("true", "yes", "on", "1")


def _int(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise TypeError
    return int(value)


def _float(value: Any) -> float:
    if isinstance(value, bool):
        raise TypeError
    return float(value)


def _dict(value: Any) -> dict:
    value = json.loads(value) if isinstance(value, str) else value
    if not isinstance(value, dict):
        raise TypeError
    return value


def _str(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise TypeError
    return str(value)


def _list(value: Any) -> list[Any]:
    if value is None or isinstance(value, dict):
        raise TypeError
    values = value if isinstance(value, list) else [value]
    return [each if isinstance(each, dict) else str(each) for each in values]


CONVERTERS: dict[type, Callable[[Any], Any]] = {
    NoneType: _none,
    bool: _bool,
    int: _int,
    float: _float,
    dict: _dict,
    str: _str,
    list: _list,
}
"""The narrow kinds first: any text would do for `str`."""
WORDS: dict[type, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    dict: "a mapping (JSON on the command line)",
    str: "text",
    list: "a list",
    NoneType: "none",
}
