"""Cuts a model's weights into shards, one a rank, by torch's `fully_shard` (FSDP2).

What is gathered together, and let go together, is a unit: each layer, the embedding, each head, and what is left (the
final norm). A tied embedding and head are one unit. Heads and embedding run as calls of their own modules, so their
units open and close as those of layers do.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

from lowtide.compat.transformers import checkpointed_layers
from lowtide.engine.forward import causal_model, install
from lowtide.engine.heads.head import body
from lowtide.ranks.shards import equal_weights
from lowtide.ranks.sharding import Sharding


def shard_model(model: nn.Module, sharding: Sharding, device: torch.device) -> None:
    """Leaves on each rank its shard of a model's weights, on `device`; all ranks call it together.

    Args:
        model: whole on each rank, wrapped by PEFT or not; the engine is installed on it here, since what is replaced
            in modules has to stand before they are sharded. Ranks whose weights differ get those of the first.
        sharding: of kind "fsdp2".

    Raises:
        ValueError: trained parameters of a unit are of several dtypes.
    """
    install(model, padding_free=False)
    _check_dtypes(model)
    equal_weights(model, device)
    offload = CPUOffloadPolicy() if sharding.offload_weights and device.type != "cpu" else OffloadPolicy()
    more: dict[str, Any] = {"mesh": mesh_of(sharding, device), "offload_policy": offload}
    for unit in units_of(model):
        fully_shard(unit, reshard_after_forward=sharding.reshard, **more)
    fully_shard(model, **more)
    for buffer in model.buffers():
        buffer.data = buffer.data.to(device)


def sharing_weights(model: nn.Module) -> nn.Module:
    """A copy of a model whose parameters are the memory of the model's own."""
    shared = {id(p): nn.Parameter(p.detach(), requires_grad=False) for p in model.parameters()}
    return copy.deepcopy(model, shared)


def mesh_of(sharding: Sharding, device: torch.device) -> DeviceMesh:
    """The ranks, in one line of shards, or in lines that each hold a copy (HSDP)."""
    if sharding.hybrid:
        lines = (sharding.replicas // sharding.shards, sharding.shards)
        return init_device_mesh(device.type, lines, mesh_dim_names=("replicate", "shard"))
    return init_device_mesh(device.type, (sharding.shards,), mesh_dim_names=("shard",))


def units_of(model: nn.Module) -> list[Any]:
    """The modules of each unit but for what is left to the whole model."""
    inner: Any = causal_model(model)
    embedding = inner.get_input_embeddings()
    own = set(embedding.parameters())
    heads = [each for each in inner.children() if each is not body(inner) and any(True for _ in each.parameters())]
    tied = [head for head in heads if not own.isdisjoint(head.parameters())]
    opening = [embedding, *tied] if tied else embedding
    return [*checkpointed_layers(inner), opening, *(head for head in heads if head not in tied)]


def _check_dtypes(model: nn.Module) -> None:
    dtypes = {p.dtype for p in model.parameters() if p.requires_grad}
    if len(dtypes) > 1:
        names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        raise ValueError(
            f"sharded weights need trained parameters of one dtype, and these are {names}: load the model with one "
            "dtype, or cast the adapters to it (`autocast_adapter_dtype=False`)"
        )
