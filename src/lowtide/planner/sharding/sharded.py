"""What one rank holds when a run is spread over devices: formulas over what the unsharded trace found.

The trace knows the activations, which sharding by data leaves alone, and every parameter. Where states are split, and
which copies of weights and gradients come and go meanwhile, is known of each scheme: ZeRO's of DeepSpeed (`zero`),
`fully_shard` of torch (`fully_shard`), the tensor parallelism of transformers (`tensor_parallel`), all beside this
file, and lowtide's own equal copies. All schemes are told as `PeakMoment`s: the points of a step at which most is held,
each with the layers whose activations are still there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from lowtide.planner.sharding import fully_shard, zero
from lowtide.planner.sharding.layout import Layout, byte_sum
from lowtide.planner.sharding.moment import OneDevice, PeakMoment
from lowtide.planner.sharding.tensor_parallel import local_layout
from lowtide.planner.sharding.traffic import Traffic, traffic_of
from lowtide.ranks.replicas import BUCKET_BYTES, ROOMS
from lowtide.ranks.sharding import Sharding

Moments = Mapping[str, Iterable[PeakMoment]]


@dataclass(frozen=True)
class Sharded:
    """The rank that holds most."""

    phases: Mapping[str, Mapping[str, int]]
    """For each phase, the bytes by category when it holds most. `communication`: gathered weights and buffers."""
    host_bytes: int
    """What one rank keeps in the host's memory instead."""
    traffic: Traffic
    notes: tuple[str, ...] = ()

    @property
    def peak_bytes(self) -> int:
        return max(sum(held.values()) for held in self.phases.values())

    def with_host_bytes(self) -> Sharded:
        """The same where the host's memory is the device's."""
        phases = {phase: {**held, "host": self.host_bytes} for phase, held in self.phases.items() if phase != "loading"}
        return replace(self, phases={**self.phases, **phases} if self.host_bytes else self.phases, host_bytes=0)


def shard(layout: Layout, traced: OneDevice, sharding: Sharding, machines: int | None = None) -> Sharded:
    """The bytes of one rank, by phase and category.

    Args:
        layout: of the whole model.
        traced: what the run holds on one device. With tensor parallelism, of the model that
            `tensor_parallel.one_rank` describes: the activations of a split layer are those of a narrower one. With
            sequence parallelism, of a rank's slice of the tokens (`FakeRun.split`).
        sharding: how it is spread.
        machines: that the devices are in; by default as many as `sharding` says.

    Raises:
        ValueError: the model has no plan for tensor parallelism, or cannot be split so.
    """
    sharding = sharding.resolved(layout.hidden_size)
    local = local_layout(layout, sharding.tensor_parallel) if sharding.tensor_parallel > 1 else layout
    local, traced = traced.with_states(local), traced.on(layout)
    moments, host = SCHEMES[sharding.kind](local, traced, sharding)
    phases = {phase: _most(moments[phase], sharding, layout.buffers) for phase in traced.phases}
    for held in phases.values():
        if "reference" in held:
            held["reference"] = int(held["reference"] * traced.reference_share)
    return Sharded(phases, host + traced.on_host, traffic_of(local, traced, sharding, machines), _notes(sharding))


def _most(moments: Iterable[PeakMoment], sharding: Sharding, buffers: int) -> dict[str, int]:
    held = max((moment.held for moment in moments), key=lambda each: sum(each.values()))
    held["weights"] += buffers
    if sharding.kind in ("zero3", "fsdp2") and "reference" in held:
        held["reference"] = -(-held["reference"] // sharding.shards)
    return {name: size for name, size in held.items() if size}


def _notes(sharding: Sharding) -> tuple[str, ...]:
    if sharding.runs:
        return ()
    return (f"lowtide's trainers cannot run {sharding}: this is what it would take",)


def whole(layout: Layout, traced: OneDevice, sharding: Sharding) -> tuple[Moments, int]:
    """Whole copies, as lowtide's own ranks: gradients are added up in buckets, for which memory is set aside."""
    gradients = sum(p.gradient * p.width for p in layout.trained)
    optimizer = sum(layout.state_bytes(p.numel, p.width) for p in layout.trained)
    rooms = ROOMS * min(BUCKET_BYTES, gradients) if sharding.replicas > 1 else 0
    base = PeakMoment(weights=byte_sum(layout.parameters), optimizer=optimizer, communication=rooms)
    held = {
        phase: [replace(base, gradients=min(gradients, traced.gradients(phase)), rest=traced.rest(phase))]
        for phase in traced.phases
    }
    held["loading"] = [replace(base, optimizer=0, communication=0)]
    largest = max((byte_sum([p]) for p in layout.trained), default=0)
    step = traced.temporaries(largest, byte_sum(layout.trained))
    held["optimizer"] = [replace(base, gradients=gradients, optimizer=optimizer + step, rest=traced.rest("optimizer"))]
    return held, 0


SCHEMES: dict[str, Callable[[Layout, OneDevice, Sharding], tuple[Moments, int]]] = {
    "none": whole,
    "ddp": whole,
    "zero1": zero.stages_1_and_2,
    "zero2": zero.stages_1_and_2,
    "zero3": zero.stage_3,
    "fsdp2": fully_shard.moments,
}
"""Moments by phase, and bytes in the host's memory."""
