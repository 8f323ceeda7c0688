"""Cuts a model's weights into shards, one a rank, by torch's `fully_shard` (FSDP2).

What is gathered together, and let go together, is a unit: each layer, the embedding, each head, and what is left (the
final norm). A tied embedding and head are one unit. Heads and embedding run as calls of their own modules, so their
units open and close as those of layers do; or their rows stay where they are
(`engine.weights.sharded.split_vocabulary`).
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard

from lowtide.compat.gloo import ShardGather, ShardSum
from lowtide.compat.torch import fully_sharded_modules, parameters_of_unit, staying_gathered, unread_in_backward
from lowtide.compat.transformers import checkpointed_layers
from lowtide.engine.forward import causal_model, install, model_beside, score
from lowtide.engine.heads.head import body, language_model_within
from lowtide.engine.images import IMAGES, blank_image, running_tower
from lowtide.engine.weights.quantized import check_shardable
from lowtide.engine.weights.sharded.split_layers import split_layers
from lowtide.engine.weights.sharded.split_vocabulary import split_vocabulary as cut_vocabulary
from lowtide.engine.weights.sharded.split_vocabulary import whole_vocabulary
from lowtide.engine.weights.sharded.widening import taken_dtype, widen
from lowtide.ragged import RaggedBatch
from lowtide.ranks.sharding import Sharding
from lowtide.ranks.shards import equal_weights
from lowtide.ranks.tensor import MESH, TensorParallel

COPIES = "replicate"
"""The dimension of a device mesh whose ranks hold the same weights."""


def shard_model(model: nn.Module, sharding: Sharding, device: torch.device, *, split_vocabulary: bool = False) -> None:
    """Leaves on each rank its shard of a model's weights, on `device`; all ranks call it together.

    With tensor parallelism layers are split first (`engine.weights.sharded.split_layers`), and their parts are sharded.

    Args:
        model: whole on each rank, wrapped by PEFT or not; the engine is installed on it here, since what is replaced
            in modules has to stand before they are sharded. Ranks whose weights differ get those of the first.
        sharding: of kind "fsdp2", or with tensor parallelism alone.
        split_vocabulary: head and embedding are never gathered, where they can run on rows; not with copies (HSDP) or
            shards in the host's memory.

    Raises:
        ValueError: trained parameters of a unit are of several dtypes, or quantized weights cannot be cut.
    """
    install(model, padding_free=False)
    equal_weights(model, device)
    mesh = mesh_of(sharding, device)
    names = mesh.mesh_dim_names or ()
    if sharding.tensor_parallel > 1:
        replicas = mesh[COPIES].get_group() if COPIES in names and sharding.kind != "fsdp2" else None
        split_layers(model, TensorParallel(mesh[MESH].get_group(), replicas), mesh[MESH], device)
    if sharding.kind != "fsdp2":
        return
    check_shardable(model)
    _check_dtypes(model)
    offload = CPUOffloadPolicy() if sharding.offload_weights and device.type != "cpu" else OffloadPolicy()
    mesh = mesh[*(name for name in names if name != MESH)]
    split = cut_vocabulary(causal_model(model), mesh, device) if split_vocabulary else set()
    more: dict[str, Any] = {"mesh": mesh, "offload_policy": offload, "ignored_params": split}
    more["reshard_after_forward"] = sharding.reshard  # of what is left too: a forward without gradients lets go of all
    wanted = taken_dtype(model)
    embedding = causal_model(model).get_input_embeddings()
    for unit in units_of(model):
        if not split.issuperset(_parameters(unit)):
            widen(_parameters(unit), wanted)
            fully_shard(unit, **more)
            if unit is embedding:
                unread_in_backward(unit, True)
    widen(model.parameters(), wanted)
    fully_shard(model, **more)
    if device.type == "cpu":
        for module in fully_sharded_modules(model):
            module.set_custom_all_gather(cast(Any, ShardGather()))
            module.set_custom_reduce_scatter(cast(Any, ShardSum()))
    for buffer in model.buffers():
        buffer.data = buffer.data.to(device)


def _parameters(unit: Any) -> list[nn.Parameter]:
    return [p for module in (unit if isinstance(unit, list) else [unit]) for p in module.parameters()]


def sharing_weights(model: nn.Module) -> nn.Module:
    """A copy of a model whose parameters are the memory of the model's own."""
    shared = {id(p): nn.Parameter(p.detach(), requires_grad=False) for p in model.parameters()}
    return copy.deepcopy(model, shared)


