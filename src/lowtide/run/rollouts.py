"""Makes rollouts: completions are written for prompts, rewarded, and turned into what a step learns from.

Writing and rewarding are what a rank does by itself; after it ranks meet, and advantages are those of whole groups
over all ranks. On one policy no pass is made for the log-probabilities of what it wrote: while the weights are those
that wrote, the update's own serve, and after that the sampler's.
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lowtide.data.batches.images import ImageReader
from lowtide.data.batches.values import CORRECTION, LOG_CORRECTION, OLD, REFERENCE, SAMPLED, VALUE
from lowtide.data.formats.columns import PROMPT
from lowtide.data.prompts import ADDED, PROMPT_IDS, TEACHER_IDS
from lowtide.engine.forward import parted_over, same_rows_of, sequence_of, vocabulary
from lowtide.engine.heads.head import Head
from lowtide.engine.heads.language_model import LanguageModel
from lowtide.engine.reference import logprobs
from lowtide.methods.online.learning import GroupRewards, Learning, Rewarded, reported_of
from lowtide.methods.online.rollouts import RolloutOptions
from lowtide.methods.shared.options import TeacherOptions
from lowtide.objectives.advantages import deviation, summed_up, weighted
from lowtide.objectives.correction import Correction, correction, sampling_metrics
from lowtide.objectives.step_rewards import StepRewards
from lowtide.ops.float64 import exchange_device
from lowtide.ranks.group import RankGroup
from lowtide.ranks.shards import is_sharded
from lowtide.ranks.world import gathered, objects_of_all_ranks
from lowtide.rollout.conversations import Conversations, ToolUse
from lowtide.rollout.generators.generator import Completion, Generator, HoldsWeights, Request
from lowtide.rollout.images import PromptImages
from lowtide.rollout.judges import JudgedPairs
from lowtide.rollout.rewards.beside import LoggedBeside
from lowtide.rollout.rewards.completed import Completed
from lowtide.rollout.rewards.rewards import NoRewards, Rewards
from lowtide.rollout.rollout import Rollout
from lowtide.run.writing import Writer, check_writes_after_images, seed_of
from lowtide.step.rank_sync import RankSync
from lowtide.step.runner import StepRunner
from lowtide.users_functions import called_for_user

logger = logging.getLogger(__name__)

T = TypeVar("T")
REMEDY = "Set tokens_per_generation_batch, or lower max_completion_length"
"""What to do where memory runs out."""
REQUIRED = ("prompt_ids", "completion_ids", "logprobs")
"""What a `rollout_func` returns at least."""


@dataclass(frozen=True)
class Figures:
    """What metrics of rollouts are computed of, of all ranks, in the order of the rows."""

    rewards: Float[Tensor, "completions functions"]
    lengths: Float[Tensor, " completions"]
    ended: Bool[Tensor, " completions"]

    def first(self, count: int) -> Figures:
        """Those of so many completions."""
        return Figures(self.rewards[:count], self.lengths[:count], self.ended[:count])

    @classmethod
    def concat(cls, parts: Sequence[Figures]) -> Figures:
        return cls(*(torch.cat([getattr(each, name) for each in parts]) for name in ("rewards", "lengths", "ended")))

    def metrics(self, names: Sequence[str], weights: Float[Tensor, " functions"]) -> dict[str, float]:
        """Under TRL's names."""
        lengths, whole = self.lengths, self.lengths[self.ended] if self.ended.any() else torch.zeros(1)
        metrics = {
            "completions/mean_length": lengths.mean().item(),
            "completions/min_length": lengths.min().item(),
            "completions/max_length": lengths.max().item(),
            "completions/clipped_ratio": (~self.ended).float().mean().item(),
            "completions/mean_terminated_length": whole.mean().item(),
            "completions/min_terminated_length": whole.min().item(),
            "completions/max_terminated_length": whole.max().item(),
        }
        for name, column in zip(names, self.rewards.unbind(1), strict=True):
            metrics[f"rewards/{name}/mean"] = column.nanmean().item()
            metrics[f"rewards/{name}/std"] = deviation(column[None]).item()
        if not names:
            return metrics
        total, magnitude = weighted(self.rewards, weights), summed_up(self.rewards, weights)
        metrics["reward"] = total.nanmean().item()
        metrics["reward_std"] = deviation(total[None], magnitude[None]).item()
        return metrics


