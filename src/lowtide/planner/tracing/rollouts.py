"""The phases of a run whose policy writes: prompts run through it, keys and values are held, the reference scores.

The generator itself draws tokens, which tensors without values cannot; so prompts, reward models and what is scored
before an update are traced, with the images that they show, and keys, values and the logits of a token are made as
large as they get. Those of completions are counted as if none ended early, which is an upper bound. What a reward
function takes is not counted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from typing import Any, NamedTuple, cast

import torch
from datasets import Dataset
from torch import Tensor, nn

from lowtide.compat.torch import without_modes
from lowtide.data.batches.images import ImageReader
from lowtide.data.batches.values import OLD, REFERENCE, TEACHER, VALUE
from lowtide.data.prompts import PROMPT_IDS, TEACHER_IDS
from lowtide.engine.forward import COMPUTED_IN, SPLIT_OVER, causal_model, embedding_weight, score_shared, sequence_of
from lowtide.engine.heads.head import Head, Scores
from lowtide.engine.heads.language_model import LanguageModel
from lowtide.engine.reference import ReferenceModel, logprobs
from lowtide.engine.weights.generation_copy import GenerationCopy
from lowtide.methods.online.learning import Learning
from lowtide.methods.online.rollouts import LongestGroups
from lowtide.ops.logits.logit_rows import Want
from lowtide.planner.tracing.generation_copies import traced_copy
from lowtide.planner.tracing.reward_models import reward_completions
from lowtide.planner.tracing.trace import StorageTrace
from lowtide.ragged import PositionRule, RaggedBatch, SegmentImage, Shown
from lowtide.rollout.generators.cache import padded_tokens
from lowtide.rollout.generators.support import why_not_described
from lowtide.rollout.images import PromptImages
from lowtide.score_rules import IGNORE
from lowtide.step.runner import StepRunner

LOGITS = 3
"""How many times the logits of a token are there at most while it is drawn."""


class TracedPrompt(NamedTuple):
    """A prompt that is written for."""

    token_ids: Sequence[int]
    images: Sequence[SegmentImage] = ()


@dataclass
class TracedWriting:
    """Completions that a model writes: its prompts run through it, and keys and values are held.

    Args:
        options: of the run.
        layers: of the model that is traced.
        aside: its layers are not those that the trace is of.
        position_rule: how it counts positions on several axes.
        copy: of its weights, by which it writes.
    """

    model: nn.Module
    padding_free: bool
    options: Any
    trace: StorageTrace
    layers: int
    aside: bool = False
    position_rule: PositionRule | None = None
    copy: GenerationCopy | None = None

    def run(self, prompts: Sequence[TracedPrompt], each: int, like: RaggedBatch) -> None:
        """Prompts run first, when the keys of completions are not there yet, unless a budget lets prompts in later.

        Args:
            prompts: that are written for together, the longest first.
            each: completions of a prompt.
            like: a batch on fake tensors.
        """
        padded = self.options.generation_backend == "transformers" or not self.padding_free
        if padded or why_not_described(self.model) is not None:
            self._write_padded(prompts, each, like)
            return
        with traced_copy(self.copy, self.model, 0 if self.aside else self.layers, self.trace):
            self._write(prompts, each, like)

    def _write_padded(self, prompts: Sequence[TracedPrompt], each: int, like: RaggedBatch) -> None:
        """As `generate`, which repeats a prompt, and pads it."""
        count, longest = len(prompts) * each, len(prompts[0].token_ids)
        held = self._keys(count * longest)
        self._run_prompts([prompts[0]] * count, like)
        del held
        held = self._keys(count * (longest + self.options.most_written), grows=1.0)
        self._draw(count)
        del held

    def _write(self, prompts: Sequence[TracedPrompt], each: int, like: RaggedBatch) -> None:
        """As lowtide's own generator."""
        count, most = len(prompts) * each, self.options.most_written
        enter_later = self.options.tokens_per_generation_batch is not None
        held = self._keys(count * most, grows=0.5) if enter_later else []
        held += self._keys(padded_tokens([len(prompt.token_ids) for prompt in prompts]))
        self._run_prompts(prompts, like)
        held += [] if enter_later else self._keys(count * most, grows=0.5)
        self._draw(count)
        del held

    def _draw(self, count: int) -> None:
        """The logits of a token of so many completions."""
        vocabulary = embedding_weight(self.model).shape[0]
        logits = [torch.empty(count, vocabulary) for _ in range(LOGITS)]
        del logits

    def _keys(self, tokens: int, grows: float = 0.0) -> list[Tensor]:
        """Keys and values of all layers.

        Args:
            grows: the share of one tensor that is there twice as tensors grow, one after the other.
        """
        inner = causal_model(self.model)
        config: Any = inner.config.get_text_config()
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        dtype = vars(inner).get(COMPUTED_IN) or next(p.dtype for p in self.model.parameters())
        found = [torch.empty(int(grows * tokens), heads, dim, dtype=dtype)] if grows else []
        for layer in range(self.layers):
            pieces = [torch.empty(tokens, heads, dim, dtype=dtype) for _ in range(2)]
            self.trace.belongs(pieces, "keys", None if self.aside else self.trace.place(layer))
            found += pieces
        return found

    def _run_prompts(self, prompts: Sequence[TracedPrompt], like: RaggedBatch) -> None:
        """The prompts through the model, of whose last tokens alone anything is read."""
        tokens = [list(prompt.token_ids) for prompt in prompts]
        with without_modes():
            shown = Shown([prompt.images for prompt in prompts], self.position_rule)
            batch = RaggedBatch.from_segments(tokens, [[IGNORE] * len(each) for each in tokens], shown=shown)
        fake = like.token_ids.fake_mode  # type: ignore[attr-defined]
        score_shared(self.model, batch.map(fake.from_tensor), padding_free=self.padding_free)


