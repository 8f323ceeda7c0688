"""Rewards by name: a built-in one, a function by its dotted path, or a model's folder or hub name."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from lowtide.rollout.rewards import builtin, published
from lowtide.spelling import nearest
from lowtide.users_functions import find_function

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
