"""What an option takes: its type hint says the kind of value, its declaration the choices or the range.

Values come from a command line as text, from YAML as whatever YAML makes of them (`2e-5` is text there, `no` a
boolean), and from Python as anything; one conversion makes all of them the same, or refuses them.
`transformers.HfArgumentParser` knows fewer types and no `none`, and lets YAML's values through unconverted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import math
import numbers
import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from lowtide.option import FINITE, PATH, Group, Range
from lowtide.parsing import parse_json, parse_yaml
from lowtide.spelling import nearest

IS_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")
"""A path as Python writes it, of a name in a module."""


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
    range: Range | None = None
    """Of a number, or of the numbers of a list; all finite ones where None."""
    group: Group | None = None
    """Where `--help` lists it. None: with the method's own options, or not at all."""
    items: frozenset[type] = frozenset({str})
    """The kinds of a list's items."""
    literals: tuple[Any, ...] = ()
    """Values that it takes beside those of its kinds."""

    @classmethod
    def of(cls, field: dataclasses.Field, hint: Any, range: Range | None = None) -> Option:
        """The option that a field is, from its type hint and what its declaration says."""
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        members = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        enums = [each for each in members if isinstance(each, type) and issubclass(each, enum.Enum)]
        kinds = {str if each in enums else get_origin(each) or each for each in members} & CONVERTERS.keys()
        choices = field.metadata.get("choices") or [member.value for each in enums for member in each]
        item = next((get_args(each)[0] for each in members if get_origin(each) is list), str)
        items = set(get_args(item) if get_origin(item) in (Union, UnionType) else (item,)) & CONVERTERS.keys()
        return cls(
            name=field.name,
            kinds=frozenset(kinds - {str} if dict in kinds else kinds),
            default=plain(default),
            help=" ".join(str(field.metadata.get("help") or "").replace("%%", "%").split()),
            choices=tuple(choices),
            aliases=tuple(field.metadata.get("aliases", ())),
            range=range,
            items=frozenset(items or {str}),
            literals=tuple(value for each in members if get_origin(each) is Literal for value in get_args(each)),
        )

    @property
    def is_switch(self) -> bool:
        """Whether the bare option means true."""
        return bool in self.kinds and (str not in self.kinds or isinstance(self.default, bool))

    def convert(self, value: Any) -> Any:
        """The value that the field takes, from Python, from text, or from what YAML made of it.

        Raises:
            ValueError: it is none; names the option, and says what would be.
        """
        if value is False and "no" in self.choices:
            value = "no"  # which YAML takes for a boolean
        if value is None and self.default == "none":
            value = "none"  # a word of this option's own
        if value is None and list in self.kinds and self.default == "":
            return self.default  # `debug`, as HfArgumentParser gives a list that is left out
        for each in self.literals:
            if value is each or (isinstance(each, bool) and str(value).lower() == str(each).lower()):
                return each
        if value is self.default:
            return value
        if isinstance(value, str) and (self._chooses(value) or value in self.literals or value == self.default):
            return value
        for kind, convert in CONVERTERS.items():
            if kind not in self.kinds or (self.choices and kind is str):
                continue
            try:
                converted = self._items(value) if kind is list else convert(value)
            except (TypeError, ValueError, OverflowError, OSError):
                continue
            self._check_range(converted, value)
            return converted
        raise self._refusal(value)

    def _items(self, value: Any) -> list[Any]:
        """The items of a list, each of its kind and, where there are any, of the choices."""
        if value is None or isinstance(value, Mapping):
            raise TypeError
        value = _json_list(value)
        items = [self._item(plain(each)) for each in (value if isinstance(value, list | tuple | set) else [value])]
        if self.choices and not all(map(self._chooses, items)):
            raise ValueError
        return items

    def _chooses(self, value: Any) -> bool:
        """Whether a value is one of the choices, or a path where one may stand among them."""
        return value in self.choices or (PATH in self.choices and bool(IS_PATH.fullmatch(str(value))))

    def _item(self, value: Any) -> Any:
        if isinstance(value, Mapping) and dict in self.items:
            return value
        (kind,) = self.items - {dict} or {dict}
        return CONVERTERS[kind](value)

    def _check_range(self, value: Any, given: Any) -> None:
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, int) and abs(each) > LARGEST:
                raise ValueError(f"{self.name}={shown(given)} must be at most {LARGEST}, the largest number of 64 bits")
            if isinstance(each, bool) or not isinstance(each, int | float):
                continue
            held, allowed = in_float32(each), self.range or FINITE
            if held not in allowed or (held == 0 and each not in allowed):  # which may be a negative number
                none = ", or None" if NoneType in self.kinds else ""
                why = allowed.note or self.help.split(". ")[0].rstrip(".")
                finite = "" if math.isfinite(held) or str(allowed) == "finite" else "finite and "
                none += "" if held == each or math.isnan(held) else f", and is {held:g} in float32"
                as_given = given if isinstance(given, str) else repr(given)
                raise ValueError(f"{self.name}={as_given} must be {finite}{allowed}{none}" + f" ({why})" * bool(why))

    def _refusal(self, value: Any) -> ValueError:
        if self.choices:
            items = value if isinstance(value, list | tuple | set) else [value]
            wrong = next((each for each in items if not self._chooses(plain(each))), value)
            near = nearest(str(wrong), self.choices)
            return ValueError(f"{self.name}={value!r} is not one of {', '.join(self.choices)}{near}")
        return ValueError(f"{self.name}={shown(value)} must be {self.expects()}")

    def expects(self) -> str:
        """What the option takes, in words."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        return " or ".join(words for kind, words in WORDS.items() if kind in self.kinds)


@functools.cache
def options_of(config: type) -> Mapping[str, Option]:
    """The options of a dataclass, by name; a field that only an object can fill is none.

    The range of a field is that of its declaration, or of the first class above that declares one; else that of the
    class's `inherited_ranges`, a table for fields whose declarations are another library's; `inherited_literals` has
    values that those take beside what they declare, `inherited_groups` their groups. Else the group is what the
    declaration says, or the `group` of the class that declared the field first.
    """
    hints, table = _hints(config), getattr(config, "inherited_ranges", {})
    literals, groups = getattr(config, "inherited_literals", {}), getattr(config, "inherited_groups", {})
    options = {}
    for field in dataclasses.fields(config):
        if field.init:
            declared = (base.__dict__.get("__dataclass_fields__", {}).get(field.name) for base in config.__mro__)
            ranges = (getattr(each, "range", None) for each in declared)
            found = next((each for each in ranges if each is not None), table.get(field.name))
            made = Option.of(field, hints.get(field.name), found)
            options[field.name] = dataclasses.replace(
                made,
                literals=made.literals + literals.get(field.name, ()),
                group=groups.get(field.name) or getattr(field, "group", None) or _group_of_class(config, field.name),
            )
    return {name: option for name, option in options.items() if option.kinds - {NoneType}}


def _group_of_class(config: type, name: str) -> Group | None:
    """The group of the class that declared a field first."""
    *_, first = (base for base in config.__mro__ if name in vars(base).get("__dataclass_fields__", {}))
    return vars(first).get("group")


def take_values(config: Any, *, leave: Iterable[str] = ()) -> None:
    """Converts the values of a dataclass's fields to what they take.

    Args:
        leave: the names of fields to leave as they are.

    Raises:
        ValueError: a value is none of its option's, or out of its range; names the option.
    """
    leave = set(leave)
    for name, option in options_of(type(config)).items():
        if name not in leave:
            setattr(config, name, option.convert(getattr(config, name)))


def check_ranges(config: Any, *, leave: Iterable[str] = ()) -> None:
    """Refuses numbers that were set on a config after it was made, where they are out of their ranges.

    Args:
        leave: the names of fields not to look at.

    Raises:
        ValueError: naming the option.
    """
    for name, option in options_of(type(config)).items():
        if (option.range is not None or float in option.kinds) and name not in leave:
            option.convert(getattr(config, name))


def in_float32(value: float) -> float:
    """A number, or the 0 or infinity that a computation in float32 takes in its place."""
    if isinstance(value, float) and abs(value) > LARGEST_FLOAT32:
        return math.copysign(math.inf, value)
    return 0.0 if abs(value) < SMALLEST_FLOAT32 else value


def check_flags(option: str, given: object, names: Iterable[str]) -> None:
    """Refuses words and numbers in a mapping's place of true or false, where "no" would be taken for true.

    Args:
        given: the mapping; anything else is left alone.

    Raises:
        ValueError: names the key.
    """
    if isinstance(given, Mapping):
        for name in names:
            if not isinstance(given.get(name), bool | None):
                raise ValueError(f"{option}: {name}={given[name]!r} must be true or false")


def plain(value: Any) -> Any:
    """The value of an enumeration's member; others as they are."""
    return value.value if isinstance(value, enum.Enum) else value


