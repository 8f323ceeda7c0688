"""How long an optimizer step takes where ranks share the work: by roofline, and by what the links carry.

Weights are gathered and gradients brought together while a layer computes, so that the longer of the two counts; the
first gathering and the last of the gradients have nothing beside them. What splits sequences or layers is waited for.
A copy's gradients are summed in the last backward alone, which is two thirds of a micro-batch. Rates are of a data
sheet, and what is reached of them is assumed: the numbers are for comparing, and for an order of magnitude.
"""

from __future__ import annotations

from dataclasses import dataclass

from lowtide.planner.cluster import Cluster
from lowtide.planner.sharding.layout import Layout
from lowtide.planner.sharding.traffic import Traffic
from lowtide.planner.speed import LINK_EFFICIENCY
from lowtide.planner.tracing.fake_run import TracedRun
from lowtide.ranks.sharding import Sharding

RING_SECONDS = 3e-6
"""Before one send of a ring arrives; assumed."""
HOST_STEP_RATE = 20e9
"""Bytes of host memory a second that a rank's optimizer reads and writes, where it steps on the host; assumed."""
HOST_STEP_BYTES = 7
"""Numbers that AdamW reads and writes for each that it steps: weight, gradient, both moments; all but one back."""
BACKWARD = 2 / 3
"""Of a micro-batch."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step."""

    computing: float
    """Forward and backward; what is waited for within layers included."""
    sent: float
    """What links carry meanwhile."""
    exposed: float
    """Of that, what nothing hides."""
    stepping: float
    """The optimizer."""

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.computing + self.exposed + self.stepping


def step_time(traced: TracedRun, layout: Layout, traffic: Traffic, sharding: Sharding, cluster: Cluster) -> StepTime:
    """The time of a step of one rank.

    Args:
        traced: what a rank computes.
        layout: of the whole model.
        traffic: what it sends.
        sharding: how the run is spread.
        cluster: over what.
    """
    rates = cluster.device.rates
    reached = 1.0 if rates.measured else LINK_EFFICIENCY
    by_tensors = (traffic.waited_for - traced.sent_bytes * traced.micro_batches) / (rates.interconnect * reached)
    micro_batch = traced.micro_batch_seconds(cluster.device)
    computing = micro_batch * traced.micro_batches + by_tensors
    beside = max(
        (traffic.per_rank - traffic.waited_for) / (rates.interconnect * reached),
        traffic.between_nodes / (rates.network * reached * cluster.per_node),
    )
    sent = beside + traffic.steps * RING_SECONDS
    states = sum(p.numel * p.width for p in layout.trained) / (sharding.shards * sharding.tensor_parallel)
    if sharding.offload_weights:
        parts = traced.micro_batches * (2 if sharding.reshard else 1) + 1
        held = sum(p.numel * p.width for p in layout.parameters) / (sharding.shards * sharding.tensor_parallel)
        sent = max(sent, parts * held / rates.host_link)
    stepping = traced.costs["optimizer"].seconds(cluster.device) / sharding.shards
    if sharding.offload_optimizer:
        stepping = HOST_STEP_BYTES * states / HOST_STEP_RATE
    hides = computing if sharding.kind != "ddp" else micro_batch * BACKWARD
    exposed = max(sent - hides, sent / traffic.units)
    return StepTime(computing, sent, exposed, stepping)
