"""What callbacks and subclasses read off a trainer of TRL: its options as attributes."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, NoReturn

OPTIONS = (
    *("alpha", "beta", "cpo_alpha", "desirable_weight", "f_alpha_divergence_coef", "f_divergence_type"),
    *("label_smoothing", "ld_alpha", "loss_type", "loss_weights", "max_completion_length", "max_length"),
    *("max_prompt_length", "precompute_ref_log_probs", "simpo_gamma", "undesirable_weight", "use_weighting"),
)
"""Options that are attributes of the trainers whose config has them."""


class OptionAttribute:
    """An option of a trainer's config, read from the trainer; objectives are made of it, so it cannot be set later."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, trainer: Any, owner: Any = None) -> Any:
        return self if trainer is None else getattr(trainer.args, self.name)

    def __set__(self, trainer: Any, value: Any) -> NoReturn:
        raise AttributeError(
            f"{self.name} is an option of {type(trainer).__name__}, fixed when the trainer is made: pass "
            f"{trainer.config.__name__}({self.name}={value!r})"
        )


def set_options(kind: Any) -> None:
    """Makes options of a trainer's config attributes of its class."""
    known = {each.name for each in fields(kind.config)}
    for name in (each for each in OPTIONS if each in known):
        setattr(kind, name, OptionAttribute(name))