@dataclass
class TracedCompletions:
    """What comes before a step on rows whose completions are written anew, by the policy, by a teacher, or by either.

    Args:
        prompts: of the rows of a micro-batch, which are written for together.
        writers: who may write.
    """

    prompts: list[TracedPrompt]
    writers: Sequence[TracedWriting]
    trace: StorageTrace

    @torch.no_grad()
    def run(self, batch: RaggedBatch) -> RaggedBatch:
        """The phases before a step; the batch that it then learns from."""
        for writer in self.writers:
            training = writer.model.training
            writer.model.eval()
            with self.trace.during("generate"):
                writer.run(sorted(self.prompts, key=lambda each: len(each.token_ids), reverse=True), 1, batch)
            writer.model.train(training)
        return batch


@dataclass
class TracedRollout:
    """What comes before a step.

    Args:
        learning: what is made of completions.
        dataset: prepared prompts, of which the longest are written for.
        layers: of the model that is traced.
        rewarding: reward models, on tensors without memory.
        reader: makes the images of prompts ready, for a vision-language model.
        copy: of the policy's weights, by which it writes.
    """

    learning: Learning
    runner: StepRunner
    dataset: Dataset
    trace: StorageTrace
    layers: int
    rewarding: Sequence[nn.Module] = ()
    reader: ImageReader | None = None
    copy: GenerationCopy | None = None

    def run(self, batch: RaggedBatch) -> RaggedBatch:
        """The phases before a step; the batch that it then learns from.

        Args:
            batch: a micro-batch, on fake tensors.
        """
        options: Any = self.runner.options
        with without_modes():
            prompts = longest_prompts(options, self.dataset, self.reader)
        training = self.runner.model.training
        self.runner.model.eval()
        with self._share(prompts, options.num_generations) as (prompts, each):
            with torch.no_grad(), self.trace.during("generate"):
                self._generate(prompts, each, batch)
            if self.rewarding:
                with self.trace.during("reward"):
                    fake = batch.token_ids.fake_mode  # type: ignore[attr-defined]
                    tokens = [prompt.token_ids for prompt in prompts]
                    reward_completions(self.rewarding, tokens, each, options.max_completion_length, fake)
        with self.trace.during("score"):
            scored = self._score(batch)
        self.runner.model.train(training)
        return replace(batch, score_values={**batch.score_values, **scored})

    @contextlib.contextmanager
    def _share(self, prompts: list[TracedPrompt], each: int) -> Iterator[tuple[list[TracedPrompt], int]]:
        """What one of the ranks writes that hold the same rows: some of the prompts, with the completions of each.
        While it lasts, nothing splits its tokens."""
        inner = causal_model(self.runner.model)
        sequence = sequence_of(inner)
        if sequence is None:
            yield prompts, each
            return
        vars(inner)[SPLIT_OVER] = None
        try:
            yield prompts[: -(-len(prompts) // sequence.size)], -(-each // max(sequence.size // len(prompts), 1))
        finally:
            vars(inner)[SPLIT_OVER] = sequence

    def _generate(self, prompts: list[TracedPrompt], each: int, batch: RaggedBatch) -> None:
        options: Any = self.runner.options
        if options.use_vllm:
            torch.empty(0)  # it is a phase all the same
            return
        rule = None if self.reader is None else self.reader.position_rule
        writing = TracedWriting(
            self.runner.model,
            self.runner.padding_free,
            options,
            self.trace,
            self.layers,
            position_rule=rule,
            copy=self.copy,
        )
        writing.run(prompts, each, batch)

    def _score(self, batch: RaggedBatch) -> dict[str, Tensor]:
        """What a micro-batch is scored by before the update, as `RolloutMaker` does it: by the policy where its
        generator's numbers do not serve, by the reference, by a value function."""
        options: Any = self.runner.options
        repeats = options.steps_of_generation * options.num_iterations
        stale = options.gradient_accumulation_steps % repeats != 0
        scored = {}
        if options.written_by_others and (options.corrects or self.learning.wants_old(options, stale=stale)):
            scored[OLD] = self._policy(batch)
        if options.scores_reference and self.runner.reference is not None:
            scored[REFERENCE] = self.runner.reference(batch)
        if TEACHER_IDS in self.dataset.column_names:
            scored |= self._taught(batch)
        if self.learning.reads is not None:
            scored[VALUE] = self._policy(batch, self.learning.reads)
        if getattr(options, "top_entropy_quantile", 1.0) < 1.0:
            want = Want(entropies=True)
            scores = Scores(batch.score_index, batch.score_target, want=want, temperature=options.temperature)
            score_shared(self.runner.model, batch, scores, padding_free=self.runner.padding_free)
        return scored

    def _taught(self, batch: RaggedBatch) -> dict[str, Tensor]:
        """What a teacher with prompts of its own says of a micro-batch, which it reads after its longest ones."""
        options: Any = self.runner.options
        most, budget = options.max_completion_length, options.tokens_per_microbatch
        each = min(options.num_generations // self.learning.completions, options.per_device_train_batch_size)
        groups = LongestGroups(self.learning, each, most, budget, options.prefix_sharing)
        count = 1 if budget else -(-options.per_device_train_batch_size // each)
        with without_modes():
            prompts = sorted(self.dataset[TEACHER_IDS], key=len, reverse=True)[:count]
            whole = groups([{PROMPT_IDS: [ids[-1]] * options.most_told(len(ids))} for ids in prompts])
        fake = batch.token_ids.fake_mode  # type: ignore[attr-defined]
        reference, objective = cast(ReferenceModel, self.runner.reference), self.runner.method_objective
        if not objective.taught:
            found = reference(whole.thinned(batch.scores).map(fake.from_tensor))
            return {REFERENCE: found.new_zeros(batch.scores)}
        states = reference.states(whole.map(fake.from_tensor))
        return {TEACHER: states.new_zeros(batch.scores, states.shape[1])}

    def _policy(self, batch: RaggedBatch, head: type[Head] = LanguageModel) -> Tensor:
        options: Any = self.runner.options
        how = {"padding_free": self.runner.padding_free, "temperature": options.scored_at, "head": head}
        return logprobs(self.runner.model, batch, **how)


def longest_prompts(options: Any, dataset: Dataset, reader: ImageReader | None = None) -> list[TracedPrompt]:
    """The prompts of this rank that may be written for together, as long as the data has them, with their images."""
    count = max(options.written_at_a_time // options.num_generations // max(options.world_size, 1), 1)
    lengths = [len(ids) for ids in dataset[PROMPT_IDS]]
    rows = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    budget, chosen, taken = options.tokens_per_generation_batch, [], 0
    for row in islice(cycle(rows), count):
        each = lengths[row] + options.num_generations * options.max_completion_length
        if chosen and budget is not None and taken + each > budget:
            break
        chosen.append(row)
        taken += each
    if reader is None:
        return [TracedPrompt([1] * lengths[row]) for row in chosen]
    plain = dataset.with_format(None)
    images = PromptImages.of_rows(reader, [plain[row] for row in chosen])
    ids = [plain[row][PROMPT_IDS] for row in chosen]
    return [TracedPrompt(each, images.among(number, each)) for number, each in enumerate(ids)]
