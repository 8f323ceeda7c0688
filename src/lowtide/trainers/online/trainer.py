"""The trainer of a method whose policy writes what it learns from: GRPO, RLOO and their like.

What is written at a time is a window of micro-batches. Its first batch has completions written and rewarded for all of
them; each micro-batch then learns from its share, `num_iterations` times. A window is saved with a checkpoint.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, cast

import torch
from datasets import Dataset, IterableDataset
from torch import nn

from lowtide.data.sources.columns import column_names
from lowtide.data.sources.titles import entitled, title_of
from lowtide.engine.forward import parted_over
from lowtide.methods.online.learning import Learning
from lowtide.methods.online.rollouts import RewardedOptions, RolloutOptions
from lowtide.ragged import RaggedBatch
from lowtide.rollout.conversations import ToolUse
from lowtide.rollout.rewards.models import ModelReward
from lowtide.rollout.rewards.rewards import Rewards
from lowtide.rollout.turns import Turns
from lowtide.run.edge import edge
from lowtide.run.replay import Replay
from lowtide.run.resampling import Resampling
from lowtide.run.rollouts import RolloutMaker
from lowtide.run.writing import make_generator
from lowtide.trainers.method import by_name
from lowtide.trainers.online import padded_masks
from lowtide.trainers.online.batches import WrittenBatches
from lowtide.trainers.online.completions_log import CompletionsLog
from lowtide.trainers.online.order import READ_HERE, PromptOrder, Windows
from lowtide.trainers.online.rewards import OF_REWARDS, make_rewards, start_value_head
from lowtide.trainers.online.surveys import surveyed
from lowtide.trainers.reference import ReferenceTrainer

logger = logging.getLogger(__name__)

OF_ROLLOUTS = (*OF_REWARDS, "tools", "rollout_func", "value_model")
"""Arguments of the trainer that are of rollouts alone."""


EMPTY_PROMPT = {"prompt": [{"role": "user", "content": ""}]}
"""Of a row whose environment writes the prompt: what its `reset` returns is added to the last message."""


def _with_prompts(rows: Any, name: str) -> Any:
    """The rows, with empty prompts for environments to write where they have none."""
    if not isinstance(rows, Dataset | IterableDataset) or "prompt" in column_names(rows):
        return rows
    title = title_of(rows, name.removesuffix("_dataset"))
    logger.warning(f"{title} has no column `prompt`: what the environment's reset returns is the whole prompt")
    return entitled(rows.map(lambda _: EMPTY_PROMPT), title)


class OnlineTrainer(ReferenceTrainer):
    """A trainer of a method that learns from completions of the policy. The arguments are TRL's, in its order.

    Args:
        reward_funcs: what rewards completions (see `lowtide.rollout.rewards.rewards.Rewards`): a function, a reward
            model, the name of one, or several of these.
        reward_processing_classes: the tokenizers of reward models.
        tools: functions that the policy can call.
        rollout_func: writes completions in the generator's place: called with prompts and the trainer.
        environment_factory: makes the environment of a completion.
        judge: says which of two completions is better, for a method over pairs (see `lowtide.rollout.judges`).
        reward_model: the older name of `reward_funcs`; likewise `reward_processing_class`.
        value_model: a classifier with one label whose `score` weights a value head starts from.

    The other arguments are `MethodTrainer`'s.
    """

    options: RolloutOptions
    kind_of_order, kind_of_batches = PromptOrder, WrittenBatches
    batch_maker: WrittenBatches
    get_high_entropy_mask = padded_masks.get_high_entropy_mask
    get_off_policy_mask = staticmethod(padded_masks.get_off_policy_mask)

    def __init__(self, *positional: Any, **named: Any) -> None:
        padded_masks.check_not_overridden(type(self))
        super().__init__(*positional, **named)
        self.kept_beside.append(self.batch_maker)
        self.options = cast(RolloutOptions, self.args)
        if self.args.dataloader_num_workers and not hasattr(self.train_dataset, "__len__"):
            logger.warning(f"dataloader_num_workers={self.args.dataloader_num_workers} is set to 0: {READ_HERE}")
            self.args.dataloader_num_workers = 0
        self.args.generation_batch_size = self.options.written_at_a_time  # type: ignore[attr-defined]
        self.rewards = make_rewards(self._given, self.options, self.tokenizer, type(self).__name__)
        self.maker, self.written_by = self._make_maker()
        self.resampling = self._make_resampling()
        self.replay = self._make_replay()
        start_value_head(self.method.head, self.training_run.model, self._given.pop("value_model"))
        self.completions_log = CompletionsLog(self.args)
        self._reward_by_environments()
        self.survey = self.learning.survey(self.options)
        if self.survey is not None:
            with edge("rewarding what is written before training"):
                self.train_dataset = surveyed(self, self.train_dataset, "train", self.survey)
                self.eval_dataset = surveyed(self, self.eval_dataset, "eval", self.survey)

    def _arguments(self, positional: tuple, named: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        given, older = super()._arguments(positional, named)
        beside = older if issubclass(self.method.options, RewardedOptions) else {}
        self._given = {name: given.pop(name, beside.pop(name, None)) for name in OF_ROLLOUTS}
        if given.pop("data_collator", None) is not None:
            raise ValueError(
                f"{type(self).__name__}: data_collator has no use, since batches are made of what the policy writes: "
                "leave it out"
            )
        if given["train_dataset"] is None and self._given["environment_factory"] is not None:
            given["train_dataset"] = self._empty_prompts(given["args"])
        elif self._given["environment_factory"] is not None:
            for name in ("train_dataset", "eval_dataset"):
                rows: Any = given.get(name)
                if isinstance(rows, dict):  # a `DatasetDict` too
                    kind: Any = type(rows)
                    given[name] = kind({key: _with_prompts(part, name) for key, part in rows.items()})
                else:
                    given[name] = _with_prompts(rows, name)
        return given | {"data_collator": None}, older

    def _empty_prompts(self, args: Any) -> Dataset:
        """The prompts of a window for environments whose `reset` writes them, so that there is no dataset.

        Raises:
            ValueError: the length of the run is not said, or the rows would choose among environments.
        """
        title, several = type(self).__name__, isinstance(self._given["environment_factory"], Mapping)
        if several or getattr(args, "max_steps", 0) < 1:
            lacks = "environment_factory has several environments, of which a column `environment` chooses"
            lacks = lacks if several else "max_steps is not set, which is then the length of the run"
            raise ValueError(f"{title}: `train_dataset` is required, since {lacks}")
        count = max(args.written_at_a_time // args.num_generations, 1)
        return Dataset.from_list([EMPTY_PROMPT] * count)

    @property
    def learning(self) -> Learning:
        """What the method makes of a rollout."""
        assert self.method.writes is not None
        return self.method.writes

    @property
    def rollout_func(self) -> Any:
        """What writes completions in the generator's place; None for the generator. It may be set."""
        return self.maker.rollout_func

    @rollout_func.setter
    def rollout_func(self, function: Any) -> None:
        self.maker.rollout_func = function
        if self.windows.ahead:
            self.maker.check_ahead()

    @property
    def reward_funcs(self) -> list[Any]:
        """The functions and models that reward."""
        sources = getattr(self.rewards, "sources", ())
        return [source.model if isinstance(source, ModelReward) else source.function for source in sources]

    @property
    def reward_func_names(self) -> list[str]:
        """What the rewards are logged by."""
        return list(self.rewards.names)

    @property
    def reward_processing_classes(self) -> list[Any]:
        """Of each reward the tokenizer of its model; None of a function."""
        return [getattr(source, "tokenizer", None) for source in getattr(self.rewards, "sources", ())]

    @property
    def reward_weights(self) -> torch.Tensor | None:
        """The weight of each column of rewards, `[columns]`; None where nothing rewards."""
        return getattr(self.rewards, "weights", None)

    @property
    def entropy_coef(self) -> float:
        """The weight of the entropy, which may have moved since the start."""
        control = getattr(self.inner_objective, "running", None)
        return getattr(self.args, "entropy_coef", 0.0) if control is None else control.coefficient

    @property
    def reward_models(self) -> list[nn.Module]:
        """Those among what rewards completions."""
        return [each.model for each in getattr(self.rewards, "reward_models", ())]

    def _to_plan(self, given: Mapping[str, Any]) -> dict[str, Any]:
        older, path = self._given["reward_model"], getattr(self.args, "reward_model_path", None)
        rewards = next((each for each in (self._given["reward_funcs"], older, path) if each is not None), None)
        return {**super()._to_plan(given), "reward_funcs": rewards}

    # -- what writes and rewards ---------------------------------------------------------------------------------

    def _make_maker(self) -> tuple[RolloutMaker, str]:
        args: Any = self.options
        given = self._given
        generator, text = make_generator(args, self.training_run.model, self.tokenizer, self.padding_free)
        if given["rollout_func"] is not None:
            text = "the rollout_func that was passed"
        tools = None
        if given["tools"] or given["environment_factory"] is not None:
            tools = ToolUse(
                Turns(
                    cast(Any, self.tokenizer),
                    template_kwargs=cast(Any, args.chat_template_kwargs or {}),
                ),
                tools=given["tools"],
                environment_factory=given["environment_factory"],
                max_tool_calling_iterations=args.max_tool_calling_iterations,
                timeout=args.tool_timeout,
                ranks=parted_over(self.training_run.model),
            )
        stale = self.args.gradient_accumulation_steps % self.windows.repeats != 0
        stale = stale or bool(getattr(args, "replay_buffer_size", 0))
        maker = RolloutMaker(
            args,
            self.runner,
            cast(Any, self.tokenizer),
            self.rewards,
            generator,
            self.learning,
            tools=tools,
            rollout_func=given["rollout_func"],
            trainer=self,
            wants_old=self.learning.wants_old(args, stale=stale),
            reader=self.training_run.reader,
        )
        if self.training_run.shows_images:
            maker.check_images()
        if self.windows.ahead:
            maker.check_ahead()
            text += "; windows are written while the policy is trained on earlier ones"
        return maker, text

    def _make_resampling(self) -> Resampling | None:
        """What replaces prompts of which nothing is learned; None where they stay."""
        rounds = getattr(self.options, "dynamic_sampling_rounds", 0)
        if not rounds:
            return None
        made = Resampling(self.maker, cast(Any, self.train_dataset), rounds)
        made.check()
        return made

    def _make_replay(self) -> Replay | None:
        """What keeps groups that there is something to learn from; None where none are kept."""
        size = getattr(self.options, "replay_buffer_size", 0)
        if not size:
            return None
        if self.training_run.shows_images:
            raise ValueError(f"replay_buffer_size={size} does not go with prompts that show images: set it to 0")
        made = Replay(self.maker, size)
        made.check()
        return made

    def _reward_by_environments(self) -> None:
        """Environments that reward beside reward functions are a function each."""
        tools = self.maker.tools
        if tools is not None and self._given["reward_funcs"] is not None and isinstance(self.rewards, Rewards):
            for name, function in tools.rewards().items():
                self.rewards.add(function, name)

    def handed_in(self, dataset: Any) -> Any:
        """As the others', with what a survey finds of the prompts.

        Raises:
            ValueError: the policy is no longer as it arrived.
        """
        known, dataset = self.eval_dataset, super().handed_in(dataset)
        survey = self.survey
        if survey is None or dataset is known:
            return dataset
        lacks = [each for each in by_name(dataset).values() if survey.column not in (each.column_names or ())]
        if lacks and self.state.global_step:
            raise ValueError(
                f"{title_of(lacks[0], 'eval')} has no column `{survey.column}`, of what the policy wrote before "
                "training: pass these rows as eval_dataset when the trainer is made"
            )
        return surveyed(self, dataset, "eval", survey)

    # -- data ----------------------------------------------------------------------------------------------------

    @property
    def windows(self) -> Windows:
        """What is written at a time in training."""
        args = self.options
        count = args.num_generations
        repeats, ahead = args.steps_of_generation * args.num_iterations, getattr(args, "windows_ahead", 0)
        return Windows(args.written_at_a_time // count, count, repeats, ahead)

    def kept_columns(self) -> list[str]:
        return ["prompt", "prompt_ids", "teacher_prompt_ids", "privileged_context", "optimal_value", "image", "images"]

    @property
    def rows_a_batch(self) -> int:
        """Rows of a micro-batch on this rank, which automatic batch sizes change."""
        return self._train_batch_size

    # -- a step --------------------------------------------------------------------------------------------------

    def stepped(self) -> None:
        control = getattr(self.inner_objective, "running", None)
        if control is not None:
            control.follow(self.args)
            self.runner.totals.add_mean("entropy_coef", control.coefficient, 1)

    def logged(self, logs: Mapping[str, Any]) -> None:
        if self.options.log_completions and {"loss", "eval_loss", "train_runtime"} & logs.keys():
            self.completions_log.write(self.state.global_step)

    def report_lines(self) -> list[tuple[str, str]]:
        args, windows = self.options, self.windows
        reference = super().report_lines()
        if isinstance(args, RewardedOptions) and not args.compares:
            reference = [("reference", f"none, since {args.divergence_weight}=0")]
        per_step = windows.completions * windows.prompts
        most = args.max_completion_length
        text = f"{windows.prompts} prompts x {windows.completions} completions of at most {most} tokens"
        if windows.repeats > 1:
            text += f", learned from in {windows.repeats} micro-batches of {per_step // args.steps_of_generation}"
        return [
            *reference,
            ("written by", self.written_by),
            ("rollout", text),
            *([("rewards", ", ".join(self.rewards.names))] if self.rewards.names else []),
        ]

    # -- evaluation ----------------------------------------------------------------------------------------------

    def as_ragged(self, inputs: Any) -> RaggedBatch:
        """Of rows to evaluate on: their completions, written and rewarded."""
        if isinstance(inputs, RaggedBatch) or not isinstance(inputs, list):
            return super().as_ragged(inputs)
        return self.batch_maker.written(inputs)

    def metrics_of(self, sums: dict[str, float]) -> dict[str, float]:
        metrics, written = super().metrics_of(sums), self.batch_maker.metrics_of_evaluation()
        return metrics if written is None else metrics | super().metrics_of(written[0]) | written[1]