def mesh_of(sharding: Sharding, device: torch.device) -> DeviceMesh:
    """The ranks: copies, of shards, of groups that layers are split between; of these, what there is several of."""
    sizes = {COPIES: sharding.replicas // sharding.shards, "shard": sharding.shards, MESH: sharding.tensor_parallel}
    several = {name: size for name, size in sizes.items() if size > 1} or {"shard": 1}
    return init_device_mesh(device.type, (*several.values(),), mesh_dim_names=(*several,))


def units_of(model: nn.Module) -> list[Any]:
    """The modules of each unit but for what is left to the whole model."""
    inner: Any = causal_model(model)
    other: Any = model_beside(inner)
    units = [*_layers_apart(inner), *_ends_of(inner, other)]
    if other is None:
        return units
    shared = set(inner.get_input_embeddings().parameters())
    units += _ends_of(other)
    # An embedding that both models run opens twice in a forward, and a head that is tied to it once.
    return (
        [unit for unit in units if shared.isdisjoint(_parameters(unit))] if shared & set(other.parameters()) else units
    )


def _layers_apart(inner: nn.Module) -> list[Any]:
    """The layers of a model, those within another before it; of layers that share weights (Zamba), a list of them."""
    units: list[list[nn.Module]] = []
    for layer in reversed(checkpointed_layers(inner)):
        within, weights = set(layer.modules()), set(layer.parameters())
        beside = [unit for unit in units if within.isdisjoint(unit)]
        sharing = [unit for unit in beside if not weights.isdisjoint(_parameters(unit))]
        units = [unit for unit in units if unit not in sharing]
        units.append([layer, *(each for unit in sharing for each in unit)])
    return [unit if len(unit) > 1 else unit[0] for unit in units]


def _ends_of(inner: Any, beside: Any = None) -> list[Any]:
    """The embedding of a model, with the heads that are tied to it, and the other heads."""
    inner = language_model_within(inner) or inner
    embedding = inner.get_input_embeddings()
    own = set(embedding.parameters())
    stacks = (body(inner), *((inner.get_encoder(), inner.get_decoder()) if inner.config.is_encoder_decoder else ()))
    others = [each for each in inner.children() if each not in (*stacks, embedding, beside)]
    heads = [each for each in others if any(True for _ in each.parameters())]
    tied = [head for head in heads if not own.isdisjoint(head.parameters())]
    opening = [embedding, *tied] if tied else embedding
    return [opening, *(head for head in heads if head not in tied)]


@contextlib.contextmanager
def weights_for_writing(model: nn.Module, gather: bool | int) -> Iterator[None]:
    """Around generation: how much of a sharded model each rank holds whole meanwhile. All ranks enter together.

    A vocabulary that is split is whole meanwhile, since tokens are drawn from all logits.

    Args:
        model: sharded or not; of one that is not, nothing changes.
        gather: True holds all of it, and ranks write without waiting for each other. False gathers each unit for each
            forward, so that forwards are of all ranks: one whose rows have ended goes on with a token of no row until
            all have ended. A number of bytes holds units up to that size, and gathers the rest.
    """
    modules = fully_sharded_modules(model)
    if not modules:
        yield
        return
    most = math.inf if gather is True else int(gather)
    held = _within(modules, most)
    ending = nullcontext() if len(held) == len(modules) else until_all_end(model)
    with whole_vocabulary(model), staying_gathered(held), ending:
        yield


def _within(modules: Sequence[FSDPModule], most: float) -> list[FSDPModule]:
    """The first units that are no larger together, in bytes."""
    found, total = [], 0
    for module in modules:
        total += sum(p.numel() * p.element_size() for p in parameters_of_unit(module))
        if total > most:
            break
        found.append(module)
    return found


@contextlib.contextmanager
def until_all_end(model: nn.Module) -> Iterator[None]:
    """While it lasts, ranks tell each other before each forward that one follows, and whether it shows images; at the
    end, this rank takes part in those of the others."""
    device = next(model.parameters()).device
    inner = causal_model(model)

    def goes_on(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        one = _of_one(device, follows=True, shows=IMAGES in kwargs)
        return args, {**blank_image(inner, device), **kwargs} if one.shows else kwargs

    hook = model.register_forward_pre_hook(goes_on, prepend=True, with_kwargs=True)  # before FSDP2 gathers the rest
    try:
        yield
    finally:
        hook.remove()
    idle = RaggedBatch.from_segments([[0, 0]]).to(device)
    while (one := _of_one(device, follows=False, shows=False)).follows:
        with running_tower(inner, one.shows), torch.no_grad():
            score(model, idle)


class _Forward(NamedTuple):
    """A forward that follows on any rank."""

    follows: bool
    shows: bool
    """Whether it shows images."""


def _of_one(device: torch.device, *, follows: bool, shows: bool) -> _Forward:
    """What is true on any rank."""
    flags = torch.tensor([follows, shows], dtype=torch.float32, device=device)
    dist.all_reduce(flags, dist.ReduceOp.MAX)
    return _Forward(*map(bool, flags.tolist()))


def _check_dtypes(model: nn.Module) -> None:
    dtypes = {p.dtype for p in model.parameters() if p.requires_grad}
    if len(dtypes) > 1:
        names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        raise ValueError(
            f"sharded weights need trained parameters of one dtype, and these are {names}: load the model with one "
            "dtype, or cast the adapters to it (`autocast_adapter_dtype=False`)"
        )
