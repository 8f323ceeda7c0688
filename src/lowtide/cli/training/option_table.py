"""The options of each method's command, without the classes that declare them.

The classes are made of `transformers.TrainingArguments`, whose import takes torch's: some three seconds of processor
time, which a mistyped name need not cost. So the options are written down beside this module (`python -m bench.stubs`),
and a command line and its run file are checked against what is written. It holds for the version of transformers that
it was made with; with another one, or for a method that is not in it, the classes themselves are asked.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterable, Mapping
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

from lowtide.option import Group, Range
from lowtide.option_values import CONVERTERS, Option

TABLE = Path(__file__).parent / "option_table.json"
KINDS = {kind.__name__: kind for kind in CONVERTERS}
LISTS_OF_NAMES = ("choices", "aliases", "literals")


@dataclasses.dataclass(frozen=True)
class CommandOptions:
    """What a method's command takes."""

    options: Mapping[str, Option]
    """All of them, by name."""
    listed: Mapping[str, tuple[str, ...]]
    """The names that `--help` explains, by the titles of its groups."""
    refused: tuple[str, ...]
    """Those that are taken and refused, or without effect: `--help` says nothing of them."""
    own: tuple[str, ...]
    """Those that the method declares, or shares with few others."""

    @property
    def others(self) -> list[str]:
        """Those that `--help` only names."""
        known = {*self.refused, *(name for names in self.listed.values() for name in names)}
        return [name for name in self.options if name not in known]


def written_options(method: str) -> CommandOptions | None:
    """The options of a method's command as they are written; None where what is written does not hold."""
    written = _written()
    if written is None or method not in written["methods"]:
        return None
    own = written["methods"][method]
    records = written["options"] | own["differing"]
    return CommandOptions(
        {name: _option(name, records[name]) for name in own["names"]},
        {title: tuple(names) for title, names in own["listed"].items()},
        tuple(own["refused"]),
        tuple(own["own"]),
    )


def whose(name: str) -> str:
    """`: it is of ...`, the methods that declare an option of this name; empty if there is none."""
    written = _written()
    if written is None:
        return import_module("lowtide.run.options.training").whose(name)
    methods = [method for method, each in written["methods"].items() if name in each["own"]]
    return f": it is of {', '.join(methods)}" if methods else ""


def table(commands: Mapping[str, CommandOptions]) -> str:
    """The text of the table: an option that methods have alike is in it once."""
    shared: dict[str, dict[str, Any]] = {}
    methods = {}
    for method, each in commands.items():
        records = {name: _record(option) for name, option in each.options.items()}
        for name, record in records.items():
            shared.setdefault(name, record)
        methods[method] = {
            "listed": each.listed,
            "refused": each.refused,
            "own": each.own,
            "differing": {name: record for name, record in records.items() if record != shared[name]},
            "names": [*records],
        }
    lines = [f'"transformers": {json.dumps(_series(metadata.version("transformers")))}']
    lines += [f'"options": {_by_line(shared)}', f'"methods": {_by_line(methods)}']
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _by_line(entries: Mapping[str, Any]) -> str:
    return "{\n" + ",\n".join(f"{json.dumps(name)}: {json.dumps(each)}" for name, each in entries.items()) + "\n}"


@functools.cache
def _written() -> dict[str, Any] | None:
    """The table; None where it was made with another version of transformers."""
    written = json.loads(TABLE.read_text(encoding="utf-8"))
    try:
        version = metadata.version("transformers")
    except metadata.PackageNotFoundError:
        return None
    return written if written["transformers"] == _series(version) else None


def _series(version: str) -> str:
    """`5.23` of `5.23.1`: a patch has the same options."""
    return ".".join(version.split(".")[:2])


def _record(option: Option) -> dict[str, Any]:
    """An option without its name, and without what is as usual."""
    made = {name: value for name, value in vars(option).items() if value not in ((), None) or name == "default"}
    made["kinds"] = _names(option.kinds)
    made["items"] = _names(option.items)
    if option.range is not None:
        made["range"] = {name: value for name, value in vars(option.range).items() if value not in (None, "")}
    del made["name"]
    return made


def _names(kinds: Iterable[type]) -> list[str]:
    return sorted(kind.__name__ for kind in kinds)


def _option(name: str, record: Mapping[str, Any]) -> Option:
    made = dict(record)
    for kinds in ("kinds", "items"):
        made[kinds] = frozenset(KINDS[each] for each in made[kinds])
    made |= {each: tuple(made.get(each, ())) for each in LISTS_OF_NAMES}
    if "range" in made:
        made["range"] = Range(**made["range"])
    if "group" in made:
        made["group"] = Group(made["group"])
    return Option(name=name, **made)