@dataclass
class Made:
    """A rollout with what is logged of it."""

    rollout: Rollout
    prompts: Sequence[Any] = ()
    """As they are logged: texts, or the messages of conversations; likewise `completions`."""
    completions: Sequence[Any] = ()
    metrics: dict[str, float] = field(default_factory=dict)
    """Over all ranks, under TRL's names."""
    advantages: Tensor = field(default_factory=lambda: torch.zeros(0))
    """[completions] of all ranks."""
    rewards: Tensor = field(default_factory=lambda: torch.zeros(0, 0))
    """[completions, functions] of all ranks."""
    figures: Figures | None = None
    """Of all ranks."""
    extra: dict[str, list] = field(default_factory=dict)
    """Further columns of the table of completions, which reward functions logged."""
    logged: dict[str, list[float]] = field(default_factory=dict)
    """Further numbers that they logged on this rank."""
    calls: list[tuple[int, int]] | None = None
    """Of each completion that this rank wrote, (tool calls that were answered, those of them that failed); None where
    no tools are called."""

    def column(self, name: str) -> list:
        """A further column, with None for completions that it has no value of."""
        values = self.extra.get(name, [])[: len(self.rollout)]
        return [*values, *[None] * (len(self.rollout) - len(values))]

    def chosen(self, numbers: Sequence[int]) -> Made:
        """Some completions, rewarded and as nothing was learned of them; prompts show no images."""
        return Made(
            self.rollout.chosen(numbers),
            [self.prompts[number] for number in numbers],
            [self.completions[number] for number in numbers],
            extra={name: [self.column(name)[number] for number in numbers] for name in self.extra},
            calls=None if self.calls is None else [self.calls[number] for number in numbers],
        )

    @classmethod
    def concat(cls, parts: Sequence[Made]) -> Made:
        """Rewarded completions of one policy after the other, of which nothing was learned yet; what functions logged
        of the first."""
        names = dict.fromkeys(name for each in parts for name in each.extra)
        return replace(
            parts[0],
            rollout=Rollout.concat([each.rollout for each in parts]),
            prompts=[one for each in parts for one in each.prompts],
            completions=[one for each in parts for one in each.completions],
            extra={name: [value for each in parts for value in each.column(name)] for name in names},
        )

    def replaced(self, places: Sequence[int], other: Made) -> Made:
        """With other completions in some places, rewarded and not yet learned from; prompts show no images then."""
        names = dict.fromkeys([*self.extra, *other.extra])
        calls = None if self.calls is None or other.calls is None else _replaced(self.calls, places, other.calls)
        return replace(
            self,
            rollout=self.rollout.replaced(places, other.rollout),
            prompts=_replaced(self.prompts, places, other.prompts),
            completions=_replaced(self.completions, places, other.completions),
            extra={name: _replaced(self.column(name), places, other.column(name)) for name in names},
            logged={
                name: [*self.logged.get(name, []), *other.logged.get(name, [])]
                for name in dict.fromkeys([*self.logged, *other.logged])
            },
            calls=calls,
        )

    def save(self, path: Path, *, place: Sequence[int], texts: bool) -> None:
        """Writes what was written and rewarded, before anything is computed of it.

        Args:
            place: the pass over the rows and the window.
            texts: also what the table of completions shows.
        """
        shown = {"prompts": self.prompts, "completions": self.completions, "extra": self.extra} if texts else {}
        more = json.loads(json.dumps({**shown, "logged": self.logged, "calls": self.calls}, default=str))
        self.rollout.save(path, place=list(place), **more)

    @classmethod
    def load(cls, path: Path, reader: ImageReader | None = None) -> tuple[Made, tuple[int, int]]:
        """(what `save` wrote, its place)."""
        rollout, more = Rollout.load(path, reader)
        (epoch, window), calls = more.pop("place"), more.pop("calls")
        return cls(rollout, **more, calls=calls and [(answered, failed) for answered, failed in calls]), (epoch, window)


