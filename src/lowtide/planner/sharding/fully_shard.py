"""torch's `fully_shard` (FSDP2), wrapped as accelerate does: each layer by itself, the embedding, and the rest.

From `torch/distributed/fsdp/_fully_shard` of 2.13 (`_fsdp_collectives.py`, `_fsdp_param_group.py`). Each parameter is
cut along its first dimension into chunks of equal length, the last ones shorter, and padded. To compute with a unit,
its shards are gathered into one flat buffer, which is copied out into a tensor for each parameter:

- forward: a unit's flat buffer stays until the next unit has been copied out, so that two flat buffers and one whole
  unit are there at a time;
- backward: the flat buffer goes at once, but the unit before is gathered ahead; whole gradients are copied into a
  buffer that is reduced and scattered, and that stays until the next unit's is wanted;
- the last unit (final norm and head, and a tied embedding) is kept from forward to backward. A tied embedding's
  gradient stays whole to the end, as nothing before it tells that it is complete.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from lowtide.planner.sharding.layout import Layout, Parameter, byte_sum
from lowtide.planner.sharding.moment import OneDevice, PeakMoment
from lowtide.ranks.sharding import Sharding

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
    shards = sum(chunk_elements(p, ranks) * p.width for p in layout.parameters)
    optimizer = sum(layout.state_bytes(chunk_elements(p, ranks), p.width) for p in layout.trained)
    gradients = sum(unit.shard for unit in units)
    host = (shards + gradients if sharding.offload_weights else 0) + (optimizer if sharding.offload_optimizer else 0)
    base = PeakMoment(
        weights=0 if sharding.offload_weights else shards, optimizer=0 if sharding.offload_optimizer else optimizer
    )
    held = 0
    if traced.accumulates:
        held = sum(unit.gradients for unit in units) if not sharding.reduce_each else gradients
    if sharding.offload_weights:
        gradients = held = 0
    steps = sum(unit.is_layer for unit in units)
    found = {phase: [replace(base, gradients=held, rest=traced.rest(phase))] for phase in traced.phases}
    found["loading"] = _loading(layout, traced, units, sharding)
    found["forward"] = [
        replace(base, gradients=held, communication=point.gathered, rest=_activations(traced, point, "forward"))
        for point in _forward(units, steps)
    ]
    kept = sum(unit.flat for unit in units if unit.keeps)
    found["head"] = [replace(base, gradients=held, communication=kept, rest=traced.rest("head"))]
    found["backward"] = [
        replace(
            base,
            gradients=point.gradients,
            communication=point.gathered,
            rest=_activations(traced, point, "backward"),
        )
        for point in _backward(units, held, gradients, sharding)
    ]
    if "evaluation" in found:
        most = max(point.gathered for point in _forward(units, steps))
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


def units_of(layout: Layout, sharding: Sharding) -> list[Unit]:
    """In the order of forward: the embedding, the layers, the rest; a tied embedding opens with the rest."""
    layers: dict[str, list[Parameter]] = {}
    outside = []
    for parameter in layout.parameters:
        if parameter.layer:
            layers.setdefault(parameter.layer, []).append(parameter)
        else:
            outside.append(parameter)
    each = [_unit(p, sharding, is_layer=True, keeps=not sharding.reshard) for p in layers.values()]
    if layout.tied:
        return [_unit(outside, sharding, keeps=True, is_last=True), *each]
    first = [p for p in outside if p.name == layout.embedding]
    rest = [p for p in outside if p.name != layout.embedding]
    opening = [_unit(first, sharding, keeps=not sharding.reshard)] if first else []
    return [*opening, *each, *([_unit(rest, sharding, keeps=True)] if rest else [])]


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
    if point.where == "between":
        return traced.between(point.gone)
    if phase == "forward":
        return traced.rest("forward", point.gone)
    return traced.at_head() if point.where == "head" else traced.in_backward(point.gone)


def _forward(units: Sequence[Unit], layers: int) -> Iterator[Point]:
    """As each unit opens, and as it runs."""
    kept = flat_before = 0
    gone = layers
    for unit in units:
        yield Point(kept + flat_before + 2 * unit.flat, gone, "between")
        gone -= unit.is_layer
        yield Point(kept + 2 * unit.flat, gone, "layer")
        kept += unit.flat if unit.keeps else 0
        flat_before = unit.flat


def _backward(units: Sequence[Unit], held: int, gradients: int, sharding: Sharding) -> Iterator[Point]:
    """As each unit opens, runs, and has its gradients reduced.

    Args:
        units: in the order of forward.
        held: bytes of gradients of micro-batches before.
        gradients: bytes of a rank's gradients when all are reduced.
        sharding: how they are reduced.
    """
    copies = 2 if sharding.backend == "gloo" else 1
    whole = held > gradients  # those before are whole, and what is computed is added to them
    tied = units[0].is_last
    early = units[0].gradients if tied and not whole else 0
    kept = sum(unit.flat for unit in units if unit.keeps)
    scattered = gone = 0
    done = held
    if tied:
        yield Point(kept + (0 if units[-1].keeps else units[-1].flat), gone, "head", done + early)
    for index in reversed(range(len(units))):
        unit = units[index]
        at_head = index == len(units) - 1 and not tied
        next_flat = units[index - 1].flat if index and not units[index - 1].keeps else 0
        own = 0 if unit.is_last or whole else unit.gradients
        if not unit.keeps:
            yield Point(kept + 2 * unit.flat + scattered, gone, "between", done + early)
            kept += unit.flat
        open_bytes = kept + next_flat + scattered
        if unit.is_layer:  # most passes through it while its first gradients are made
            yield Point(open_bytes, gone, "layer", done + early + min(own, unit.largest))
        yield Point(open_bytes, gone, "head" if at_head else "between", done + early + own)
        gone += unit.is_layer
        kept -= unit.flat
        yield Point(kept + next_flat + copies * unit.reduced, gone, "between", done + early + own + unit.shard)
        done = held or min(done + unit.shard, gradients)
        scattered = unit.reduced


def _loading(layout: Layout, traced: OneDevice, units: Sequence[Unit], sharding: Sharding) -> list[PeakMoment]:
    """On a CPU the whole model is there while its first unit is cut. Elsewhere it waits in the host's memory, and one
    parameter is whole at a time."""
    if sharding.backend == "gloo":
        first = PeakMoment(weights=byte_sum(layout.parameters), communication=max(unit.shard for unit in units))
        return [first, PeakMoment(weights=sum(traced.phases.get("loading", {}).values()) - layout.buffers)]
    shards = sum(chunk_elements(p, sharding.shards) * p.width for p in layout.parameters)
    largest = max((byte_sum([p]) for p in layout.parameters), default=0)
    return [PeakMoment(weights=0 if sharding.offload_weights else shards, communication=largest)]
