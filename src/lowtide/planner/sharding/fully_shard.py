"""torch's `fully_shard` (FSDP2), as lowtide's trainers cut a model: each layer, the embedding and the head by itself.

From `torch/distributed/fsdp/_fully_shard` of 2.13 (`_fsdp_collectives.py`, `_fsdp_param_group.py`). Each parameter is
cut along its first dimension into chunks of equal length, the last ones shorter, and padded. To compute with a unit,
its shards are gathered into one flat buffer, which is copied out into a tensor for each parameter:

- forward: a unit's flat buffer stays until the next unit is there, so that two flat buffers and one whole unit are
  there at a time, and the head runs beside its own flat buffer;
- the head's gradient is whole from where it is made: with the loss, or as backward begins;
- backward: units are gathered again, but for the embedding, and for the head where its gradient is made in forward; the
  flat buffer goes at once, but the unit before is gathered ahead; whole gradients are copied into a buffer that is
  reduced and scattered, and that stays until the next unit's is wanted;
- a tied embedding is whole from its own forward to the head's, and all through backward where that reads it. Its
  gradient stays whole to the end, as nothing before it tells that it is complete.

Where head and embedding stay in rows (`engine.weights.sharded.split_vocabulary`), they are no units: hidden states of a
chunk travel in their place, and each rank has the gradient of its own rows.

Over gloo what another rank sends of a sum is held beside it (`compat.gloo`): one more part of what is reduced.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from lowtide.ops.logits.linear_logprobs import chunk_rows
from lowtide.planner.sharding.layout import Layout, Parameter, byte_sum
from lowtide.planner.sharding.moment import OneDevice, PeakMoment
from lowtide.ranks.sharding import Sharding
from lowtide.ranks.shards import DIGESTED

DIGEST = 8
"""Bytes a number while ranks find out whether their weights are equal, some of a parameter at a time."""
EXCHANGED = 4
"""Copies of the hidden states of a chunk, or of the looked-up rows of a micro-batch, while they travel: what is sent,
what comes, and both on the way back."""
Found = tuple[Mapping[str, Sequence[PeakMoment]], int]


@dataclass(frozen=True)
class Unit:
    """What is gathered together, in bytes."""

    flat: int
    """Whole, padded, as wide as computed with: the flat buffer, and what is copied out of it."""
    gradients: int
    """Whole, of what is trained."""
    reduced: int
    """The same padded, as wide as they are reduced: the buffer that is scattered."""
    shard: int
    """A rank's part of the reduced gradients, as wide as the weights."""
    largest: int
    """The largest of the gradients."""
    is_layer: bool = False
    keeps: bool = False
    """Stays gathered from forward to backward."""
    is_last: bool = False
    """Its gradients are complete only when backward ends."""


def moments(layout: Layout, traced: OneDevice, sharding: Sharding) -> Found:
    """Moments by phase, and bytes in the host's memory."""
    ranks = sharding.shards
    units = units_of(layout, sharding)
    in_rows = split_parameters(layout, sharding)
    own_rows = sum(chunk_elements(p, ranks) * p.width for p in in_rows if p.trained)
    shards = sum(chunk_elements(p, ranks) * p.width for p in layout.parameters)
    optimizer = sum(layout.state_bytes(chunk_elements(p, ranks), p.width) for p in layout.trained)
    gradients = sum(unit.shard for unit in units) + own_rows
    host = (shards + gradients if sharding.offload_weights else 0) + (optimizer if sharding.offload_optimizer else 0)
    base = PeakMoment(
        weights=0 if sharding.offload_weights else shards, optimizer=0 if sharding.offload_optimizer else optimizer
    )
    held = 0
    if traced.accumulates:
        held = gradients if sharding.reduce_each else sum(unit.gradients for unit in units) + own_rows
    if sharding.offload_weights:
        gradients = held = 0
    travelling = _travelling(layout, traced, sharding) if in_rows else 0

    def at(point: Point, phase: str) -> PeakMoment:
        rows = 0 if held or phase == "forward" else own_rows
        return replace(
            base,
            gradients=point.gradients + rows,
            communication=point.gathered + travelling,
            rest=_activations(traced, point, phase),
        )

    found = {phase: [replace(base, gradients=held, rest=traced.rest(phase))] for phase in traced.phases}
    found["loading"] = _loading(layout, traced, units, sharding)
    forward = [*_forward(units, held)]
    again = _gathered_again(units, traced.gradients_in_head, sharding)
    found["forward"] = [at(point, "forward") for point in forward]
    found["head"] = [at(_at_head(units, held, traced.gradients_in_head), "head")]
    found["backward"] = [at(point, "backward") for point in _backward(again, held, gradients - own_rows, sharding)]
    if "evaluation" in found:
        most = max(point.gathered for point in forward)
        found["evaluation"] = [replace(base, communication=most, rest=traced.rest("evaluation"))]
    if "saving" in found:
        one = max(_padded(p, ranks) * p.width for p in layout.parameters) if sharding.gather_on_save else 0
        found["saving"] = [replace(base, communication=one, rest=traced.rest("saving"))]
    stepped = [chunk_elements(p, ranks) * p.width for p in layout.trained]
    step = 0 if sharding.offload_optimizer else traced.temporaries(max(stepped, default=0), sum(stepped))
    found["optimizer"] = [
        replace(base, gradients=gradients, optimizer=base.optimizer + step, rest=traced.rest("optimizer"))
    ]
    return {phase: found[phase] for phase in traced.phases}, host


