"""All rewards of a run: reward functions and reward models, a column each.

Arguments and order are TRL 1.16's: a function gets `prompts`, `completions`, `completion_ids`, the other columns of the
dataset, `trainer_state`, `log_extra`, `log_metric`, and `environments` where there are some; sync functions run one
after the other, async ones together. Unlike there, a function need not take `**kwargs`, and one that raises, hangs
or returns something that is no reward stops the run with its name and the completion's row.
"""

from __future__ import annotations

import copy
import functools
import logging
import math
import reprlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lowtide.objectives.step_rewards import StepRewards
from lowtide.rollout.calls import Caller, name_of
from lowtide.rollout.rewards.completed import Completed
from lowtide.rollout.rewards.functions import FunctionReward, call_functions, nothing
from lowtide.rollout.rewards.models import ModelReward, RewardModelOptions, load_reward_model
from lowtide.rollout.rewards.named import find_reward, is_model_name
from lowtide.rollout.rewards.process_models import ProcessReward, is_process_model
from lowtide.rollout.rewards.scored import Scored, Scorer
from lowtide.users_functions import check_no_file

logger = logging.getLogger(__name__)

Source = FunctionReward | ModelReward


class Rewards(Scorer):
    """What scores completions.

    Args:
        funcs: one or several, each a function (async or not), a callable object, a `functools.partial`, a sequence
            classifier with one label, or the name of any of these: a built-in one (`rewards.named.BUILTIN`), a
            function's dotted path, a model's folder or hub name.
        names: for logs; by default the functions' and models' own, numbered where several are alike.
        weights: of each in a completion's reward; 1 if None.
        processing_classes: the tokenizer of each reward model, None for the one saved beside it and for functions.
        timeout: seconds that each function may take (`reward_timeout`); None for no limit.
        models: how reward models run.

    Raises:
        ValueError: there are none, the lists have other lengths, a name is not found, or a model is no reward model.
    """

    def __init__(
        self,
        funcs: Any,
        *,
        names: Sequence[str] | None = None,
        weights: Sequence[float] | None = None,
        processing_classes: Any = None,
        timeout: float | None = None,
        models: RewardModelOptions | None = None,
    ) -> None:
        if timeout is not None and not (timeout > 0 and math.isfinite(timeout)):
            raise ValueError(f"reward_timeout={timeout} must be a number of seconds above 0, or None for no limit")
        funcs = list(funcs) if isinstance(funcs, list | tuple) else [funcs]
        if not funcs:
            raise ValueError(
                "there is nothing to reward completions by: pass reward_funcs, or an environment_factory whose "
                "environments have a method get_reward"
            )
        tokenizers = processing_classes
        if not isinstance(tokenizers, list | tuple):
            tokenizers = [tokenizers] * (len(funcs) if tokenizers is None else 1)
        for title, given in (("names", names), ("weights", weights), ("processing_classes", tokenizers)):
            if given is not None and len(given) != len(funcs):
                raise ValueError(
                    f"reward {title}: there are {len(given)} for {len(funcs)} reward functions, and they must match"
                )
        self.caller = Caller(timeout)
        self.cut_models = False
        options = models or RewardModelOptions()
        self.sources = [
            _source(func, None if names is None else names[number], tokenizers[number], options)
            for number, func in enumerate(funcs)
        ]
        self.weights = torch.tensor([1.0] * len(funcs) if weights is None else list(weights), dtype=torch.float64)
        if not self.weights.isfinite().all():
            raise ValueError(f"reward_weights are {self.weights.tolist()}, and each must be a finite number")

    @property
    def names(self) -> list[str]:
        """Of each column, no two alike."""
        names: list[str] = []
        for source in self.sources:
            same = sum(source.name == other.name for other in self.sources[: len(names)])
            names.append(f"{source.name}_{same + 1}" if same else source.name)
        return names

    def add(self, function: Callable[..., Any], name: str, weight: float = 1.0) -> None:
        """One more column, such as what environments say of themselves."""
        self.sources.append(FunctionReward(function, name))
        self.weights = torch.cat([self.weights, torch.tensor([weight], dtype=torch.float64)])

    @property
    def reward_models(self) -> list[ModelReward]:
        """Those of the columns that are by reward models."""
        return [source for source in self.sources if isinstance(source, ModelReward)]

    def cut(self, cutter: Callable[[nn.Module], None]) -> None:
        """Leaves on each rank its part of the reward models; all ranks then ask for rewards together."""
        self.cut_models = True
        for each in self.reward_models:
            each.cut(cutter)

    def to(self, device: torch.device | str | int) -> Rewards:
        """Moves the reward models that are not placed already (quantized, or by a device map)."""
        for each in self.reward_models:
            model: Any = each.model
            if getattr(model, "hf_device_map", None) is None and not getattr(model, "is_quantized", False):
                model.to(device)
        return self

    def scored(
        self,
        completed: Completed,
        *,
        trainer_state: Any = None,
        log_extra: Callable[[str, list], None] = nothing,
        log_metric: Callable[[str, float], None] = nothing,
    ) -> Scored:
        """The rewards, and those of steps.

        Args:
            trainer_state: the step and epoch, for functions that change with them.
            log_extra: takes a further column of the table of completions.
            log_metric: takes a further number to log.

        Raises:
            ValueError: a function raised, took too long, or returned what is no reward; names it and the completion.
        """
        rewards = torch.full((len(completed), len(self.sources)), math.nan, dtype=torch.float64)
        steps: list[tuple[int, int, int, float]] = []
        if len(completed) == 0 and not self.cut_models:
            return Scored(rewards, StepRewards.of())
        extras = {"trainer_state": copy.copy(trainer_state), "log_extra": log_extra, "log_metric": log_metric}
        _warn_of_hidden(*sorted(completed.columns.keys() & {*extras, *replace(completed, columns={}).arguments()}))
        found = {n: each.column(completed) for n, each in enumerate(self.sources) if isinstance(each, ModelReward)}
        if len(completed):
            functions = [(n, each) for n, each in enumerate(self.sources) if isinstance(each, FunctionReward)]
            columns = call_functions([each for _, each in functions], completed, extras, self.caller)
            found |= {n: column for (n, _), column in zip(functions, columns, strict=True)}
        for number, column in found.items():
            rewards[:, number] = column.rewards
            steps += [(completion, place, number, value) for completion, place, value in column.steps]
        if len(completed):
            _warn_of_unscored(rewards, completed)
        return Scored(rewards, StepRewards.of(steps))


