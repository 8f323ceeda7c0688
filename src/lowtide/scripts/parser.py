"""`TrlParser`: dataclasses from a command line and, beneath it, a YAML file whose `env:` sets environment variables."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Iterable, Mapping
from types import NoneType
from typing import Any, get_args

from lowtide.compat.argparse import actions_of, options_of, parsers_beneath
from lowtide.compat.transformers import FieldParser
from lowtide.option import PATH
from lowtide.parsing import yaml_options
from lowtide.process.environment import set_environment

FOR_ARGPARSE = ("help", "choices", "aliases", "metavar")
"""What of a field's metadata argparse knows."""


class TrlParser(FieldParser):
    """TRL's parser of this name: `transformers.HfArgumentParser`, and a file of options.

    `--config run.yaml` gives the defaults that the command line overrides. `none` and `null` are None where an option
    may be None and takes no text.

    Args:
        dataclass_types: one dataclass, or several, whose fields are the options.
        kwargs: of `argparse.ArgumentParser`.

    Raises:
        ValueError: a dataclass has a field `config`, which is the file's.
    """

    def __init__(self, dataclass_types: Any = None, **kwargs: Any) -> None:
        types = [] if dataclass_types is None else dataclass_types
        types = list(types) if isinstance(types, Iterable) else [types]
        for each in types:
            if "config" in {field.name for field in dataclasses.fields(each)}:
                raise ValueError(f"{each.__name__} has a field `config`, which names the YAML file: rename the field")
        super().__init__(types, **kwargs)

    def add_field(self, parser: Any, field: Any) -> None:
        known = {name: value for name, value in field.metadata.items() if name in FOR_ARGPARSE}
        if PATH in known.get("choices", ()):  # argparse takes choices alone, and the config looks at the path
            del known["choices"]
        names = known.get("aliases", ())
        if names:
            names = [names] if isinstance(names, str) else names
            known["aliases"] = [name if name.startswith("-") else f"--{name}" for name in names]
        if "help" in known:  # argparse formats it
            known["help"] = known["help"].replace("%%", "%").replace("%", "%%")
        kinds = set(get_args(field.type))
        plain = dataclasses.field(default=field.default, default_factory=field.default_factory, metadata=known)
        plain.name, plain.type = field.name, field.type
        super().add_field(parser, plain)
        action = options_of(parser)[f"--{field.name}"]
        if kinds == {bool, NoneType} and action.nargs is None:
            action.nargs, action.const = "?", True  # `--bf16` alone, as any other switch
        if NoneType in kinds and not kinds & {str, list} and action.choices is None:
            action.type = _or_none(action.type)

    def parse_args_and_config(
        self,
        args: Iterable[str] | None = None,
        return_remaining_strings: bool = False,
        fail_with_unknown_args: bool = True,
        separate_remaining_strings: bool = False,
    ) -> tuple[Any, ...]:
        """An instance of each dataclass, from the command line and the file of `--config`.

        Args:
            args: the command line; by default this program's.
            return_remaining_strings: return what no option takes as a last item: a list of words.
            fail_with_unknown_args: refuse keys of the file that are no option.
            separate_remaining_strings: return the words that the file and the command line leave as two lists.

        Raises:
            ValueError: the file is no mapping, its `env` is none, or a key is unknown.
        """
        words, path = _without_config(list(sys.argv[1:] if args is None else args))
        left = [] if path is None else self.set_defaults_with_config(**_read(path))
        found = self.parse_args_into_dataclasses(words, return_remaining_strings=return_remaining_strings)
        if return_remaining_strings:
            *made, rest = found
            return (*made, left, rest) if separate_remaining_strings else (*made, left + rest)
        if left and fail_with_unknown_args:
            raise ValueError(
                f"{path} has the keys {', '.join(word[2:] for word in left[::2])}, which are no options of this "
                "script: remove them, or pass fail_with_unknown_args=False"
            )
        return found

    def parse_yaml_file(self, yaml_file: Any, allow_extra_keys: bool = False) -> tuple[Any, ...]:
        """As `transformers.HfArgumentParser`'s, but that the file is read as that of `--config` is."""
        values = {str(each.key): each.value for each in yaml_options(yaml_file)}
        return self.parse_dict(values, allow_extra_keys=allow_extra_keys)

    def set_defaults_with_config(self, **values: Any) -> list[str]:
        """Sets defaults, in subcommands too; an option that has one is not required.

        Returns:
            what no option takes, as words of a command line.
        """
        used = _set_defaults(self, values)
        return [word for name, value in values.items() if name not in used for word in (f"--{name}", str(value))]


def _set_defaults(parser: argparse.ArgumentParser, values: Mapping[str, Any]) -> set[str]:
    used: set[str] = set()
    for action in actions_of(parser):
        for each in parsers_beneath(action):
            used |= _set_defaults(each, values)
        if action.dest in values:
            action.default, action.required = values[action.dest], False
            used.add(action.dest)
    return used


def _or_none(convert: Any) -> Callable[[str], Any]:
    """A conversion that also knows the words for None."""

    def converted(text: str) -> Any:
        return None if text.lower() in ("none", "null") else convert(text)

    converted.__name__ = getattr(convert, "__name__", "value")  # argparse names it in its errors
    return converted


def _without_config(words: list[str]) -> tuple[list[str], str | None]:
    """A command line without its `--config FILE`, and the file."""
    for at, word in enumerate(words):
        if word.startswith("--config="):
            return [*words[:at], *words[at + 1 :]], word.partition("=")[2]
        if word == "--config":
            if at + 1 == len(words):
                raise ValueError("--config is the last word: a YAML file must follow it")
            return [*words[:at], *words[at + 2 :]], words[at + 1]
    return words, None


def _read(path: str) -> dict[str, Any]:
    """The options of a YAML file; its environment variables are set."""
    values = {str(each.key): each.value for each in yaml_options(path)}
    set_environment(values.pop("env", None), path)
    return values
