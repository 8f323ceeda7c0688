"""Proof on the real model, before the first step, that its ragged numbers are the padded computation's.

A few tiny forwards: what the model's own dense outputs say of some rows, what its fused head says of the same rows
padded, what the ragged engine says of them laid end to end, and what it says when one of them is another. If the
second differs from the first, the head is not understood and nothing may run. If the third does, or if a row's
numbers move with its neighbour, segments see each other, and the model runs padded. How far they move depends on the
size of the weights, so they may not move at all, unless a model has experts, which are given other tokens then, or its
padded rows move too (scales of quantization that are a batch's).
"""

from __future__ import annotations

import contextlib
import functools
import math
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from lowtide.compat.torch import gathered
from lowtide.compat.transformers import rotary_limits_lowered
from lowtide.engine.attention import ragged_inputs
from lowtide.engine.forward import (
    causal_model,
    compute_quantized,
    computing,
    embedding_weight,
    inference,
    install,
    model_beside,
    score,
    vocabulary,
)
from lowtide.engine.heads import head_of
from lowtide.engine.heads.head import Head, ScoreOutput, Scores
from lowtide.engine.layers.mixers import chunks_of, mixers, observed_mixers
from lowtide.engine.over_ranks.split_plan import SharedHeads, SplitPlan
from lowtide.engine.weights.sharded.split_vocabulary import whole_vocabulary
from lowtide.ops.attention.attention_plan import PLAN
from lowtide.ops.attention.varlen_attention import BACKENDS, observed_backends
from lowtide.ops.installed_kernels import Kernel, observed_kernels
from lowtide.process.versions import version_of
from lowtide.ragged import RaggedBatch
from lowtide.ranks.sequence import SequenceParallel
from lowtide.score_rules import IGNORE, NEXT_TOKEN, ScoreRule, ShiftedRight

