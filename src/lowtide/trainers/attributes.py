"""What callbacks and subclasses read off a trainer of TRL: its options as attributes, and what follows from them."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, ClassVar, NoReturn

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


class TrainerAttributes:
    """Of a trainer with a config, an objective and a tokenizer."""

    config: ClassVar[type]
    args: Any
    inner_objective: Any
    tokenizer: Any
    is_encoder_decoder: ClassVar[bool] = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "config" in vars(cls):
            known = {each.name for each in fields(cls.config)}
            for name in (each for each in OPTIONS if each in known):
                setattr(cls, name, OptionAttribute(name))

    @property
    def aux_loss_enabled(self) -> bool:
        """Whether the load-balancing loss of a mixture of experts is a part of the loss."""
        return self.inner_objective.aux_coefficient != 0

    @property
    def router_aux_loss_coef(self) -> float:
        """Its weight."""
        return self.inner_objective.aux_coefficient

    @property
    def padding_value(self) -> int | None:
        """The tokenizer's padding token; batches have no padding."""
        return None if self.tokenizer is None else self.tokenizer.pad_token_id
