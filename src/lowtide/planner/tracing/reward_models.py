"""The reward models of a run whose policy writes: their weights beside the policy, and a forward over completions.

A reward that is a function holds nothing that a trace could know of. A reward model reads texts with its own tokenizer;
here its tokens are as many as the policy's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from lowtide.compat.torch import without_modes
from lowtide.engine.forward import causal_model, install
from lowtide.engine.heads.classes import TOKEN_CLASSIFIERS, TokenClasses
from lowtide.engine.heads.head import Head
from lowtide.engine.heads.value import Value
from lowtide.planner.tracing.described_model import DescribedModel, config_of_model
from lowtide.planner.tracing.trace import REWARD, StorageTrace
from lowtide.rollout.rewards.models import Group, RewardModelOptions, microbatches, values_at_ends
from lowtide.rollout.rewards.named import is_model_name

TOKENS = RewardModelOptions.tokens_per_microbatch
"""Most tokens of a reward model's forward."""


@dataclass(frozen=True)
class DescribedRewards:
    """The reward models among what rewards completions."""

    models: tuple[DescribedModel, ...] = ()
    notes: tuple[str, ...] = ()
    """What is not counted."""

    @classmethod
    def of(cls, reward_funcs: Any) -> DescribedRewards:
        """Those among functions, reward models, their configs, and names of all of these.

        Raises:
            ValueError: there is no model under a name.
        """
        models, notes = [], []
        for each in reward_funcs if isinstance(reward_funcs, list | tuple) else [reward_funcs]:
            found = _described(each)
            if isinstance(found, str):
                notes.append(found)
            elif found is not None:
                models.append(found)
        return cls(tuple(models), tuple(notes))


NO_REWARD_MODELS = DescribedRewards()


def _described(reward: Any) -> DescribedModel | str | None:
    """A reward model, or why it is not counted; None of a function."""
    if isinstance(reward, str) and is_model_name(reward):
        reward = config_of_model(reward)
    if isinstance(reward, nn.Module):
        try:
            inner: PreTrainedModel = causal_model(reward)
        except ValueError:
            return f"reward model {type(reward).__name__} is not counted: it is no transformers model"
        config, dtype = inner.config, inner.dtype
    elif isinstance(reward, PretrainedConfig):
        config, dtype = reward, getattr(reward, "dtype", None) or torch.float32
    else:
        return None
    if getattr(config, "quantization_config", None) is not None:
        return f"reward model {config.name_or_path or config.model_type} is not counted: it is quantized"
    of_steps = any(each in TOKEN_CLASSIFIERS for each in config.architectures or ())
    return DescribedModel(config, dtype, TokenClasses if of_steps else Value)


def make_reward_models(described: Iterable[DescribedModel], trace: StorageTrace) -> list[nn.Module]:
    """The models on tensors without memory."""
    made = []
    for each in described:
        model = each.of_layers(each.layers).eval()
        install(model, padding_free=_head_of(model).why_not(model) is None)
        trace.belongs((*model.parameters(), *model.buffers()), REWARD)
        made.append(model)
    return made


@torch.no_grad()
def reward_completions(
    models: Sequence[nn.Module], prompts: Sequence[Sequence[int]], count: int, most: int, fake: Any
) -> list[Tensor]:
    """The heaviest micro-batch of each model over completions of prompts.

    Args:
        count: completions of a prompt.
        most: tokens of each.
        fake: the mode of tensors without memory.
    """
    places = [range(number * count, (number + 1) * count) for number in range(len(prompts))]
    groups = [Group(prompt, [[1] * most] * count, [*own]) for prompt, own in zip(prompts, places, strict=True)]
    found = []
    for model in models:
        inner: Any = causal_model(model)
        with without_modes():
            head = _head_of(inner)
            parts = microbatches(groups, TOKENS, head.pad_id(inner))
            heaviest = max((part for _, part in parts), key=lambda part: part.tokens)
        runs = head.why_not(inner) is None
        found.append(values_at_ends(model, heaviest.map(fake.from_tensor), head, padding_free=runs))
    return found


def _head_of(model: nn.Module) -> type[Head]:
    """What is read off a reward model: a value of a text, or labels of its steps."""
    return TokenClasses if TokenClasses.why_not(causal_model(model)) is None else Value