class NoRewards(Scorer):
    """In the place of rewards, of a method that learns from what is written and not from how good it is."""

    names = ()
    weights = torch.zeros(0, dtype=torch.float64)

    def scored(self, completed: Completed, **more: Any) -> Scored:
        """[completions, 0]"""
        return Scored(torch.zeros(len(completed), 0, dtype=torch.float64), StepRewards.of())


def _source(func: Any, name: str | None, tokenizer: Any, options: RewardModelOptions) -> Source:
    if isinstance(func, str):
        check_no_file(func, "reward")
    if isinstance(func, str) and is_model_name(func):
        name = name or func.rstrip("/").split("/")[-1]
        kind = ProcessReward if is_process_model(func, options.init) else ModelReward
        func, own = load_reward_model(func, options, kind.head)
        return kind(func, own if tokenizer is None else tokenizer, name, options)
    if isinstance(func, nn.Module):
        path = getattr(getattr(func, "config", None), "name_or_path", "") or type(func).__name__
        kind = ProcessReward if is_process_model(func) else ModelReward
        return kind(func, tokenizer, name or path.rstrip("/").split("/")[-1], options)
    if isinstance(func, str):
        func = find_reward(func)
    if not callable(func):
        raise ValueError(
            f"reward_funcs has a {type(func).__name__}, and a reward is a function, a sequence classifier, or the name "
            "of one"
        )
    return FunctionReward(func, name or name_of(func))


@functools.cache
def _warn_of_hidden(*columns: str) -> None:
    """Says once which columns reward functions do not get, since arguments of the run have their names."""
    if columns:
        logger.warning(
            f"reward functions do not get the dataset's column(s) {', '.join(map(repr, columns))}: what they get by "
            "these names is the run's own. Rename the columns if a reward reads them"
        )


def _warn_of_unscored(rewards: Tensor, completed: Completed) -> None:
    unscored = rewards.isnan().all(1).nonzero().flatten().tolist()
    if unscored:
        logger.warning(
            "no reward function applies to %s of %s completions, the first of which is %s: each returned None. They "
            "teach nothing; at least one function should return a number. All reward functions returned None for the "
            "following kwargs: %s",
            len(unscored),
            len(completed),
            completed.where(unscored[0]),
            reprlib.repr({name: values[0] for name, values in completed.alone(unscored[0]).arguments().items()}),
        )
