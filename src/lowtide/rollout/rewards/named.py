"""Rewards by name: a built-in one, a function by its dotted path, or a model's folder or hub name."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from lowtide.rollout.rewards import builtin, published
from lowtide.spelling import nearest

BUILTIN: dict[str, Callable[..., Any]] = {
    "exact_answer": builtin.exact_answer,
    "format": builtin.format_reward,
    "length": builtin.length_reward,
    "accuracy_reward": published.accuracy_reward,
    "reasoning_accuracy_reward": published.reasoning_accuracy_reward,
    "think_format_reward": published.think_format_reward,
    "get_soft_overlong_punishment": published.get_soft_overlong_punishment(1280, 256),
    "get_repetition_penalty_reward": published.get_repetition_penalty_reward(),
}
"""The built-in rewards by the names that a command line takes; those of TRL's script among them, with its numbers."""
NEEDS_MATH = {"accuracy_reward", "reasoning_accuracy_reward"}


def is_model_name(name: str) -> bool:
    """Whether a text names a model: a folder, or what has an owner as on the hub."""
    return os.path.isdir(name) or "/" in name


def find_reward(name: str) -> Callable[..., Any]:
    """The reward function of a name that is no model's.

    Args:
        name: of `BUILTIN`, or the path to a function, `my_module.my_reward`; modules are looked for in the current
            folder too.

    Raises:
        ValueError: there is none; says where it was looked for.
    """
    if name in BUILTIN:
        if name in NEEDS_MATH and find_spec("math_verify") is None:
            raise ValueError(f"reward {name!r} needs the package math-verify: pip install math-verify")
        return BUILTIN[name]
    if "." not in name:
        raise ValueError(
            f"reward {name!r} is not built in (there are {', '.join(BUILTIN)}{nearest(name, BUILTIN)}), no folder of a "
            "model here, and no path of a function such as my_module.my_reward"
        )
    return find_function(name, "reward")


def find_function(path: str, title: str) -> Callable[..., Any]:
    """What can be called at a dotted path, `my_module.my_function`; modules are looked for in the current folder too.

    Args:
        title: what messages call it.

    Raises:
        ValueError: there is none; says where it was looked for.
    """
    module_name, _, attribute = path.rpartition(".")
    if not module_name:
        raise ValueError(f"{title} {path!r} is no path of a function such as my_module.my_function")
    module = _import(module_name, f"{title} {path!r}")
    found = getattr(module, attribute, None)
    if found is None:
        raise ValueError(
            f"{title} {path!r}: module {module_name!r} ({getattr(module, '__file__', 'built in')}) has no "
            f"{attribute!r}{nearest(attribute, vars(module))}"
        )
    if not callable(found):
        raise ValueError(f"{title} {path!r} is a {type(found).__name__}, which cannot be called")
    return found


def _import(module: str, title: str) -> Any:
    """A module, that of the current folder before others of its name."""
    folder = os.getcwd()
    sys.path.insert(0, folder)
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise ValueError(f"{title}: importing {module!r} failed: {error}") from error
        raise ValueError(
            f"{title}: there is no module {module!r}, neither installed nor as a file in {folder}"
        ) from error
    except Exception as error:
        raise ValueError(f"{title}: importing {module!r} failed with {type(error).__name__}: {error}") from error
    finally:
        sys.path.remove(folder)
