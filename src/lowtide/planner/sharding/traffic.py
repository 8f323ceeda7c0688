"""The bytes that ranks send each other in a step, which with the links' rates give its time.

Counted for rings, which send the least there is to send (Thakur, Rabenseifner and Gropp, "Optimization of collective
communication operations in MPICH", 2005): gathering or scattering S bytes over N ranks sends S(N-1)/N from each, an
all-reduce twice that. A ring over several nodes crosses from each node to the next once, so that the link between
nodes carries what a rank sends; with hybrid sharding only the sum of the shards' gradients crosses it.
"""

from __future__ import annotations

from dataclasses import dataclass

from lowtide.engine.weights.split_layers import style_of
from lowtide.planner.sharding.layout import Layout, byte_sum
from lowtide.planner.sharding.moment import OneDevice
from lowtide.planner.sharding.zero import wanted_again
from lowtide.ranks.sharding import Sharding


@dataclass(frozen=True)
class Traffic:
    """Bytes of one optimizer step."""

    per_rank: int
    """That a rank sends."""
    between_nodes: int
    """That the ranks of one node together send to the next."""


def traffic_of(layout: Layout, traced: OneDevice, sharding: Sharding) -> Traffic:
    """What one step sends.

    Args:
        layout: of one rank, after its matrices were split.
        traced: its tokens and micro-batches.
        sharding: with its sizes resolved.
    """
    weights = byte_sum(layout.parameters, sharding.compute_width)
    trained = byte_sum(layout.trained, sharding.compute_width)
    gradients = byte_sum(layout.trained, sharding.reduce_width or sharding.compute_width)
    ranks, rounds = sharding.shards, traced.micro_batches
    reduces = rounds if sharding.kind in ("zero2", "zero3") or sharding.reduce_each else 1
    scattered = gathered = exchanged = 0
    match sharding.kind:
        case "ddp":
            exchanged = _ring(2 * gradients, sharding.replicas)
        case "zero1":
            scattered, gathered = _ring(gradients, ranks), _ring(trained, ranks)
        case "zero2":
            scattered, gathered = _ring(rounds * gradients, ranks), _ring(trained, ranks)
        case "zero3":
            again = weights - _kept(layout, sharding)
            scattered, gathered = _ring(reduces * gradients, ranks), _ring(rounds * (weights + again), ranks)
        case "fsdp2":
            times = 2 if sharding.reshard else 1
            scattered, gathered = _ring(reduces * gradients, ranks), _ring(rounds * times * weights, ranks)
    if sharding.hybrid:
        exchanged = _ring(2 * gradients, sharding.nodes) // ranks
    in_groups = exchanged + (0 if sharding.hybrid else scattered + gathered)
    across = in_groups * sharding.tensor_parallel * (ranks if sharding.hybrid else 1) if sharding.nodes > 1 else 0
    return Traffic(scattered + gathered + exchanged + _tensors(layout, traced, sharding), across)


def _ring(size: int, ranks: int) -> int:
    return size * (ranks - 1) // ranks


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
    hidden = traced.tokens * layout.hidden_size * width
    return _ring(2 * hidden, sharding.tensor_parallel) * (2 * sums + 1)