TOLERANCE = {torch.float64: 1e-6, torch.float32: 2e-3, torch.float16: 5e-2, torch.bfloat16: 2e-1}
"""Largest mean difference of log-probs (nats) that rounding explains, by the dtype of the weights."""
EXACT_ON_CPU = 1e-4
"""The same for segments laid end to end in float32 on a CPU, which has no faster and coarser products. In the families
of `tests/exactness` it is 7e-7; positions that run on through a batch show as 1e-3 under small weights."""
LONG = 9
"""Tokens above which the probe's rows count as long for rotary embeddings that depend on it: some of them are."""
CHUNK = 4
"""Tokens of a recurrence's chunk in the probe: its rows have several."""
SHORT = 7
"""The same where ranks split two rows."""
LEAK = {torch.float64: 1e-9, torch.float32: 2e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""The same where only a neighbour's tokens differ, for models in which these change shapes or scales; in all others the
bits are equal, since shapes and kernels are."""


@dataclass(frozen=True)
class Probe:
    """What the probe found: mean differences of a head's numbers from the dense ones, log-probs in nats say."""

    head_error: float
    """Of the fused head."""
    ragged_error: float
    """Of segments laid end to end."""
    leak: float
    """How far a segment's numbers move when its neighbour's tokens are others."""
    prefix_error: float
    """Of a segment that goes on from a shared prefix."""
    tolerance: float
    leak_tolerance: float
    attends: bool = True
    """Whether some of its layers attend by the engine's attention, or mix tokens by its recurrences, which alone know
    of segments; of the latter, whether all do."""
    error: Exception | None = None
    """What the model raised when it was given segments laid end to end; the three errors of segments are then inf."""

    def joined(self, other: Probe | None) -> Probe:
        """The worse of two models of which both run in a step."""
        if other is None:
            return self
        names = ("head_error", "ragged_error", "leak", "prefix_error", "leak_tolerance")
        worse = {name: max(getattr(self, name), getattr(other, name)) for name in names}
        attends = self.attends and other.attends
        return replace(self, **worse, attends=attends, error=self.error or other.error)

    @property
    def isolated(self) -> bool:
        """Whether segments leave each other alone."""
        return self.attends and self.ragged_error <= self.tolerance and self.leak <= self.leak_tolerance

    @property
    def shares_prefixes(self) -> bool:
        """Whether a prefix can be computed once for several segments."""
        return self.isolated and self.prefix_error <= self.tolerance


@contextlib.contextmanager
def _of_its_own(model: Any) -> Iterator[None]:
    """Says of what a model's own forward raises whose fault it is."""
    try:
        yield
    except (AttributeError, TypeError, NotImplementedError) as error:
        raise ValueError(
            f"the forward of model type {model.config.model_type} fails in transformers {version_of('transformers')} "
            f"({type(error).__name__}: {error}), so that nothing can be compared with it: another version "
            "of transformers may run it"
        ) from error


def probe(model: nn.Module, *, ragged: bool = True) -> Probe:
    """Installs the engine in a model and compares it with the model's own outputs.

    Args:
        model: with a head of `engine.heads`, or a PEFT wrapper of such a model, on any device; left in the mode it was
            in.
        ragged: False looks at the head alone, and leaves the model to run padded.

    Raises:
        ValueError: the head's numbers are not those of the model's own outputs; names the model type.
    """
    inner = causal_model(model)
    compute_quantized(inner)
    weight = embedding_weight(model)
    tolerance = TOLERANCE.get(weight.dtype, TOLERANCE[torch.bfloat16])
    first, second, more = _rows(vocabulary(model))
    head = head_of(inner)
    padding = head.pad_id(inner)
    if padding is not None:
        second, more = [*second, padding], [*more, padding]
    batches = _batches(head.score_rule(inner), first, second, more)
    plain, shared, changed = (batch.to(weight.device) for batch in batches)
    with inference(model), rotary_limits_lowered(inner, LONG), chunks_of(CHUNK):
        with whole_vocabulary(model), _of_its_own(inner):
            expected = _dense(model, head, plain)
        install(model, padding_free=False)
        padded = score(model, plain, padding_free=False).scored
        head_error = head.distances(padded, expected).mean().item()
        if not head_error <= tolerance:
            raise ValueError(
                f"model type {inner.config.model_type} cannot be trained by lowtide: {_why_unlike(model, plain)}, so "
                f"that the {head.numbers} in training would differ from those of its own forward by {head_error:.2g}"
                f"{head.unit} on average (rounding explains {tolerance:.0e}). Choose a model of another type"
            )
        if not ragged:
            return Probe(head_error, math.inf, math.inf, math.inf, tolerance, 0.0).joined(_of_other(model, ragged))
        after = next(part.score_start for part in plain.segments if part.row == 1)
        beside = score(model, changed, padding_free=False).scored[after:]
        rounded = _has_experts(inner) or bool(head.distances(beside, padded[after:]).max() > 0)
        leak_tolerance = LEAK.get(weight.dtype, LEAK[torch.bfloat16]) if rounded else 0.0
        install(model)
        failure, backends, ran = None, set[str](), set[nn.Module]()
        try:
            _check_sees_all(inner)
            with observed_backends() as backends, observed_mixers() as ran:
                laid_out = score(model, plain).scored
            ragged_error = head.distances(laid_out, expected).mean().item()
            leak = head.distances(score(model, changed).scored[after:], laid_out[after:]).max().item()
            start, stop = next(
                (part.score_start, part.score_stop) for part in reversed(shared.segments) if part.prefix >= 0
            )
            sharing = score(model, shared).scored[start:stop]
            prefix_error = head.distances(sharing, expected[-len(sharing) :]).mean().item()
        except (TypeError, ValueError, RuntimeError) as error:  # a model that cannot take the ragged inputs, or worse
            traceback.clear_frames(error.__traceback__)  # they hold the tensors of the forward
            ragged_error, leak, prefix_error, failure = math.inf, math.inf, math.inf, error
    limits = (_of_segments(tolerance, inner, weight), leak_tolerance)
    attends = bool(backends or ran) and ran.issuperset(mixers(inner))
    found = Probe(head_error, ragged_error, leak, prefix_error, *limits, attends, failure)
    return found.joined(_of_other(model, ragged))


def _why_unlike(model: nn.Module, batch: RaggedBatch) -> str:
    """Why the numbers of padded rows are not those of a model's own logits, as a clause."""
    inner = causal_model(model)
    head = head_of(inner)
    if head.score_rule(inner) is NEXT_TOKEN:
        device = batch.token_ids.device
        own = [batch.token_ids[part.start : part.stop].tolist() for part in batch.segments]
        rows = [RaggedBatch.from_segments([tokens]).to(device) for tokens in own]
        alone = torch.cat([score(model, row, padding_free=False).scored for row in rows])
        with whole_vocabulary(model):
            expected = torch.cat([_dense(model, head, row) for row in rows])
        if head.distances(alone, expected).mean() <= TOLERANCE.get(alone.dtype, TOLERANCE[torch.bfloat16]):
            return "padding after a row changes what the row's tokens see"
    return "it makes its logits of something else than its body's last hidden states, or changes them afterwards"


def _of_segments(tolerance: float, model: nn.Module, weight: Tensor) -> float:
    """What rounding explains of the numbers of segments laid end to end; of the head's, `tolerance`."""
    exact = weight.dtype == torch.float32 and weight.device.type == "cpu" and not getattr(model, "is_quantized", False)
    return EXACT_ON_CPU if exact else tolerance


SELECTING = ("indexer", "compressor")
"""Names of the modules by which a layer's attention chooses among earlier keys, or sums them up."""


def _check_sees_all(model: nn.Module) -> None:
    """Refuses layers whose attention chooses among keys in a way that may begin only above a length, so that no short
    row shows it.

    Raises:
        ValueError: names the module.
    """
    for name, module in model.named_modules():
        if name.rsplit(".", 1)[-1] in SELECTING:
            raise ValueError(f"{type(module).__name__} ({name}) chooses or sums up the keys that a token sees")


def _has_experts(model: nn.Module) -> bool:
    """Whether a model gives tokens to experts: the shapes that each computes then depend on all tokens."""
    return any("expert" in word or "moe" in word for m in model.modules() for word in [type(m).__name__.lower()])


def _of_other(model: nn.Module, ragged: bool) -> Probe | None:
    """Of the model that is trained beside; None if there is none."""
    other = model_beside(model)
    if other is None:
        return None
    with gathered(model, other):  # what of it is left to the whole model
        return probe(other, ragged=ragged)


def probe_split(model: nn.Module, sequence: SequenceParallel) -> tuple[float, float, frozenset[SharedHeads]]:
    """Runs two tiny segments whole and split over ranks, which call it together.

    Args:
        model: prepared by `install`.

    Returns:
        the mean difference between the two, the largest that rounding explains, and how the heads of its layers were
        shared out; the worse difference, and the heads of both, where another model is trained beside it.
    """
    weight, batch = embedding_weight(model), tiny_batch(model)
    scores, found, split = Scores(batch.score_index, batch.score_target), [], None
    with inference(model), rotary_limits_lowered(causal_model(model), SHORT):
        for ranks in (None, sequence):
            with computing(model), ragged_inputs(batch, ranks) as inputs:
                found.append(model(**inputs, scores=scores).scored)
                split = inputs[PLAN]
    assert isinstance(split, SplitPlan)
    tolerance = TOLERANCE.get(weight.dtype, TOLERANCE[torch.bfloat16])
    error, shared = head_of(causal_model(model)).distances(*found).mean().item(), frozenset(split.shared)
    if (other := model_beside(model)) is None:
        return error, tolerance, shared
    with gathered(model, other):  # what of it is left to the whole model
        others, _, more = probe_split(other, sequence)
    return max(error, others), tolerance, shared | more


def attention_backends(model: nn.Module) -> list[str]:
    """The titles of the backends that a model's attention runs on without padding, in order of preference.

    Args:
        model: prepared by `install`, in the precision that it computes in (`engine.forward.compute_in`).
    """
    with inference(model), observed_backends() as names:
        score(model, tiny_batch(model))
    return [backend.title for name, backend in BACKENDS.items() if name in names]


def mixing_kernels(model: nn.Module) -> dict[Kernel, str | None]:
    """The kernels of other libraries that a model's recurrent layers and short convolutions ask for without padding,
    with why one does not serve; empty where none is asked for, as on a CPU.

    Args:
        model: prepared by `install`, in the precision that it computes in (`engine.forward.compute_in`).
    """
    if not mixers(causal_model(model)):
        return {}
    with inference(model), observed_kernels() as kernels:
        score(model, tiny_batch(model))
    return kernels


def tiny_batch(model: nn.Module) -> RaggedBatch:
    """Two short segments, on the device of a model."""
    inner = causal_model(model)
    rule, (first, second, more) = head_of(inner).score_rule(inner), _rows(vocabulary(model))
    if isinstance(rule, ShiftedRight):
        batch = RaggedBatch.from_pairs([(first, second), (second, more)], rule)
    else:
        batch = RaggedBatch.from_segments([first, second], score_rule=rule)
    return batch.to(embedding_weight(model).device)


def _rows(vocab: int) -> tuple[list[int], list[int], list[int]]:
    """Unlike tokens in unlike rows, so that whatever leaks shows."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(min(3, vocab - 1), vocab, (19,), generator=generator).tolist()
    return tokens[:8], tokens[8:14], tokens[14:]


def _batches(rule: ScoreRule, first: list[int], second: list[int], more: list[int]) -> Sequence[RaggedBatch]:
    """Three rows; the same, of which the last goes on from a part of another, that it sees alone; and three, of which
    the first is another."""
    other = [*reversed(first)]
    if isinstance(rule, ShiftedRight):
        pairs = [(second, more), (second, first)]
        plain = RaggedBatch.from_pairs([(first, second), *pairs], rule)
        return plain, plain.share_prefixes(), RaggedBatch.from_pairs([(other, [*reversed(second)]), *pairs], rule)
    lay = functools.partial(RaggedBatch.from_segments, score_rule=rule)
    longer, last = [*second, *first], [*second, *more][1:]
    return (
        lay([first, second, [*second, *more]]),
        lay(
            [first, longer, more, last],
            [first, [IGNORE] * len(longer), more, last],
            prefix=[-1, -1, (1, len(second)), -1],
            row=[0, 1, 1, 2],
        ),
        lay([other, second, [*second, *more]]),
    )


def _dense(model: nn.Module, head: type[Head], batch: RaggedBatch) -> Tensor:
    """[scores]: a head's numbers from the model's own outputs, one row at a time."""
    found, pairs = [], causal_model(model).config.is_encoder_decoder
    for part in batch.segments:
        ids, own = batch.token_ids[None, part.start : part.stop], slice(part.score_start, part.score_stop)
        given = {"input_ids": ids}
        if pairs and part.prefix < 0:
            continue
        if pairs:
            source = batch.segments[part.prefix]
            given = {"input_ids": batch.token_ids[None, source.start : source.stop], "decoder_input_ids": ids}
        logits = model(**given, use_cache=False).logits
        stats = head.dense_stats(logits, batch.score_index[own] - part.start, batch.score_target[own], part.length)
        found.append(ScoreOutput(stats=stats).scored)
    return torch.cat(found)
