"""How a run may be spread over devices, simplest first, and the options that make lowtide's trainers do so."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lowtide.planner.cluster import Cluster
from lowtide.ranks.sharding import Sharding

DEGREES = (2, 4, 8, 16)
"""Of ranks that split sequences or layers together: those within a node."""
FILLED_UP = 1.25
"""Attention heads that ranks which split sequences may compute for each of the model's
(`engine.over_ranks.split_plan`)."""


def shardings_over(cluster: Cluster, heads: int) -> list[Sharding]:
    """All ways that a plan looks at: whole copies; shards whose layers are kept from forward to backward, or gathered
    again; copies of shards; shards in the host's memory; each with sequences or layers split within a node. DeepSpeed's
    ZeRO is not among them, since FSDP2 splits the same without another library.

    Args:
        cluster: the devices.
        heads: of the model's attention, which ranks that split sequences share out, filled up by few, and ranks that
            split layers have equally many of.
    """
    devices = cluster.devices
    if devices == 1:
        return [Sharding()]
    shards = Sharding(kind="fsdp2", devices=devices)
    plain = [
        Sharding(kind="ddp", devices=devices),
        shards,
        replace(shards, reshard=False),
        *(replace(shards, nodes=copies, hybrid=True) for copies in _copies(cluster.nodes)),
        replace(shards, offload_weights=True, offload_optimizer=True),
    ]
    degrees = [each for each in DEGREES if cluster.per_node % each == 0]
    split = [
        replace(each, sequence_parallel=degree)
        for degree in degrees
        if -(-heads // degree) * degree <= FILLED_UP * heads
        for each in plain
        if not each.hybrid or each.shards > degree  # accelerate's sizes have no word for copies of sequences alone
    ]
    split += [
        replace(each, tensor_parallel=degree)
        for degree in degrees
        if heads % degree == 0
        for each in plain
        if degree < devices and not each.offload_weights
    ]
    return [each for each in (*plain, *split) if each.runs and (each.kind == "ddp" or each.shards > 1)]


def _copies(nodes: int) -> list[int]:
    """Copies of shards that are each over one node, or over 2, 4 and so on."""
    return [
        nodes // each
        for each in (1 << power for power in range(nodes.bit_length()))
        if nodes % each == 0 and each < nodes
    ]


def options_of(sharding: Sharding) -> dict[str, Any]:
    """What a run file says, so that trainers spread the run so: `run.options.sharding.sharding_of` reads it back."""
    sizes = {"sp_size": sharding.sequence_parallel, "tp_size": sharding.tensor_parallel}
    found: dict[str, Any] = {}
    if sharding.hybrid:
        sizes["dp_replicate_size"] = sharding.nodes
        sizes["dp_shard_size"] = sharding.shards // sharding.sequence_parallel
    elif sharding.kind == "fsdp2":
        found["fsdp"] = True
        if sharding.offload_weights:
            found["fsdp_config"] = {"offload_params": True}
        elif not sharding.reshard:
            found["fsdp_config"] = {"reshard_after_forward": False}
    if named := {name: size for name, size in sizes.items() if size > 1}:
        found["parallelism_config"] = named
    return found


def sharding_name(sharding: Sharding) -> str:
    """What a person calls it."""
    if sharding.devices == 1:
        return "one device"
    engine = {"ddp": "whole copies", "fsdp2": "FSDP2"}.get(sharding.kind, sharding.kind.replace("zero", "ZeRO-"))
    if sharding.hybrid:
        engine = f"HSDP, {sharding.nodes} copies of {sharding.shards} shards"
    if sharding.kind == "fsdp2" and not sharding.reshard:
        engine += ", layers kept"
    if sharding.offload_weights or sharding.offload_optimizer:
        engine += ", in host memory"
    split = (("sequences", sharding.sequence_parallel), ("layers", sharding.tensor_parallel))
    return ", ".join([engine, *(f"{what} over {size}" for what, size in split if size > 1)])
