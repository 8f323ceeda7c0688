"""The bytes that ranks send each other in a step, which with the links' rates give its time (`step_time`).

Counted for rings, which send the least there is to send (Thakur, Rabenseifner and Gropp, "Optimization of collective
communication operations in MPICH", 2005): gathering or scattering S bytes over N ranks sends S(N-1)/N from each in N-1
steps, an all-reduce twice that. A ring over several nodes crosses from each node to the next once, so that the link
between nodes carries what a rank sends; with hybrid sharding only the sum of the shards' gradients crosses it, where a
copy is within a node. Ranks that split sequences or layers are within a node, and wait for what they send each other.
"""

from __future__ import annotations

from dataclasses import dataclass

from lowtide.engine.weights.sharded.split_layers import style_of
from lowtide.planner.sharding.layout import Layout, byte_sum
from lowtide.planner.sharding.moment import OneDevice
from lowtide.planner.sharding.zero import wanted_again
from lowtide.ranks.replicas import BUCKET_BYTES, MOST_ROWS
from lowtide.ranks.sharding import Sharding


@dataclass(frozen=True)
class Traffic:
    """Bytes of one optimizer step."""

    per_rank: int
    """That a rank sends."""
    between_nodes: int
    """That the ranks of one node together send to the next."""
    waited_for: int = 0
    """Of `per_rank`: what splits layers or sequences, which nothing can be computed beside."""
    steps: int = 0
    """Sends of the rings, one after the other."""
    units: int = 1
    """Parts that weights are gathered in, or gradients added up in: the first and the last have nothing beside them."""


def traffic_of(layout: Layout, traced: OneDevice, sharding: Sharding, machines: int | None = None) -> Traffic:
    """What one step sends.

    Args:
        layout: of one rank, after its matrices were split.
        traced: its tokens and micro-batches.
        sharding: with its sizes resolved.
        machines: that the devices are in; by default as many as `sharding` says.
    """
    weights = byte_sum(layout.parameters, sharding.compute_width)
    trained = byte_sum(layout.trained, sharding.compute_width)
    gradients = byte_sum(layout.trained, sharding.reduce_width or sharding.compute_width)
    ranks, rounds, units = sharding.shards, traced.micro_batches, _units(layout)
    reduces = rounds if sharding.kind in ("zero2", "zero3") or sharding.reduce_each else 1
    scattered = gathered = exchanged = collectives = 0
    match sharding.kind:
        case "ddp":
            sent = gradients - _zero_rows(layout, traced, sharding)
            exchanged, units = _ring(2 * sent, sharding.replicas), -(-sent // BUCKET_BYTES)
        case "zero1":
            scattered, gathered, collectives = _ring(gradients, ranks), _ring(trained, ranks), 2 * units
        case "zero2":
            scattered, gathered = _ring(rounds * gradients, ranks), _ring(trained, ranks)
            collectives = (rounds + 1) * units
        case "zero3":
            again = weights - _kept(layout, sharding)
            scattered, gathered = _ring(reduces * gradients, ranks), _ring(rounds * (weights + again), ranks)
            collectives = (reduces + 2 * rounds) * units
        case "fsdp2":
            times = 2 if sharding.reshard else 1
            scattered, gathered = _ring(reduces * gradients, ranks), _ring(rounds * times * weights, ranks)
            collectives = (reduces + times * rounds) * units
    copies = sharding.replicas // ranks
    if sharding.hybrid:
        exchanged = _ring(2 * gradients, copies) // ranks
    waited_for = _tensors(layout, traced, sharding) + rounds * traced.sent
    return Traffic(
        scattered + gathered + exchanged + waited_for,
        _across(sharding, machines or sharding.nodes, scattered + gathered, exchanged),
        waited_for,
        collectives * (ranks - 1) + (2 * units * (copies - 1) if exchanged else 0),
        max(units, 1),
    )


def _zero_rows(layout: Layout, traced: OneDevice, sharding: Sharding) -> int:
    """Bytes of the embedding's gradient that whole copies need not exchange: rows of tokens that came on no rank. At
    least so many, since tokens may come twice; none where the head has the same weight."""
    table = next((p for p in layout.trained if p.name == layout.embedding), None)
    if table is None or layout.tied:
        return 0
    vocabulary = table.shape[0]
    rows = sharding.replicas * traced.micro_batches * traced.tokens
    if rows > MOST_ROWS * vocabulary:
        return 0
    width = sharding.reduce_width or sharding.compute_width or table.width
    return (vocabulary - rows) * (table.numel // vocabulary) * width


def _across(sharding: Sharding, machines: int, sharded: int, exchanged: int) -> int:
    """What a node sends to the next, from what a rank sends among the ranks that share one copy, and between copies."""
    if machines == 1:
        return 0
    local, together = sharding.devices // machines, sharding.shards * sharding.tensor_parallel
    rings = min(local, together)  # of copies, as many as a node has different shards
    return (sharded * sharding.tensor_parallel if together > local else 0) + exchanged * rings


def _ring(size: int, ranks: int) -> int:
    return size * (ranks - 1) // ranks


def _units(layout: Layout) -> int:
    """The layers, the embedding, and the rest."""
    return len({p.layer for p in layout.parameters}) + 1


def _kept(layout: Layout, sharding: Sharding) -> int:
    sizes = [p.numel for p in layout.parameters]
    width = sharding.compute_width or max((p.width for p in layout.parameters), default=0)
    return wanted_again(sizes, sharding.max_reuse) * width


def _tensors(layout: Layout, traced: OneDevice, sharding: Sharding) -> int:
    """All-reduces of hidden states: after each split by rows in forward, and as many in backward, where the inputs of
    the splits by columns meet; once after the embedding. Gathering the logits is left out: lowtide makes none."""
    if sharding.tensor_parallel == 1:
        return 0
    styles = [style_of(p.name, layout.plan) for p in layout.parameters if p.name.endswith("weight")]
    sums = sum(style.startswith("rowwise") for style in styles)
    width = sharding.compute_width or max(p.width for p in layout.parameters)
    hidden = traced.tokens // sharding.sequence_parallel * layout.hidden_size * width
    return _ring(2 * hidden, sharding.tensor_parallel) * (2 * sums + 1) * traced.micro_batches
