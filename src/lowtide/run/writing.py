"""Who writes completions: which generator, with how much at a time, and again with less where memory runs out."""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from torch import nn
from transformers import PreTrainedTokenizerBase

from lowtide.engine.forward import causal_model, parted_over
from lowtide.engine.over_ranks.stage import stage_of
from lowtide.engine.reference import ReferenceModel
from lowtide.engine.weights.sharded.split_vocabulary import whole_vocabulary
from lowtide.engine.weights.sharded.zero import weights_for_writing
from lowtide.memory.allocators.out_of_memory import drop_frames, free_caches, is_out_of_memory
from lowtide.methods.online.rollouts import RolloutOptions, WritingOptions
from lowtide.rollout.conversations import Conversations
from lowtide.rollout.generators.generator import Completion, Generator, HoldsWeights, Request
from lowtide.rollout.generators.ragged import RaggedGenerator
from lowtide.rollout.generators.support import why_not
from lowtide.rollout.generators.transformers import TransformersGenerator
from lowtide.run.inputs.loading import stop_ids
from lowtide.run.vllm import make_vllm_generator
from lowtide.step.runner import StepRunner

logger = logging.getLogger(__name__)

STAGES = "whose layers are split into the stages of pipeline_parallel_size"
NO_BUDGET = "; it writes all at once, so that tokens_per_generation_batch has no effect"


@dataclass
class Writer:
    """Writes completions of prompts."""

    options: WritingOptions
    runner: StepRunner
    tokenizer: PreTrainedTokenizerBase
    generator: Generator
    reference: ReferenceModel | None = None
    """Who writes in the policy's place."""
    never_ids: tuple[int, ...] = ()
    """Tokens that are not written."""

    @property
    def model(self) -> nn.Module:
        """Who writes."""
        return self.runner.model if self.reference is None else self.reference.model

    @property
    def has_a_part(self) -> bool:
        """Whether this rank has a part of the weights, so that ranks write together."""
        return self.runner.together or parted_over(self.model) is not None

    @property
    def waited_for(self) -> bool:
        """Whether other ranks wait for this one while it writes, for what it has of the weights."""
        gathers_all = self.options.ds3_gather_for_generation is True and parted_over(self.model) is None
        return self.has_a_part and not gathers_all

    def write(self, requests: Sequence[Request], conversations: Conversations | None = None) -> list[list[Completion]]:
        """The completions of each request; again with half as many tokens at a time where memory runs out."""
        sampling = replace(self.options.sampling(self.stop_ids), never_ids=self.never_ids)
        gather = cast(bool | int, self.options.ds3_gather_for_generation)
        copied = isinstance(self.generator, HoldsWeights)
        with (
            contextlib.nullcontext() if self.reference is None else self.reference.active(),
            contextlib.nullcontext() if copied else weights_for_writing(self.model, gather),
        ):
            while True:
                try:
                    return self.generator.generate(self.model, requests, sampling, conversations)
                except Exception as error:
                    is_last = self.waited_for or conversations is not None
                    if not is_out_of_memory(error) or is_last or not self._writes_less(requests):
                        raise
                    drop_frames(error)
                free_caches()

    def _writes_less(self, requests: Sequence[Request]) -> bool:
        """Halves what is written at a time; False where that is one completion already."""
        generator = self.generator
        if not isinstance(generator, RaggedGenerator):
            return False
        most = self.options.most_written
        least = max(len(each.prompt_ids) for each in requests) + most
        total = sum(len(each.prompt_ids) + each.count * most for each in requests)
        half = max((generator.budget or total) // 2, least)
        if half >= (generator.budget or total):
            return False
        generator.budget = half
        logger.warning(
            f"out of memory while writing completions: at most {half:,} tokens are held at a time from now on"
        )
        return True

    @property
    def stop_ids(self) -> list[int]:
        """The tokens that end a completion: the tokenizer's, and those of the model's generation config."""
        return stop_ids(self.model, self.tokenizer)


def make_generator(
    options: WritingOptions, model: nn.Module, tokenizer: Any, padding_free: bool
) -> tuple[Generator, str]:
    """Who writes, and why.

    Raises:
        ValueError: the one that is asked for cannot; says why.
    """
    in_stages = stage_of(causal_model(model)) is not None
    if isinstance(options, RolloutOptions) and options.use_vllm:
        if in_stages:
            raise ValueError(f"use_vllm=True cannot have the weights of a model {STAGES}: leave one of them out")
        return make_vllm_generator(options, model, tokenizer, padding_free)
    with whole_vocabulary(model):
        reason = "runs padded" if not padding_free else why_not(model)
    if options.of_generate and reason is None:
        reason = f"is to write by {', '.join(options.of_generate)}, of generation_kwargs"
    if in_stages and (options.generation_backend == "transformers" or reason is not None):
        why = (
            "generation_backend='transformers'" if reason is None else f"transformers' generate, as the model {reason},"
        )
        raise ValueError(f"{why} cannot write with a model {STAGES}: only lowtide's own generator can")
    if options.generation_backend == "lowtide" and reason is not None:
        raise ValueError(
            f"generation_backend='lowtide' cannot write with this model, which {reason}: leave it at 'auto'"
        )
    if options.generation_backend == "transformers" or reason is not None:
        why = "" if reason is None else f", since the model {reason}"
        all_at_once = "" if options.tokens_per_generation_batch is None else NO_BUDGET
        return TransformersGenerator(tokenizer), f"transformers' generate{why}{all_at_once}"
    budget = options.tokens_per_generation_batch
    held = "" if budget is None else f", at most {budget:,} tokens of keys and values at a time"
    return RaggedGenerator(tokenizer, budget), f"lowtide's own: a prompt is computed once for its completions{held}"


def seed_of(*numbers: int) -> int:
    """One number of several, the same on every machine."""
    return int.from_bytes(hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest(), "big") >> 1


def check_writes_after_images(generator: Generator) -> None:
    """Refuses a generator that reads prompts as text alone.

    Raises:
        ValueError: names the options that choose one.
    """
    if not isinstance(generator, RaggedGenerator):
        raise ValueError(
            "prompts show images, and only lowtide's own generator writes after them, which this run does not use: "
            "leave out use_vllm=True, padding_free=False and generation_backend='transformers'"
        )
