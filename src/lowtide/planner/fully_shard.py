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

from lowtide.planner.layout import Layout, Parameter, byte_sum
from lowtide.planner.moment import Moment, Traced
from lowtide.planner.sharding import Sharding

Found = tuple[Mapping[str, Sequence[Moment]], int]


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
    is_layer: bool = False
    keeps: bool = False
    """Stays gathered from forward to backward."""
    is_last: bool = False
    """Its gradients are complete only when backward ends."""


def moments(layout: Layout, traced: Traced, sharding: Sharding) -> Found:
    """Moments by phase, and bytes in the host's memory."""
    ranks = sharding.shards
    units = units_of(layout, sharding)
    shards = sum(chunk_elements(p, ranks) * p.width for p in layout.parameters)
    optimizer = sum(layout.state_bytes(chunk_elements(p, ranks), p.width) for p in layout.trained)
    gradients = sum(unit.shard for unit in units)
    host = (shards + gradients if sharding.offload_weights else 0) + (optimizer if sharding.offload_optimizer else 0)
    base = Moment(
        weights=0 if sharding.offload_weights else shards, optimizer=0 if sharding.offload_optimizer else optimizer
    )
    held = 0
    if traced.accumulates:
        held = sum(unit.gradients for unit in units) if not sharding.reduce_each else gradients
    if sharding.offload_weights:
        gradients = held = 0
    steps = traced.layers or sum(unit.is_layer for unit in units)
    found = {phase: [replace(base, gradients=held, rest=traced.rest(phase))] for phase in traced.phases}
    found["loading"] = [_loading(layout, traced, units, sharding)]
    found["forward"] = [
        replace(base, gradients=held, communication=gathered, rest=traced.rest("forward", steps - done))
        for gathered, done in _forward(units)
    ]
    kept = sum(unit.flat for unit in units if unit.keeps)
    found["head"] = [replace(base, gradients=held, communication=kept, rest=traced.rest("head"))]
    found["backward"] = [
        replace(
            base, gradients=whole, communication=gathered, rest=traced.in_backward(gone) if past else traced.at_head()
        )
        for gathered, whole, gone, past in _backward(units, held, gradients, sharding)
    ]
    if "evaluation" in found:
        most = max(gathered for gathered, _ in _forward(units))
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
        sum(p.numel * width for p, width in computed),
        sum(_padded(p, ranks) * (sharding.reduce_width or width) for p, width in computed),
        sum(chunk_elements(p, ranks) * p.width for p in trained),
        **flags,
    )


def _forward(units: Sequence[Unit]) -> Iterator[tuple[int, int]]:
    """Bytes gathered, and layers that have run or are running: as each unit opens, and as it runs."""
    kept = flat_before = done = 0
    for unit in units:
        yield kept + flat_before + 2 * unit.flat, done
        done += unit.is_layer
        yield kept + 2 * unit.flat, done
        kept += unit.flat if unit.keeps else 0
        flat_before = unit.flat


def _backward(
    units: Sequence[Unit], held: int, gradients: int, sharding: Sharding
) -> Iterator[tuple[int, int, int, bool]]:
    """Bytes on their way, bytes of gradients, layers whose activations are gone, and whether the head's are: as each unit
    opens, runs, and has its gradients reduced."""
    copies = 2 if sharding.backend == "gloo" else 1
    whole = held > gradients  # of the micro-batches before: what is computed is added to them
    early = 0 if whole else sum(unit.gradients for unit in units if unit.is_last)
    kept = sum(unit.flat for unit in units if unit.keeps)
    scattered = gone = 0
    done = held
    if tied := units[0].is_last:
        yield kept + (0 if units[-1].keeps else units[-1].flat), done + early, gone, False
    for index in reversed(range(len(units))):
        unit = units[index]
        ahead = units[index - 1] if index else None
        next_flat = 0 if ahead is None or ahead.keeps else ahead.flat
        own = 0 if unit.is_last or whole else unit.gradients
        if not unit.keeps:
            yield kept + 2 * unit.flat + scattered, done + early, gone, True
            kept += unit.flat
        yield kept + next_flat + scattered, done + early + own, gone, tied or index < len(units) - 1
        gone += unit.is_layer
        kept -= unit.flat
        yield kept + next_flat + copies * unit.reduced, done + early + own + unit.shard, gone, True
        done = held or min(done + unit.shard, gradients)
        scattered = unit.reduced


def _loading(layout: Layout, traced: Traced, units: Sequence[Unit], sharding: Sharding) -> Moment:
    """On a CPU the whole model is there while its first unit is cut. Elsewhere it waits in the host's memory, and one
    parameter is whole at a time."""
    shards = sum(chunk_elements(p, sharding.shards) * p.width for p in layout.parameters)
    if sharding.backend != "gloo":
        return Moment(
            weights=0 if sharding.offload_weights else shards,
            communication=max((p.numel * p.width for p in layout.parameters), default=0),
        )
    whole = max(byte_sum(layout.parameters), sum(traced.phases.get("loading", {}).values()) - layout.buffers)
    return Moment(weights=whole, communication=max(unit.shard for unit in units))
