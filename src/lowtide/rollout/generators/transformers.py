"""Completions by transformers' `generate`: for models that the ragged generator cannot serve, and to test it against.

Rows are padded on the left, and all of a batch run until the last of them ends. The cuts of the distribution are made
by transformers' own processors, and tokens are drawn by its own draw. Random numbers are seeded by the requests' seeds,
but depend on what else is in the batch.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteria,
    StoppingCriteriaList,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from lowtide.engine.forward import causal_model, computing, embedding_weight, inference
from lowtide.engine.virtual_tokens import prompt_config
from lowtide.ops.counter_random import stream_key
from lowtide.rollout.generators.generator import Completion, Heard, Lengths, Reply, Request, Sampling
from lowtide.rollout.generators.policy import check_requests, not_finite
from lowtide.rollout.generators.rows import Row, write_turns
from lowtide.rollout.generators.stops import Stops


class TransformersGenerator:
    """Writes completions by the model's own `generate`.

    Args:
        tokenizer: of transformers; needed for stop strings alone.
        rows_per_generation_batch: the most completions that are written at once; None for all.
        lengths: as of `RaggedGenerator`.
    """

    def __init__(
        self, tokenizer: Any = None, rows_per_generation_batch: int | None = None, lengths: Lengths | None = None
    ):
        self.tokenizer, self.rows, self.lengths = tokenizer, rows_per_generation_batch, lengths

    def generate(
        self,
        model: nn.Module,
        requests: Sequence[Request],
        sampling: Sampling,
        reply: Reply | None = None,
        heard: Heard | None = None,
    ) -> list[list[Completion]]:
        """The completions of each request, in their order. A completion that is replied to is computed again.

        Args:
            reply: what is returned to a completion that has come to a stop.
            heard: is told each token as it is written, and may end a turn. With further settings of `generate`, such as
                beams, it is told of a turn when it is over.

        Raises:
            ValueError: a request cannot be written; says which and why.
            FloatingPointError: the logits are not finite.
        """
        check_requests(model, requests, sampling)
        if any(request.images for request in requests):
            raise ValueError("`TransformersGenerator` writes after text alone: images need `RaggedGenerator`")
        ends = _TurnEnds(Stops(sampling, self.tokenizer), heard)
        seeds = [request.seed for request in requests]

        def turns(rows: list[Row], turn: int) -> None:
            torch.manual_seed(stream_key(*seeds, turn))
            size = self.rows or len(rows)
            for start in range(0, len(rows), size):
                part = rows[start : start + size]
                if sampling.others:
                    _write_otherwise(model, part, sampling, ends, self.tokenizer)
                else:
                    _write(model, part, sampling, ends)

        device = embedding_weight(model).device
        with inference(model), torch.random.fork_rng([device] if device.type == "cuda" else []):
            return write_turns(turns, requests, sampling, reply, self.lengths)


@dataclass(frozen=True)
class _TurnEnds:
    """Where turns end."""

    stops: Stops
    heard: Heard | None

    def at_end(self, row: Row, token_ids: Sequence[int]) -> bool:
        """Whether the last of the tokens of this turn ends it; `heard` is told of it."""
        told = self.heard is not None and bool(self.heard(row.request, row.number, token_ids[-1]))
        return told or self.stops.at_end(token_ids)


def _write(model: nn.Module, rows: Sequence[Row], sampling: Sampling, turn_ends: _TurnEnds) -> None:
    """Writes one turn of some completions."""
    inner, writer = _writers(model)
    input_ids, mask = _left_padded(rows, embedding_weight(model).device)
    width = input_ids.shape[1]
    record, ends = _Record(rows, sampling), _Ends(rows, width, turn_ends)
    config = GenerationConfig(
        max_new_tokens=max(row.left for row in rows),
        do_sample=sampling.temperature > 0,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        pad_token_id=int(input_ids[0, 0]),
        use_cache=True,
    )
    with _no_defaults(writer, inner), computing(model):
        found = writer.generate(
            input_ids=input_ids,
            attention_mask=mask,
            generation_config=config,
            logits_processor=LogitsProcessorList([record]),
            stopping_criteria=StoppingCriteriaList([ends]),
        )
    record.resolve(found)
    logprobs, plain = (torch.stack(each, dim=1).tolist() for each in (record.logprobs, record.plain))
    tokens = found[:, width:].tolist()
    for place, row in enumerate(rows):
        count, finish = ends.ended[place] or (row.left, "length")
        row.completion.append(tokens[place][:count], logprobs[place][:count], plain[place][:count], written=True)
        row.completion.finish = finish


def _write_otherwise(
    model: nn.Module, rows: Sequence[Row], sampling: Sampling, turn_ends: _TurnEnds, tokenizer: Any
) -> None:
    """Writes one turn of some completions with settings whose distribution is transformers' own, such as beams'. The
    log-probabilities are not known afterwards (NaN)."""
    inner, writer = _writers(model)
    input_ids, mask = _left_padded(rows, embedding_weight(model).device)
    others = dict(sampling.others)
    never = [*sampling.never_ids, *(others.pop("suppress_tokens", None) or ())]
    drawn: dict[str, Any] = {}
    if sampling.temperature > 0:
        drawn = {"temperature": float(sampling.temperature), "top_k": sampling.top_k, "top_p": sampling.top_p}
        drawn |= {"min_p": sampling.min_p} if sampling.min_p else {}
    config = GenerationConfig(
        max_new_tokens=max(row.left for row in rows),
        do_sample=sampling.temperature > 0,
        repetition_penalty=sampling.repetition_penalty,
        eos_token_id=list(sampling.stop_ids) or None,
        pad_token_id=sampling.stop_ids[0] if sampling.stop_ids else int(input_ids[0, 0]),
        stop_strings=list(sampling.stop_strings) or None,
        suppress_tokens=never or None,
        use_cache=True,
        **drawn,
        **others,
    )
    strings = {"tokenizer": tokenizer} if sampling.stop_strings else {}
    with _no_defaults(writer, inner), computing(model):
        found = writer.generate(input_ids=input_ids, attention_mask=mask, generation_config=config, **strings)
    for row, tokens in zip(rows, found[:, input_ids.shape[1] :].tolist(), strict=True):
        most = min(row.left, len(tokens))
        ends = next((count for count in range(1, most + 1) if turn_ends.at_end(row, tokens[:count])), None)
        count = most if ends is None else ends
        row.completion.append(tokens[:count], [math.nan] * count, [math.nan] * count, written=True)
        row.completion.finish = "length" if ends is None else "stop"


def _writers(model: nn.Module) -> tuple[Any, Any]:
    """(the causal model; who generates: with virtual tokens the adapter's model)."""
    inner = causal_model(model)
    return inner, model if prompt_config(model) is not None else inner


def _left_padded(rows: Sequence[Row], device: torch.device) -> tuple[Tensor, Tensor]:
    """(tokens, mask), [rows, longest]: what stands before what is written; padding repeats a prompt's first token."""
    prompts = [row.prompt + row.completion.token_ids for row in rows]
    width = max(map(len, prompts))
    input_ids = torch.tensor([[prompt[0]] * (width - len(prompt)) + prompt for prompt in prompts], device=device)
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
    return input_ids, mask


@contextlib.contextmanager
def _no_defaults(*models: Any) -> Iterator[None]:
    """While it lasts, models have no wishes of their own as to how they generate."""
    before = [(model, model.generation_config) for model in models if hasattr(model, "generation_config")]
    for model, _ in before:
        model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        for model, config in before:
            model.generation_config = config


class _Record(LogitsProcessor):
    """Makes the distribution that is drawn from, and remembers the log-probabilities of what was drawn."""

    def __init__(self, rows: Sequence[Row], sampling: Sampling):
        self.rows, self.sampling = rows, sampling
        self.logprobs: list[Tensor] = []
        self.plain: list[Tensor] = []
        self._last: tuple[Tensor, Tensor] | None = None
        self._cuts = _processors(sampling)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # type: ignore[override]
        self.resolve(input_ids)
        # Padding on the left repeats the first token of the prompt, so that a penalty counts no other one.
        cut = self._cuts(input_ids, scores.clone())  # type: ignore[arg-type]
        plain = torch.log_softmax(scores / (self.sampling.temperature or 1.0), -1)
        finite = plain.amax(-1).isfinite().tolist()
        if not all(finite):
            row = self.rows[finite.index(False)]
            raise not_finite(row.request, row.number, len(self.logprobs))
        drawn_from = torch.log_softmax(cut, -1) if self.sampling.temperature > 0 else torch.zeros_like(cut)
        self._last = (drawn_from, plain)
        return cut

    def resolve(self, input_ids: Tensor) -> None:
        """The last token is what was drawn from the last scores."""
        if self._last is not None:
            drawn, plain = (each.gather(1, input_ids[:, -1:])[:, 0] for each in self._last)
            self.logprobs.append(drawn)
            self.plain.append(plain)
            self._last = None


def _processors(sampling: Sampling) -> LogitsProcessorList:
    found = LogitsProcessorList()
    if sampling.repetition_penalty != 1:
        found.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    if sampling.never_ids:
        found.append(SuppressTokensLogitsProcessor(list(sampling.never_ids)))
    if sampling.temperature not in (0, 1):
        found.append(TemperatureLogitsWarper(float(sampling.temperature)))
    if sampling.temperature > 0:
        if sampling.top_k > 0:
            found.append(TopKLogitsWarper(sampling.top_k))
        if sampling.top_p < 1:
            found.append(TopPLogitsWarper(sampling.top_p))
        if sampling.min_p > 0:
            found.append(MinPLogitsWarper(sampling.min_p))
    return found


class _Ends(StoppingCriteria):
    """Says which rows are over, and remembers where and why they ended."""

    def __init__(self, rows: Sequence[Row], width: int, turn_ends: _TurnEnds):
        self.rows, self.width, self.turn_ends = rows, width, turn_ends
        self.ended: list[tuple[int, Any] | None] = [None] * len(rows)

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:  # type: ignore[override]
        written = input_ids[:, self.width :].tolist()
        for place, row in enumerate(self.rows):
            if self.ended[place] is not None:
                continue
            count = len(written[place])
            if self.turn_ends.at_end(row, written[place]):
                self.ended[place] = (count, "stop")
            elif count >= row.left:
                self.ended[place] = (count, "length")
        return torch.tensor([each is not None for each in self.ended], device=input_ids.device)