def shown(value: Any) -> str:
    """A value in a message: whole if it is short, else what it is."""
    text = repr(value)
    return text if len(text) <= 80 and "\n" not in text else f"<{type(value).__name__}>"


def _hints(config: type) -> Mapping[str, Any]:
    """Type hints of the fields; those of a subclass whose hints cannot be looked up here are left out."""
    for base in config.__mro__:
        with contextlib.suppress(NameError):
            return get_type_hints(base)
    return {}


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
    whole = int(_number(value))
    if not isinstance(value, str) and whole != value:
        raise ValueError
    return whole


def _float(value: Any) -> float:
    return float(_number(value))


def _number(value: Any) -> Any:
    """A number, one of numpy's too, or text that may be one."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real | str):
        raise TypeError
    return value


def _json_list(value: Any) -> Any:
    """The list of texts or numbers that JSON text holds; other values as they are, `[MASK]` and patterns among them."""
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return value
    try:
        return parse_json(value)
    except ValueError:
        return value


def _dict(value: Any) -> Any:
    """A mapping, from JSON, the path of a JSON file, or `name=value,name=value` too; or an object that holds the same,
    such as a dataclass."""
    if isinstance(value, str) and PAIRS.fullmatch(value):
        value = {name: parse_yaml(each) for name, each in (part.split("=", 1) for part in value.split(","))}
    if isinstance(value, str):
        value = parse_json(value if value.lstrip().startswith("{") else Path(value).read_text(encoding="utf-8"))
    if isinstance(value, type) or not (isinstance(value, Mapping) or dataclasses.is_dataclass(value)):
        raise TypeError
    return value


def _str(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float | os.PathLike):
        raise TypeError
    return value if isinstance(value, str) else os.fspath(value) if isinstance(value, os.PathLike) else str(value)


LARGEST = (1 << 63) - 1
"""The largest whole number that an option takes."""
SMALLEST_FLOAT32, LARGEST_FLOAT32 = 2.0**-149, (2 - 2.0**-23) * 2.0**127
"""What float32, which losses and optimizers compute in, holds apart from 0 and infinity."""
PAIRS = re.compile(r"\w+=[^,={}]*(,\w+=[^,={}]*)*")
"""A mapping on the command line, in the form of transformers' `run_clm.py`."""
CONVERTERS: dict[type, Callable[[Any], Any]] = {
    NoneType: _none,
    bool: _bool,
    int: _int,
    float: _float,
    dict: _dict,
    str: _str,
    list: list,
}
"""The narrow kinds first: any text would do for `str`."""
WORDS: dict[type, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    dict: "a mapping (JSON, or name=value,name=value on the command line)",
    str: "text",
    list: "a list",
    NoneType: "none",
}
