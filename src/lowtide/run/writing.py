"""Who writes completions: which generator, with how much at a time, and again with less where memory runs out."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from lowtide.engine.forward import causal_model, parted_over
from lowtide.engine.over_ranks.stage import stage_of
from lowtide.engine.reference import ReferenceModel
from lowtide.engine.weights.generation_copy import GenerationCopy
from lowtide.engine.weights.sharded.split_vocabulary import whole_vocabulary
from lowtide.engine.weights.sharded.zero import weights_for_writing
from lowtide.memory.allocators.measure import bytes_text
from lowtide.memory.allocators.out_of_memory import drop_frames, free_caches, is_out_of_memory
from lowtide.memory.optimizers.states import States, optimizer_name, predict_states
from lowtide.memory.weights.streaming import stream_of
from lowtide.methods.online.rollouts import COPIED, RolloutOptions, WritingOptions
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
                    written = self.generator.generate(self.model, requests, sampling, conversations)
                    return [[self._as_known(each) for each in group] for group in written]
                except Exception as error:
                    is_last = self.waited_for or conversations is not None
                    if not is_out_of_memory(error) or is_last or not self._writes_less(requests):
                        raise
                    drop_frames(error)
                free_caches()

    def _as_known(self, completion: Completion) -> Completion:
        """A completion, without log-probabilities of the policy where others than the policy's weights wrote it."""
        if self.options.generation_weights == "merged":
            completion.plain_logprobs = [math.nan] * len(completion.plain_logprobs)
        return completion

    def _writes_less(self, requests: Sequence[Request]) -> bool:
        """Writes by no copy of the weights from now on, or halves what is written at a time; False where that is one
        completion already."""
        generator = self.generator
        if not isinstance(generator, RaggedGenerator):
            return False
        if generator.copy is not None:
            generator.copy = None
            logger.warning("out of memory while writing completions: trained weights write them from now on, no copy")
            return True
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
    chosen = generation_copy(options, model)
    text = f"lowtide's own: a prompt is computed once for its completions{held}{chosen.text}"
    return RaggedGenerator(tokenizer, budget, copy=chosen.copy), text


class ChosenCopy(NamedTuple):
    """The copy of its weights that a model writes by, if any, and what there is to say of it."""

    copy: GenerationCopy | None
    text: str = ""


def generation_copy(options: Any, model: nn.Module) -> ChosenCopy:
    """That of a run.

    Args:
        options: of the run.

    Raises:
        ValueError: one is asked for that cannot be made; says why.
    """
    device = options.device
    whole = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
    states = partial(predict_states, model, optimizer_name(options))
    return chosen_copy(options, model, lambda copy: copy.bytes_of(model), states, whole)


def chosen_copy(
    options: Any,
    model: nn.Module,
    size_of: Callable[[GenerationCopy], int],
    states: Callable[[], States],
    device_bytes: int | None,
) -> ChosenCopy:
    """The same, told of the model's sizes.

    Args:
        device_bytes: of a GPU; None elsewhere.
    """
    asked = options.generation_weights
    if asked == "trained":
        return ChosenCopy(None, "; by the trained weights themselves")
    reason = why_no_copy(options, model)
    if reason is not None and asked in COPIED:
        raise ValueError(f"generation_weights={asked!r} copies whole weights, and {reason}: leave it at 'auto'")
    if reason is not None:
        return ChosenCopy(None, f"; by no copy of the weights, since {reason}")
    copy = GenerationCopy(merges=asked == "merged")
    size = size_of(copy)
    if getattr(options, "memory_budget", None) is not None:
        device_bytes = None  # the room of the device is not the run's
    if size == 0:
        return ChosenCopy(None)
    if asked == "auto" and not has_room(size, states(), device_bytes, waits=not options.optimizer_in_backward):
        return ChosenCopy(
            None,
            f"; by no copy of the weights, for which there is no room (generation_weights='copy' takes "
            f"{bytes_text(size)} for it)",
        )
    merged = ", adapters merged in 16 bits too, which changes numbers" if copy.merges else ""
    text = f"; by a copy of the weights in the dtype of products{merged}, gone before the update ({bytes_text(size)})"
    return ChosenCopy(copy, text)


def why_no_copy(options: Any, model: nn.Module) -> str | None:
    """What keeps weights from being copied to write by, as a clause; None where nothing does."""
    if stream_of(model) is not None:
        return "they are streamed"
    sharding = options.sharding
    if sharding.cuts_weights or sharding.by_deepspeed or max(sharding.tensor_parallel, sharding.pipeline_parallel) > 1:
        return "they are cut over ranks, or another engine's"
    if options.torch_compile:
        return "compiled layers hold those that they were compiled with"
    return None


def has_room(copied: int, states: States, device_bytes: int | None, *, waits: bool) -> bool:
    """Whether a copy is made where it is not asked for: in the place of the gradients, which are not there yet while
    completions are written; or on a GPU of which it takes a half at most, together with weights, gradients and
    optimizer states.

    Args:
        copied: its bytes.
        device_bytes: of a GPU; None elsewhere.
        waits: whether gradients are held until the step.
    """
    if waits and copied <= states.gradients:
        return True
    return device_bytes is not None and states.total + copied <= device_bytes // 2


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
