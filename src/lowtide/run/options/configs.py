"""The config class of each method: its own options beside those that all trainers share."""

from __future__ import annotations

import copyreg
import functools
import inspect
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from lowtide.compat.transformers import dict_fields, state_of
from lowtide.methods import METHODS
from lowtide.methods.method import Method
from lowtide.option import Group
from lowtide.option_values import options_of
from lowtide.run.options.training import TrainingConfig
from lowtide.spelling import nearest


def method_named(name: str) -> Method:
    """A method by the name of its command.

    Raises:
        ValueError: there is none; says which there are.
    """
    if name not in METHODS:
        raise ValueError(f"there is no method {name!r}{nearest(name, METHODS)}; there are {', '.join(METHODS)}")
    return METHODS[name]


def method_of(config: Any) -> Method:
    """The method whose config this is, or a subclass of it.

    Raises:
        ValueError: it is of none.
    """
    found = getattr(config, "method", None)
    if not isinstance(found, Method):
        raise ValueError(f"{type(config).__name__} is of no method: give the config of one, SFTConfig say")
    return found


def public_name(method: Method) -> str:
    """`SFT` of `SFTConfig` and `SFTTrainer`."""
    return METHODS.row(method.name).public


@functools.cache
def config_class(method: Method) -> type[TrainingConfig]:
    """The method's config: a dataclass of its options, `TrainingConfig`'s and `transformers.TrainingArguments`'."""
    own = fields(method.options)
    named = {each.name for each in own}
    made: Any = type(
        f"{public_name(method)}Config",
        (method.options, TrainingConfig),
        {
            "__repr__": TrainingConfig.__repr__,
            "__module__": "lowtide",  # where it is found again, by pickle too
            "method": method,
            "_VALID_DICT_FIELDS": [
                *dict_fields(TrainingConfig),
                *(each.name for each in own if "dict" in str(each.type)),
            ],
            "without_effect": {
                **{n: why for n, why in TrainingConfig.without_effect.items() if n not in named},
                **getattr(method.options, "without_effect", {}),
            },
        },
    )
    made = dataclass(made)
    made.__doc__ = _doc(made, method)
    return made


def _doc(config: type[TrainingConfig], method: Method) -> str:
    """What `help` says of a config: its options by group, those of the method itself first, a line each."""
    lines = [f"Options of {method.title}. All are keywords; values are converted and checked when the config is made."]
    options = {name: each for name, each in options_of(config).items() if name not in config.without_effect}
    own = {name for kind in method.options.__mro__ for name in inspect.get_annotations(kind)}
    groups = {method.title: None, **{group.value: group for group in Group}}
    for title, group in groups.items():
        listed = [each for name, each in options.items() if each.group is group and (group or name in own)]
        if listed:
            lines += ["", f"{title}:"] + [f"    {each.name} = {each.default!r}: {each.help}" for each in listed]
    return "\n".join([*lines, "", "Further ones are those of `transformers.TrainingArguments`."])


class ConfigState(NamedTuple):
    """What a config says, without the state of the process that it was made in: it can be pickled, also where its class
    is a subclass that another process does not know."""

    method: str
    state: dict[str, Any]

    @classmethod
    def of(cls, config: Any) -> ConfigState:
        """Of a method's config, or of a subclass of it, whose own fields are left out.

        Raises:
            ValueError: it is of no method.
        """
        method = method_of(config)
        known = {each.name for each in fields(config_class(method))}
        own = {each.name for each in fields(config)} - known
        return cls(method.name, {name: value for name, value in state_of(config).items() if name not in own})

    def config(self) -> TrainingConfig:
        """The config again, of the method's own class."""
        kind = config_class(method_named(self.method))
        made = kind.__new__(kind)
        vars(made).update(self.state)
        return made


copyreg.pickle(Method, lambda method: (method_named, (method.name,)))  # type: ignore[arg-type]
