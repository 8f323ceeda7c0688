"""The trainer of a method whose policy writes what it learns from: GRPO, RLOO and their like.

What is written at a time is a window of micro-batches. Its first batch has completions written and rewarded for all of
them; each micro-batch then learns from its share, `num_iterations` times. A window is saved with a checkpoint.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from datasets import Dataset
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lowtide.engine.forward import parted_over
from lowtide.methods.learning import Learning
from lowtide.methods.rollouts import RolloutOptions
from lowtide.ragged import RaggedBatch
from lowtide.rollout.conversations import ToolUse
from lowtide.rollout.rewards.models import ModelReward
from lowtide.rollout.rewards.rewards import Rewards
from lowtide.rollout.rollout import Rollout
from lowtide.rollout.turns import Turns
from lowtide.run.rollouts import Figures, Made, RolloutMaker
from lowtide.run.writing import make_generator
from lowtide.step.metrics import Totals
from lowtide.trainers.online import padded_masks
from lowtide.trainers.online.completions_log import CompletionsLog
from lowtide.trainers.online.entropy import kept_tokens
from lowtide.trainers.online.order import READ_HERE, PromptOrder, PromptSampler, Windows
from lowtide.trainers.online.rewards import OF_REWARDS, make_rewards, start_value_head
from lowtide.trainers.order import own_rows
from lowtide.trainers.reference import ReferenceTrainer

logger = logging.getLogger(__name__)

ROLLOUT = "rollout_{rank}.safetensors"
"""The file of a checkpoint for the window that a rank is in the middle of."""
OF_ROLLOUTS = (*OF_REWARDS, "tools", "rollout_func", "value_model")
"""Arguments of the trainer that are of rollouts alone."""


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
    kind_of_order = PromptOrder
    get_high_entropy_mask = padded_masks.get_high_entropy_mask
    get_off_policy_mask = staticmethod(padded_masks.get_off_policy_mask)

    def __init__(self, *positional: Any, **named: Any) -> None:
        padded_masks.check_not_overridden(type(self))
        self._window: Made | None = None
        self._evaluating: Totals | None = None
        self._evaluated: list[Figures] = []
        self._eval_rows, self._eval_completions = 0, 0
        super().__init__(*positional, **named)
        self.options = cast(RolloutOptions, self.args)
        if self.args.dataloader_num_workers and not hasattr(self.train_dataset, "__len__"):
            logger.warning(f"dataloader_num_workers={self.args.dataloader_num_workers} is set to 0: {READ_HERE}")
            self.args.dataloader_num_workers = 0
        self.args.generation_batch_size = self.options.written_at_a_time  # type: ignore[attr-defined]
        self.rewards = make_rewards(self._given, self.options, self.tokenizer, type(self).__name__)
        self.maker, self.written_by = self._make_maker()
        start_value_head(self.method.head, self.training_run.model, self._given.pop("value_model"))
        self.completions_log = CompletionsLog(self.args)
        self._reward_by_environments()

    def _arguments(self, positional: tuple, named: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        given, older = super()._arguments(positional, named)
        self._given = {name: given.pop(name, older.pop(name, None)) for name in OF_ROLLOUTS}
        if given.pop("data_collator", None) is not None:
            raise ValueError(
                f"{type(self).__name__}: data_collator has no use, since batches are made of what the policy writes: "
                "leave it out"
            )
        if given["train_dataset"] is None and self._given["environment_factory"] is not None:
            given["train_dataset"] = self._empty_prompts(given["args"])
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
        return Dataset.from_list([{"prompt": [{"role": "user", "content": ""}]}] * count)

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

    @property
    def reward_funcs(self) -> list[Any]:
        """The functions and models that reward."""
        sources = getattr(self.rewards, "sources", ())
        return [source.model if isinstance(source, ModelReward) else source.function for source in sources]

    @property
    def reward_func_names(self) -> list[str]:
        """What the rewards are logged by."""
        return self.rewards.names

    @property
    def reward_processing_classes(self) -> list[Any]:
        """Of each reward the tokenizer of its model; None of a function."""
        return [getattr(source, "tokenizer", None) for source in getattr(self.rewards, "sources", ())]

    @property
    def entropy_coef(self) -> float:
        """The weight of the entropy, which may have moved since the start."""
        control = getattr(self.inner_objective, "running", None)
        return getattr(self.args, "entropy_coef", 0.0) if control is None else control.coefficient

    @property
    def reward_models(self) -> list[nn.Module]:
        """Those among what rewards completions."""
        sources = getattr(self.rewards, "sources", ())
        return [source.model for source in sources if isinstance(source, ModelReward)]

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
        return maker, text

    def _reward_by_environments(self) -> None:
        """Environments that reward beside reward functions are a function each."""
        tools = self.maker.tools
        if tools is not None and self._given["reward_funcs"] is not None and isinstance(self.rewards, Rewards):
            for name, function in tools.rewards().items():
                self.rewards.add(function, name)

    # -- data ----------------------------------------------------------------------------------------------------

    @property
    def windows(self) -> Windows:
        """What is written at a time in training."""
        args = self.options
        count = args.num_generations
        return Windows(args.written_at_a_time // count, count, args.steps_of_generation * args.num_iterations)

    def kept_columns(self) -> list[str]:
        return ["prompt", "prompt_ids", "image", "images"]

    # -- a step --------------------------------------------------------------------------------------------------

    def get_batch_samples(self, epoch_iterator: Iterator, num_batches: int, device: torch.device) -> tuple[list, None]:
        """The completions of one optimizer step as one batch; the Trainer's places for the earlier ones stay empty."""
        args, parts, taken = self.options, [], 0
        for _, rows in zip(range(num_batches), epoch_iterator, strict=False):
            within = self.order.place[1] % self.windows.repeats
            if within == 0 or self._window is None:
                if within:
                    logger.warning("the completions of this window were not saved: they are written anew")
                self._window = self._made(rows, args.num_generations)
            share, each = within % args.steps_of_generation, self._train_batch_size
            rollout, count = self._window.rollout, each * args.steps_of_generation
            window, repeat = self.order.place[1] // self.windows.repeats, within // args.steps_of_generation
            order = self.learning.order(count, self.args.seed, self.order.place[0], window, repeat)
            chosen = order[share * each : (share + 1) * each]
            parts.append(self.learning.batch(rollout, chosen, sharing=self._sharing))
            self.order.advance()
            taken += 1
        if not parts:
            return [], None
        batch = RaggedBatch.concat(parts).to(self.args.device)
        return [None] * (taken - 1) + [kept_tokens(self.runner, batch, self.args)], None

    @property
    def _sharing(self) -> bool:
        return getattr(self.training_run.own_collator, "sharing", True)

    def _made(self, rows: Sequence[Mapping[str, Any]], group: int) -> Made:
        """Completions of rows, written by the policy as it is, and logged."""
        first = self.args.data_rank * len(rows)
        if self._evaluating is None:
            place = (0, self.order.place[0], self.order.place[1] // self.windows.repeats, first)
        else:
            place = (1, self.state.global_step, self._eval_rows + first)
        made = self.maker.make(
            rows,
            place,
            group=group,
            version=self.state.global_step,
            state=self.state,
        )
        self._log(made)
        self.completions_log.take_in(made, self.rewards.names)
        return made

    def _log(self, made: Made) -> None:
        """Metrics of a rollout: one in training, where each counts alike; in evaluation those of all completions, at
        its end, so that they do not depend on how many are written at a time."""
        assert made.figures is not None
        if self._evaluating is not None:
            left = self._eval_completions - self._eval_rows
            figures = made.figures if left <= 0 else made.figures.first(left)
            self._evaluated.append(figures)
            for name, value in made.metrics.items():
                self._evaluating.add_mean(name, value * len(figures.lengths), len(figures.lengths))
            return
        for name, value in (made.metrics | self._metrics_of(made.figures)).items():
            if value == value:  # a function that applied to nothing has no mean
                self.runner.totals.add_mean(name, value, 1)

    def _metrics_of(self, figures: Figures) -> dict[str, float]:
        return figures.metrics(self.rewards.names, self.rewards.weights)

    def training_step(self, model: nn.Module, inputs: RaggedBatch | None, num_items_in_batch: Any = None) -> Tensor:
        loss = super().training_step(model, inputs, num_items_in_batch)
        control = getattr(self.inner_objective, "running", None)
        if inputs is not None and control is not None:
            control.follow(self.args)
            self.runner.totals.add_mean("entropy_coef", control.coefficient, 1)
        return loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        super().log(logs, start_time)
        if self.options.log_completions and {"loss", "eval_loss", "train_runtime"} & logs.keys():
            self.completions_log.write(self.state.global_step)

    def report_lines(self) -> list[tuple[str, str]]:
        args, windows = self.options, self.windows
        reference = (
            super().report_lines() if args.compares else [("reference", f"none, since {args.divergence_weight}=0")]
        )
        per_step = windows.completions * windows.prompts
        most = args.max_completion_length
        text = f"{windows.prompts} prompts x {windows.completions} completions of at most {most} tokens"
        if windows.repeats > 1:
            text += f", learned from in {windows.repeats} micro-batches of {per_step // args.steps_of_generation}"
        return [
            *reference,
            ("written by", self.written_by),
            ("rollout", text),
            ("rewards", ", ".join(self.rewards.names)),
        ]

    # -- evaluation ----------------------------------------------------------------------------------------------

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """As the others', on completions that are written for it."""
        self._evaluating, self._eval_rows, self._evaluated = Totals(), 0, []
        rows = args[0] if args else kwargs["dataloader"]
        self._eval_completions = _completions_of(rows)
        self.maker.evaluates = True
        try:
            return super().evaluation_loop(*args, **kwargs)
        finally:
            self._evaluating, self.maker.evaluates = None, False

    def as_ragged(self, inputs: Any) -> RaggedBatch:
        """Of rows to evaluate on: their completions, written and rewarded."""
        if isinstance(inputs, RaggedBatch) or not isinstance(inputs, list):
            return super().as_ragged(inputs)
        made = self._made(inputs, self.options.generations_eval)
        self._eval_rows += len(inputs) * self.args.data_ranks
        rows = range(len(made.rollout) // self.learning.completions)
        batch = self.learning.batch(made.rollout, rows, sharing=self._sharing).to(self.args.device)
        return kept_tokens(self.runner, batch, self.args)

    def own_rows(self, batch: RaggedBatch) -> int:
        each = self.learning.completions
        return own_rows(self.accelerator, batch.rows * each) // each

    def metrics_of(self, sums: dict[str, float]) -> dict[str, float]:
        metrics = super().metrics_of(sums)
        if self._evaluating is not None:
            metrics |= super().metrics_of(self._evaluating.read(self.args.device))
            found = self._metrics_of(Figures.concat(self._evaluated)) if self._evaluated else {}
            metrics |= {name: value for name, value in found.items() if value == value}
        return metrics

    # -- checkpoints ---------------------------------------------------------------------------------------------

    def _save_rng_state(self, output_dir: str) -> None:
        """As the Trainer's, with the window that a rank is in the middle of."""
        super()._save_rng_state(output_dir)
        if self._window is not None and self.order.place[1] % self.windows.repeats:
            path = Path(output_dir, ROLLOUT.format(rank=self.args.process_index))
            self._window.rollout.save(path, place=list(self.order.place))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """As the others', with the window, which the first batch needs before random states are put back."""
        super()._load_optimizer_and_scheduler(checkpoint)
        path = None if checkpoint is None else Path(checkpoint, ROLLOUT.format(rank=self.args.process_index))
        if path is not None and path.exists():
            rollout, _ = Rollout.load(path, self.training_run.reader)
            self._window = Made(rollout)


def _completions_of(loader: DataLoader) -> int:
    """Completions that an evaluation has, without those that fill up its last batch; 0 of a stream, where that is not
    known before."""
    sampler: Any = getattr(loader, "batch_sampler", None)
    while sampler is not None and not isinstance(sampler, PromptSampler):
        sampler = getattr(sampler, "batch_sampler", None) or getattr(sampler, "sampler", None)
    return 0 if sampler is None else len(sampler)