def split_parameters(layout: Layout, sharding: Sharding) -> list[Parameter]:
    """The parameters of head and embedding, where each rank keeps its rows of them."""
    if not sharding.split_vocabulary:
        return []
    vocab = next((p.shape[0] for p in layout.parameters if p.name == layout.embedding), 0)
    return [p for p in layout.parameters if not p.layer and p.shape[:1] == (vocab,)]


def _travelling(layout: Layout, traced: OneDevice, sharding: Sharding) -> int:
    """Bytes of hidden states on their way between ranks that hold rows of the vocabulary: of a chunk of scores, or of
    the tokens of a micro-batch."""
    vocab = next((p.shape[0] for p in layout.parameters if p.name == layout.embedding), 1)
    width = sharding.compute_width or max(p.width for p in layout.parameters)
    dtype = torch.float32 if width == torch.float32.itemsize else torch.bfloat16
    kind = "cpu" if sharding.backend == "gloo" else "cuda"
    chunk = chunk_rows(-(-vocab // sharding.shards), dtype, kind, split=True)
    rows = max(min(chunk, traced.tokens * sharding.shards), traced.tokens)
    return EXCHANGED * rows * layout.hidden_size * width


def units_of(layout: Layout, sharding: Sharding) -> list[Unit]:
    """In the order of forward: the embedding, the layers, the head and what is left; a tied embedding opens first and
    is the head's too."""
    in_rows = split_parameters(layout, sharding)
    layers: dict[str, list[Parameter]] = {}
    outside = []
    for parameter in layout.parameters:
        if parameter.layer:
            layers.setdefault(parameter.layer, []).append(parameter)
        elif parameter not in in_rows:
            outside.append(parameter)
    keeps = not sharding.reshard
    each = [_unit(p, sharding, is_layer=True, keeps=keeps) for p in layers.values()]
    if layout.tied and not in_rows:
        return [_unit(outside, sharding, keeps=True, is_last=True), *each]
    first = [p for p in outside if p.name == layout.embedding]
    rest = [p for p in outside if p.name != layout.embedding]
    opening = [_unit(first, sharding, keeps=keeps)] if first else []
    return [*opening, *each, *([_unit(rest, sharding, keeps=keeps)] if rest else [])]


def chunk_elements(parameter: Parameter, ranks: int) -> int:
    """Elements of the first rank's chunk, which is the longest: a first dimension of 7 over 4 ranks is 2, 2, 2, 1."""
    rows = parameter.shape[0] if parameter.shape else 1
    return -(-rows // ranks) * (parameter.numel // max(rows, 1))


def _padded(parameter: Parameter, ranks: int) -> int:
    return chunk_elements(parameter, ranks) * ranks


def _unit(parameters: Sequence[Parameter], sharding: Sharding, **flags: bool) -> Unit:
    ranks = sharding.shards
    trained = [p for p in parameters if p.trained]
    computed = [(p, sharding.compute_width or p.width) for p in trained]
    return Unit(
        sum(_padded(p, ranks) * (sharding.compute_width or p.width) for p in parameters),
        sum(p.gradient * width for p, width in computed),
        sum(_padded(p, ranks) * (sharding.reduce_width or width) for p, width in computed),
        sum(chunk_elements(p, ranks) * p.width for p in trained),
        max((p.numel * width for p, width in computed), default=0),
        **flags,
    )


@dataclass(frozen=True)
class Point:
    """Where a step is, in bytes."""

    gathered: int
    gone: int
    """Layers whose activations are not there yet, or no more."""
    where: str
    """`"head"`, `"layer"` while a unit computes, `"between"` units."""
    gradients: int = 0


def _activations(traced: OneDevice, point: Point, phase: str) -> dict[str, int]:
    if phase == "head":
        return traced.rest("head")
    if point.where == "between":
        return traced.between(point.gone)
    if phase == "forward":
        return traced.rest("forward", point.gone)
    return traced.at_head() if point.where == "head" else traced.in_backward(point.gone)


def _forward(units: Sequence[Unit], held: int) -> Iterator[Point]:
    """As each unit opens, and as it runs."""
    kept = flat_before = 0
    gone = sum(unit.is_layer for unit in units)
    for unit in units:
        yield Point(kept + flat_before + 2 * unit.flat, gone, "between", held)
        gone -= unit.is_layer
        yield Point(kept + 2 * unit.flat, gone, "layer" if unit.is_layer else "between", held)
        kept += unit.flat if unit.keeps else 0
        flat_before = unit.flat


def _at_head(units: Sequence[Unit], held: int, makes_gradients: bool) -> Point:
    """As the head makes its loss: whole, beside the flat buffer of what was gathered last, and with its gradient."""
    tied = units[0].is_last
    head = units[0] if tied else units[-1]
    kept = sum(unit.flat for unit in units if unit.keeps)
    gathered = kept + (0 if head.keeps else head.flat) + units[-1].flat
    return Point(gathered, 0, "head", held + (head.gradients if makes_gradients and not head.is_layer else 0))


def _gathered_again(units: Sequence[Unit], loss_in_forward: bool, sharding: Sharding) -> list[Unit]:
    """The units as backward has them: nothing of those that were let go and that it does not read."""
    tied = units[0].is_last
    unread = {0} if loss_in_forward or not tied else set()
    if loss_in_forward:
        unread.add(len(units) - 1)
    return [
        replace(unit, flat=0) if sharding.reshard and number in unread and not unit.is_layer else unit
        for number, unit in enumerate(units)
    ]


def _backward(units: Sequence[Unit], held: int, gradients: int, sharding: Sharding) -> Iterator[Point]:
    """As each unit opens, runs, and has its gradients reduced.

    Args:
        units: in the order of forward.
        held: bytes of gradients of micro-batches before.
        gradients: bytes of a rank's gradients when all are reduced, but for rows that are never gathered.
        sharding: how they are reduced.
    """
    came = 1 / sharding.shards if sharding.backend == "gloo" else 0
    whole = not sharding.reduce_each and held > 0  # those before are whole, and what is computed is added to them
    tied = units[0].is_last
    early = units[0].gradients if tied and not whole else 0
    kept = sum(unit.flat for unit in units if unit.keeps)
    scattered = gone = 0
    done = held
    if tied:
        yield Point(kept + units[0].flat, 0, "between", done + early)  # it is gathered anew, and copied out
    for index in reversed(range(len(units))):
        unit = units[index]
        is_head = index == len(units) - 1 and not tied and not unit.is_layer
        own = 0 if unit.is_last or whole else unit.gradients
        made = own if is_head else 0  # a head's are there before it opens
        if not unit.keeps:
            yield Point(kept + 2 * unit.flat + scattered, gone, "between", done + early + made)
            kept += unit.flat
        ahead = units[index - 1].flat if index and not units[index - 1].keeps else 0
        yield Point(kept + ahead + scattered, gone, "between", done + early + made)
        if unit.is_layer:  # most passes through it while its first gradients are made
            yield Point(kept + ahead + scattered, gone, "layer", done + early + min(own, unit.largest))
        yield Point(kept + ahead + scattered, gone, "head" if is_head else "between", done + early + own)
        gone += unit.is_layer
        kept -= unit.flat
        reduced = unit.reduced + int(came * unit.reduced)
        yield Point(kept + ahead + reduced, gone, "between", done + early + own + unit.shard)
        done = held or min(done + unit.shard, gradients)
        scattered = unit.reduced


def _loading(layout: Layout, traced: OneDevice, units: Sequence[Unit], sharding: Sharding) -> list[PeakMoment]:
    """On a CPU the whole model is there while its first unit is cut. Elsewhere it waits in the host's memory, and one
    parameter is whole at a time."""
    if sharding.backend == "gloo":
        digest = DIGEST * min(max((p.numel for p in layout.parameters), default=0), DIGESTED)
        first = PeakMoment(weights=byte_sum(layout.parameters), communication=digest)
        return [first, PeakMoment(weights=sum(traced.phases.get("loading", {}).values()) - layout.buffers)]
    shards = sum(chunk_elements(p, sharding.shards) * p.width for p in layout.parameters)
    largest = max((byte_sum([p]) for p in layout.parameters), default=0)
    return [PeakMoment(weights=0 if sharding.offload_weights else shards, communication=largest)]
