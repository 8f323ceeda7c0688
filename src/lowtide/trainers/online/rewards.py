"""What rewards the completions of a run, from what a user handed the trainer."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, cast

from torch import nn
from transformers import PreTrainedTokenizerBase

from lowtide.engine.adapters import adapter_of
from lowtide.engine.forward import causal_model
from lowtide.engine.heads.head import Head
from lowtide.engine.heads.token_value import TokenValue, WithValues
from lowtide.engine.heads.value import Value
from lowtide.engine.weights.loading import load_model
from lowtide.methods.online.rollouts import RewardedOptions, RolloutOptions
from lowtide.rollout.environments import Environments
from lowtide.rollout.judges import JudgedPairs
from lowtide.rollout.rewards.models import RewardModelOptions
from lowtide.rollout.rewards.rewards import NoRewards, Rewards
from lowtide.run.engine import cut
from lowtide.run.streamed_weights import stream_frozen, wants_stream

logger = logging.getLogger(__name__)

OLDER = {"reward_model": "reward_funcs", "reward_processing_class": "reward_processing_classes"}
"""Arguments of an older TRL, and what they are called by now."""
OF_REWARDS = ("reward_funcs", "reward_processing_classes", "environment_factory", "judge", *OLDER)
"""Arguments of the trainer that say how completions are rewarded."""


def make_rewards(
    given: dict[str, Any], args: RolloutOptions, tokenizer: PreTrainedTokenizerBase | None, title: str
) -> Rewards | JudgedPairs | NoRewards:
    """What rewards completions.

    Args:
        given: the arguments `OF_REWARDS`; older names are replaced in it.
        title: the trainer's name.

    Raises:
        ValueError: there is nothing, or two things that exclude each other.
    """
    if not isinstance(args, RewardedOptions):
        return NoRewards()
    for older, name in OLDER.items():
        value = given.pop(older, None)
        if value is not None and given[name] is not None:
            raise ValueError(f"{title}: {older} is the older name of {name}, and both came: keep {name}")
        given[name] = given[name] if value is None else value
    if given["reward_funcs"] is None:
        given["reward_funcs"] = getattr(args, "reward_model_path", None)
    if given["judge"] is not None:
        return _judge(given, args, title)
    if given["reward_funcs"] is None:
        return _environment_rewards(given["environment_factory"], args, title)
    made = Rewards(
        given["reward_funcs"],
        weights=args.reward_weights,
        processing_classes=given["reward_processing_classes"],
        timeout=args.reward_timeout,
        models=RewardModelOptions(
            policy_tokenizer=cast(PreTrainedTokenizerBase, tokenizer),
            chat_template_kwargs=cast(Any, args.chat_template_kwargs or {}),
        ),
    )
    config: Any = args
    if config.sharding.cuts_weights:
        made.cut(lambda model: cut(model, config))
    if wants_stream(config):
        for each in made.reward_models:
            stream_frozen(each.model.requires_grad_(False), config, what="a reward model")
    return made.to(config.device)


def start_value_head(head: type[Head], model: nn.Module, value_model: Any) -> None:
    """Takes the weights of a value model for the start of the policy's value head.

    Args:
        value_model: a classifier with one label, or its name; None leaves the head as it is.

    Raises:
        ValueError: the method has no value function, or the head is of another size.
    """
    if value_model is None:
        return
    if not issubclass(head, WithValues):
        raise ValueError("value_model is the start of a value function, which this method does not have: leave it out")
    if isinstance(value_model, str):
        value_model = load_model(value_model, head=Value)
    with adapter_of(model, TokenValue):
        head.begin_from(causal_model(model), value_model)
    logger.warning("value_model: its head is where the policy's value head starts; the rest of it is not used")


def _judge(given: Mapping[str, Any], args: RewardedOptions, title: str) -> JudgedPairs:
    if args.completions_of_row != 2:
        raise ValueError(f"{title}: judge compares two completions, which this method does not: pass reward_funcs")
    if given["reward_funcs"] is not None:
        raise ValueError(f"{title}: judge and reward_funcs both say which completion is better: keep one of them")
    for name in ("missing_eos_penalty", "reward_weights"):
        if getattr(args, name, None) is not None:
            raise ValueError(
                f"{title}: {name} changes rewards, and a judge gives none: leave it out, or pass reward_funcs"
            )
    return JudgedPairs(given["judge"], args.reward_timeout)


def _environment_rewards(factory: Any, args: RewardedOptions, title: str) -> Rewards:
    """The rewards that environments give themselves."""
    if factory is None:
        raise ValueError(
            f"No reward source provided: {title} needs `reward_funcs`: a function of prompts and completions that "
            "returns a number for each completion, a reward model, or the name of one"
        )
    found = Environments(factory).rewards()
    if not found:
        raise ValueError(
            "there is nothing to reward completions by: pass reward_funcs, or give the environments a get_reward"
        )
    return Rewards(list(found.values()), names=list(found), weights=args.reward_weights, timeout=args.reward_timeout)