@dataclass
class RolloutMaker:
    """Makes the rollouts of a run."""

    options: RolloutOptions
    runner: StepRunner
    tokenizer: PreTrainedTokenizerBase
    rewards: Rewards | JudgedPairs | NoRewards
    generator: Generator
    learning: Learning
    tools: ToolUse | None = None
    rollout_func: Callable | None = None
    trainer: Any = None
    """Handed to `rollout_func`, as TRL does."""
    evaluates: bool = False
    """Whether what is written is evaluated, and not learned from."""
    reported: int | None = None
    """As of `Rewarded`."""
    wants_old: bool = False
    """Whether the log-probabilities of the policy that wrote are needed later than in the update that follows."""
    reader: ImageReader | None = None
    """Makes the images of prompts ready, for a vision-language model."""

    @functools.cached_property
    def known_tokens(self) -> int:
        """Tokens that the policy knows, and a teacher that is to read what it writes."""
        models = [self.runner.model]
        if isinstance(self.options, TeacherOptions) and self.options.compares:
            models += self.runner.models().teacher.models
        return min(vocabulary(each) for each in models)

    @property
    def writer(self) -> Writer:
        """Who writes completions of prompts."""
        never = () if self.reader is None or self.options.use_vllm else (self.reader.place,)
        return Writer(self.options, self.runner, self.tokenizer, self.generator, never_ids=never)

    def check_images(self) -> None:
        """Refuses what prompts with images cannot go with.

        Raises:
            ValueError: names the argument or the option, and what to do.
        """
        others = {
            "tools and environment_factory, whose conversations are text alone": self.tools is not None,
            "rollout_func, which returns no images": self.rollout_func is not None,
            "judge, which compares texts": isinstance(self.rewards, JudgedPairs),
            "a reward model, which reads text alone": bool(getattr(self.rewards, "reward_models", ())),
        }
        for what, there in others.items():
            if there:
                raise ValueError(f"prompts show images, which do not go with {what}: leave it out")
        check_writes_after_images(self.generator)

    def check_ahead(self) -> None:
        """Refuses what cannot be written beside training (`max_staleness` above 0).

        Raises:
            ValueError: names the argument or the option.
        """
        model = self.runner.model
        others = {
            "rollout_func, which may use the policy that is trained": self.rollout_func is not None,
            "a judge, whose choices no importance ratio corrects": isinstance(self.rewards, JudgedPairs),
            "weights that are cut over ranks": is_sharded(model) or parted_over(model) is not None,
            "ranks that learn from the same rows": self.together is not None,
            "environment_factory beside a reward model, for which environments would have to wait": (
                self.tools is not None
                and self.tools.environments is not None
                and bool(getattr(self.rewards, "reward_models", ()))
            ),
        }
        for what, there in others.items():
            if there:
                raise ValueError(f"max_staleness does not go with {what}: set it to 0, or leave the other out")

    def make(
        self, rows: Sequence[Mapping[str, Any]], place: Sequence[int], *, group: int, version: int, state: Any = None
    ) -> Made:
        """Completions of rows, one each, rewarded.

        Args:
            rows: of this rank, the completions of a prompt side by side.
            place: what keys the random numbers beside the seed: when they are drawn, and at the end
                the number of the first completion among those of all ranks.
            group: completions of a prompt.
            version: optimizer steps that the weights have taken.
            state: of the trainer, for reward functions.

        Raises:
            ValueError: a reward, a tool or a `rollout_func` failed; says which, and at which row.
            OutOfMemory: what was to be written does not fit.
        """
        own = self.met(lambda: self.rewarded(rows, place, version, state), waited_for=self.writer.has_a_part)
        return self.finish(own, rows, group=group, state=state)

    def written_before(self, rows: Sequence[Mapping[str, Any]], place: Sequence[int], *, state: Any = None) -> Made:
        """Completions of rows, one each, rewarded, of which nothing is learned; as `make`."""
        own = self.met(lambda: self.rewarded(rows, place, 0, state), waited_for=self.writer.has_a_part)
        return own if self.together is None else _of_group(own, len(rows), self.together)

    def finish(self, own: Made, rows: Sequence[Mapping[str, Any]], *, group: int, state: Any = None) -> Made:
        """What is learned of what this rank wrote of its rows; the other arguments are those of `make`."""
        count = len(rows)
        made, found = self.met(lambda: self._scored(own, count), waited_for=self.runner.waited_for)
        if own.calls is not None:
            reported = self._reported(count, self._share(count))
            made.metrics |= _tool_metrics(own.calls[:reported], self.runner.device)
        if found is not None:
            made.metrics |= sampling_metrics(found, self._of_all_ranks)
        self._finish(made, rows, group, getattr(state, "epoch", None) or 0.0)
        return made

    def met(self, work: Callable[[], T], *, waited_for: bool = False) -> T:
        """What this rank does by itself; all ranks come out of it, or none does."""
        sync, found = RankSync("generation", remedy=REMEDY), []
        with sync.local(waited_for=waited_for):
            found.append(work())
        sync.meet(self.runner.device)
        return found[0]

    # -- ranks that hold the same rows -------------------------------------------------------------------------

    @property
    def together(self) -> RankGroup | None:
        """The ranks that learn from the same rollout; None where each has its own."""
        return same_rows_of(self.runner.model)

    def own_of(self, completions: int) -> slice:
        """This rank's completions, so many, among those of all ranks."""
        first = self.options.data_rank * completions  # type: ignore[attr-defined]
        return slice(first, first + completions)

    def _reported(self, completions: int, share: slice) -> int:
        """How many of a share of this rank's completions metrics are of."""
        first = self.own_of(completions).start
        return reported_of(self.reported, slice(first + share.start, first + share.stop))

    def _of_all_ranks(self, values: Tensor) -> Tensor:
        """Values of the rollouts of all ranks; what several hold alike counts once."""
        return gathered(values.to(exchange_device(values, self.runner.device)), self.runner.models().copies)

    def rewards_of_all(self, made: Made) -> Float[Tensor, "completions functions"]:
        """The rewards of the completions of all ranks; those of a prompt stand together."""
        return self._of_all_ranks(made.rollout.rewards).cpu()

    def group_of(self, made: Made, size: int) -> GroupRewards:
        """The same with rewards at several places of completions.

        Args:
            size: completions of a prompt.
        """
        everyones = objects_of_all_ranks(made.rollout.steps, self.runner.models().copies)
        steps, rewards = StepRewards.concat(everyones, [len(made.rollout)] * len(everyones)), self.rewards_of_all(made)
        return GroupRewards(rewards, self.rewards.weights, size, steps=steps.with_wholes(rewards))

    def _share(self, rows: int) -> slice:
        """Of so many rows those that this rank writes completions of: a share where ranks hold whole weights and the
        same rows, unless there is not a row for each. What is judged together is written together.
        """
        if (ranks := sequence_of(self.runner.model)) is None:
            return slice(0, rows)
        share = ranks.share(rows // self.learning.completions)
        return slice(share.start * self.learning.completions, share.stop * self.learning.completions)

    # -- writing -----------------------------------------------------------------------------------------------

    def rewarded(
        self, rows: Sequence[Mapping[str, Any]], place: Sequence[int], version: int, state: Any = None
    ) -> Made:
        """What this rank writes of its rows by the weights as they are now, rewarded."""
        with self.runner.phases.during("generate"):
            self.publish(version)
            made, completed = self.write(rows, place, version)
        with self.runner.phases.during("reward"):
            self.reward(made, completed, state)
        return made

    def publish(self, version: int) -> None:
        """Has a generator with a copy of the weights write by those that the policy has now."""
        if isinstance(self.generator, HoldsWeights):
            with self.runner.phases.during("generate"):
                self.generator.sync(self.runner.model, version)

    def write(self, rows: Sequence[Mapping[str, Any]], place: Sequence[int], version: int) -> tuple[Made, Completed]:
        """What this rank writes of its rows, and what reward functions see of it."""
        share = self._share(len(rows))
        *where, first = place
        rows, place = rows[share], (*where, first + share.start)
        rollout, conversations, extra_fields = self._written(rows, place, version)
        completed = self._completed(rows, rollout, conversations, extra_fields)
        calls = None if conversations is None else [(each.calls, each.failures) for each in conversations.all]
        return Made(rollout, completed.prompts, completed.completions, calls=calls), completed

    def reward(self, made: Made, completed: Completed, state: Any = None) -> None:
        """Adds the rewards of what was written, and what reward functions logged beside them."""
        beside = LoggedBeside(len(completed))
        logged = {"log_extra": beside.log_extra, "log_metric": beside.log_metric}
        scored = self.rewards.scored(completed, trainer_state=state, **logged)
        made.rollout.rewards, made.rollout.steps = scored
        if self.options.log_completions:
            beside.check()
        made.extra, made.logged = beside.columns, beside.numbers

    def _written(
        self, rows: Sequence[Mapping[str, Any]], place: Sequence[int], version: int
    ) -> tuple[Rollout, Conversations | None, Mapping[str, Any]]:
        """Completions of rows; their conversations, where tools are called; and further columns for rewards."""
        conversations, extra_fields = None, {}
        images = None if self.reader is None else PromptImages.of_rows(self.reader, rows)
        if images:
            self.check_images()
        if self.rollout_func is not None:
            rollout, extra_fields = self._by_function(rows, version)
        else:
            rollout, conversations = self._by_generator(rows, place, version, images)
        rollout.images = images
        if TEACHER_IDS in rows[0]:
            rollout.teacher_prompts = [list(row[TEACHER_IDS]) for row in rows]
        if self.options.mask_truncated_completions:
            rollout.learned = [each.finish == "stop" for each in rollout.completions]
        return rollout, conversations, extra_fields

    def _by_generator(
        self, rows: Sequence[Mapping[str, Any]], place: Sequence[int], version: int, images: PromptImages | None
    ) -> tuple[Rollout, Conversations | None]:
        *where, first = place
        seeds = [seed_of(self.options.seed, *where, first + number) for number in range(len(rows))]  # type: ignore
        conversations = None
        if self.tools is not None:
            most = self.options.max_completion_length
            conversations = self.tools.start(_as_given(rows), max_completion_length=most)
            completions = conversations.write(seeds, self.writer.write, on_any_rank=self._on_any_rank)
            prompts = [each.prompt_ids for each in conversations.all]
        else:
            prompts = [list(row[TEACHER_IDS if self.options.writes_as_teacher else PROMPT_IDS]) for row in rows]
            requests = [
                Request(ids, 1, seed, [] if images is None else images.among(number, ids))
                for number, (ids, seed) in enumerate(zip(prompts, seeds, strict=True))
            ]
            completions = [one for each in self.writer.write(requests) for one in each]
        if self.known_tokens < vocabulary(self.runner.model):
            end = cast(Any, self.tokenizer).eos_token_id or 0
            completions = [each.before(self.known_tokens, end) for each in completions]
        if self.options.writes_as_teacher:
            prompts = [list(row[PROMPT_IDS]) for row in rows]
        return Rollout(prompts, completions, version), conversations

    def _on_any_rank(self, here: bool) -> bool:
        """Whether something holds on any of the ranks that write together."""
        return any(objects_of_all_ranks(here)) if self.writer.has_a_part else here

    def _by_function(self, rows: Sequence[Mapping[str, Any]], version: int) -> tuple[Rollout, Mapping[str, Any]]:
        """What a user's `rollout_func` wrote, and what else it returned.

        Raises:
            ValueError: it returned something else than as many completions, of tokens that the model knows.
        """
        assert self.rollout_func is not None
        with called_for_user("rollout_func", self.rollout_func):
            given = self.rollout_func([row[PROMPT] for row in rows], self.trainer)
        if not isinstance(given, Mapping):
            raise ValueError(
                f"rollout_func must return a dict with keys {', '.join(REQUIRED)}, and returns a {type(given).__name__}"
            )
        missing = [name for name in REQUIRED if name not in given]
        if missing:
            raise ValueError(
                f"rollout_func must return keys {', '.join(REQUIRED)}, and returns no {', '.join(missing)}"
            )
        prompts, written = (_lists(name, given[name], int) for name in ("prompt_ids", "completion_ids"))
        masks = _lists("env_mask", given.get("env_mask"), bool) or [[True] * len(ids) for ids in written]
        numbers = _lists("logprobs", given["logprobs"], _logprob) or [[float("nan")] * len(ids) for ids in written]
        lists = {"prompt_ids": prompts, "completion_ids": written, "env_mask": masks, "logprobs": numbers}
        for name, values in lists.items():
            if len(values) != len(rows):
                raise ValueError(f"rollout_func returned {len(values)} {name} for {len(rows)} prompts: one for each")
        completions, known = [], self.known_tokens
        for number, (ids, mask, probs) in enumerate(zip(written, masks, numbers, strict=True)):
            if not ids or not prompts[number]:
                raise ValueError(f"rollout_func: the prompt or the completion of row {number} has no tokens")
            if not len(ids) == len(mask) == len(probs):
                raise ValueError(
                    f"rollout_func: row {number} has {len(ids)} completion_ids, {len(probs)} logprobs and {len(mask)} "
                    "env_mask: as many of each"
                )
            for token in (*prompts[number], *ids):
                if not 0 <= token < known:
                    raise ValueError(
                        f"rollout_func: row {number} has the token id {token}, and the model has ids from 0 to "
                        f"{known - 1}: return ids of its own tokenizer"
                    )
            ends = ids[-1] in [*self.writer.stop_ids, self.tokenizer.pad_token_id]
            plain = [float("nan")] * len(ids)
            completions.append(Completion(ids, probs, plain, mask, "stop" if ends else "length"))
        rollout = Rollout(prompts, completions, version)
        return rollout, {name: values for name, values in given.items() if name not in (*REQUIRED, "env_mask")}

    def _completed(
        self,
        rows: Sequence[Mapping[str, Any]],
        rollout: Rollout,
        conversations: Conversations | None,
        extra_fields: Mapping[str, Any],
    ) -> Completed:
        """What reward functions see."""
        rows = _as_given(rows)
        if rollout.images:
            rows = rollout.images.seen_in(rows)
        for name, values in extra_fields.items():
            for number, row in enumerate(rows):
                row[name] = values[number] if isinstance(values, list) and number < len(values) else values
        ids = [each.token_ids for each in rollout.completions]
        given: dict[str, Any] = {"completion_ids": ids, "prompt_ids": rollout.prompts}
        if conversations is not None:
            prompts: list[Any] = [each.prompt for each in conversations.all]
            completions: list[Any] = [each.messages for each in conversations.all]
            return Completed.of(rows, prompts, completions, environments=conversations.environments, **given)
        prompts, given["tokenizer"] = [row[PROMPT] for row in rows], self.tokenizer
        texts = self.tokenizer.batch_decode(ids, skip_special_tokens=True)
        if not isinstance(prompts[0], str):
            return Completed.of(rows, prompts, [[{"role": "assistant", "content": text}] for text in texts], **given)
        return Completed.of(rows, prompts, texts, **given)

    # -- scoring -----------------------------------------------------------------------------------------------

    def _scored(self, own: Made, rows: int) -> tuple[Made, Correction | None]:
        """What is learned from, of so many rows, with the log-probabilities that are needed later."""
        made = own if self.together is None else _of_group(own, rows, self.together)
        self.learning.prepare(made.rollout, self.options)
        with self.runner.phases.during("score"):
            return made, self._score(made.rollout)

    def _score(self, rollout: Rollout) -> Correction | None:
        """Log-probabilities that are needed later: of the policy that wrote, and of the reference; and by how much the
        generator's own differ, where that is corrected."""
        wants_reference = self.options.scores_reference and self.runner.reference is not None
        batch = None
        if self.wants_old or self.options.corrects:
            old = rollout.of_scores("plain_logprobs")
            if (unknown := old.isnan()).any():
                batch = rollout.batch()
                old = torch.where(unknown, self._policy(batch).float().cpu(), old)
            rollout.score_values[OLD] = old
        others = self.rollout_func is not None or self.options.written_by_others
        if others and getattr(self.options, "off_policy_mask_threshold", None) is not None:
            sampled = rollout.of_scores("logprobs")
            if not sampled.isnan().all():
                rollout.score_values[SAMPLED] = sampled
        if wants_reference:
            batch = rollout.batch() if batch is None else batch
            if batch.scores:
                found = self.runner.reference_logprobs(batch, self.runner.limits_of(batch))
                rollout.score_values[REFERENCE] = found.float().cpu()
            else:
                rollout.score_values[REFERENCE] = torch.zeros(0)
        if self.learning.reads is not None:
            batch = rollout.batch() if batch is None else batch
            rollout.score_values[VALUE] = self._policy(batch, self.learning.reads).float().cpu()
        return self._corrected(rollout) if self.options.corrects else None

    def _corrected(self, rollout: Rollout) -> Correction:
        """Importance ratios of the policy that wrote against the generator's numbers, kept with the rollout; those of
        the completions that metrics are of."""
        options: Any = self.options
        counts = torch.tensor([sum(flags) for flags in rollout.scored], dtype=torch.long)
        completion = torch.arange(len(counts)).repeat_interleave(counts)

        def of_first(completions: int) -> Correction:
            scores = slice(int(counts[:completions].sum()))
            return correction(
                rollout.score_values[OLD][scores],
                rollout.of_scores("logprobs")[scores],
                completion[scores],
                completions,
                mode=options.vllm_importance_sampling_mode,
                least=options.vllm_importance_sampling_clip_min,
                most=options.vllm_importance_sampling_clip_max,
            )

        found = of_first(len(rollout))
        rollout.score_values[CORRECTION] = found.ratios
        rollout.row_values[LOG_CORRECTION] = found.logs
        reported = self._reported(len(rollout), slice(0, len(rollout)))
        return found if reported == len(rollout) else of_first(reported)

    def _policy(self, batch: Any, head: type[Head] = LanguageModel) -> Float[Tensor, " scores"]:
        """What a head reads off the policy as it is now, by default log-probabilities."""
        if not batch.scores:
            return torch.zeros(0)
        how = {"padding_free": self.runner.padding_free, "temperature": self.options.scored_at, "head": head}
        model = self.runner.model
        return self.runner.scored(batch, lambda part: logprobs(model, part, **how))

    def _finish(self, made: Made, rows: Sequence[Mapping[str, Any]], group: int, epoch: float) -> None:
        """What is learned, and metrics over all ranks."""
        rollout, device = made.rollout, self.runner.device
        of_group = self.group_of(made, group)
        made.rewards = of_group.rewards
        rewarded = Rewarded(
            rollout,
            of_group,
            self.own_of(len(rollout)),
            device,
            epoch,
            evaluated=self.evaluates,
            copies=self.runner.models().copies,
            reported=self.reported,
            rows=rows,
        )
        told = self.learning.teacher_prompts(rewarded, self.options, self.tokenizer)
        if told is not None:
            rollout.teacher_prompts = self.met(told)
        found = self.learning.learn(rewarded, self.options)
        made.advantages = found.values
        rollout.row_values |= found.row_values
        rollout.score_values |= found.score_values
        lengths = rewarded.of_all_ranks(torch.tensor(rollout.lengths, dtype=torch.float32))
        made.figures = Figures(made.rewards, lengths, rewarded.ended)
        made.metrics |= found.metrics | _means_of_calls(made.logged)


def _replaced(values: Sequence[T], places: Sequence[int], others: Sequence[T]) -> list[T]:
    """Values of which some are others."""
    found = dict(zip(places, others, strict=True))
    return [found.get(place, value) for place, value in enumerate(values)]


def _as_given(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows without what preparation added to them."""
    return [{name: value for name, value in row.items() if name not in ADDED} for row in rows]


def _of_group(made: Made, rows: int, together: RankGroup) -> Made:
    """What the ranks of a group wrote of so many rows, one after the other, so that all of them learn from it; where
    each wrote after all of them, what the first did."""
    everyones = together.all_objects(made)
    if len(made.rollout) == rows:
        return everyones[0]
    return replace(Made.concat(everyones), logged=made.logged, calls=made.calls, metrics=made.metrics)


def _means_of_calls(logged: Mapping[str, list[float]]) -> dict[str, float]:
    """Of each name the mean over its calls on all ranks, which need not have logged the same names."""
    calls: dict[str, list[float]] = {}
    for each in objects_of_all_ranks(logged):
        for name, values in each.items():
            calls.setdefault(name, []).extend(values)
    return {name: sum(values) / len(values) for name, values in calls.items()}


def _tool_metrics(calls: Sequence[tuple[int, int]], device: torch.device) -> dict[str, float]:
    """Over all ranks, of the calls of each completion."""
    sums = [sum(each[which] for each in calls) for which in (0, 1)]
    everyones = gathered(torch.tensor([[*sums, len(calls)]], dtype=torch.float32, device=device)).sum(0)
    answered, failures, completions = everyones.tolist()
    return {
        "tools/call_frequency": answered / completions,
        "tools/failure_frequency": failures / answered if answered else 0.0,
    }


def _lists(name: str, rows: Any, kind: Callable[[Any], Any]) -> list[list[Any]]:
    """What a `rollout_func` returned under a name: a list a prompt; none for None.

    Raises:
        ValueError: it is something else.
    """
    try:
        return [[kind(each) for each in row] for row in ([] if rows is None else rows)]
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(
            f"rollout_func must return as {name} a list of lists of numbers, one list a prompt, and some of it is "
            f"something else ({error})"
        ) from error


def _logprob(value: Any) -> float:
    return float("nan") if value is None else float(value)
