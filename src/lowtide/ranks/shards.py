"""Weights that are cut into shards, one a rank: the part that lies here, and what takes all of them together.

A shard is a run of rows of a weight, of its first dimension (a `DTensor` of torch's `fully_shard`). What acts number by
number, as an optimizer's step does, runs on the shards as on plain tensors; a norm is of all of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Placement, distribute_tensor

from lowtide.compat.deepspeed import gathered, is_partitioned, shape_of, staying_gathered
from lowtide.compat.torch import fully_sharded_modules, sent_parts, subclassed


def is_gathered(model: nn.Module) -> bool:
    """Whether each forward of a model gathers its weights from all ranks, and so is one of all of them together."""
    return is_fully_sharded(model) or any(is_partitioned(p) for p in model.parameters())


def is_fully_sharded(model: nn.Module) -> bool:
    """Whether `fully_shard` has cut a model."""
    return bool(fully_sharded_modules(model))


def is_sharded(model: nn.Module) -> bool:
    """Whether parts of a model's weights lie on other ranks."""
    return is_gathered(model) or any(isinstance(p, DTensor) for p in model.parameters())


def whole_shape(tensor: Tensor) -> torch.Size:
    """The shape of a whole weight, of which a part may lie here."""
    return shape_of(tensor)


def local_of(tensor: Tensor) -> Tensor:
    """The part of a tensor that lies on this rank, without a copy; all of one that is not sharded."""
    return cast(DTensor, tensor.detach()).to_local() if isinstance(tensor, DTensor) else tensor


def whole_of(tensor: Tensor) -> Tensor:
    """All of a tensor, gathered from the shards; every rank asks for it together."""
    if is_partitioned(tensor):
        return gathered(tensor)
    detached = tensor.detach()
    return detached.full_tensor() if isinstance(detached, DTensor) else detached


@contextlib.contextmanager
def held_whole(modules: Iterable[nn.Module]) -> Iterator[None]:
    """While it lasts, each rank holds all of the parameters of some modules, without those of modules below them and
    without gradients; all ranks enter together. Nothing changes where none is sharded."""
    sharded = [
        (module, name, p)
        for module in modules
        for name, p in module.named_parameters(recurse=False)
        if isinstance(p, DTensor) or is_partitioned(p)
    ]
    whole: dict[int, nn.Parameter] = {}
    for module, name, p in sharded:
        if id(p) not in whole:
            whole[id(p)] = nn.Parameter(whole_of(p), requires_grad=False)
        setattr(module, name, whole[id(p)])
    try:
        yield
    finally:
        for module, name, p in sharded:
            setattr(module, name, p)


def copied(weight: Tensor, device: torch.device) -> Tensor:
    """A frozen copy of a weight: of a shard one that is cut as it is, and lies where it does; of any other a whole one,
    on `device`. All ranks that hold parts of a weight ask together."""
    if isinstance(weight, DTensor):
        return weight.detach().clone()
    return (gathered(weight) if is_partitioned(weight) else weight.detach().clone()).to(device)


@contextlib.contextmanager
def standing_in(model: nn.Module, pairs: Sequence[tuple[nn.Parameter, Tensor]]) -> Iterator[None]:
    """While it lasts, some of a model's weights have the numbers of others, which `copied` made of them; all ranks
    enter together.

    What is gathered of shards is let go before and after, so that no forward meets the other's numbers.

    Args:
        pairs: a weight, and what stands in for it.
    """
    cut = [(local_of(p).data, local_of(other)) for p, other in pairs if isinstance(p, DTensor)]
    whole = [(p, other) for p, other in pairs if not isinstance(p, DTensor)]
    partitioned = [p for p, _ in whole if is_partitioned(p)]
    units = fully_sharded_modules(model) if cut else []
    with staying_gathered(partitioned) if partitioned else nullcontext():
        own = [local.clone() for local, _ in cut]
        kept = [p.data for p, _ in whole]
        try:
            _let_go_of_gathered(units)
            for local, other in cut:
                local.copy_(other)
            for p, other in whole:
                p.data = other.to(device=p.device, dtype=p.dtype)
            yield
        finally:
            _let_go_of_gathered(units)
            for (local, _), before in zip(cut, own, strict=True):
                local.copy_(before)
            for (p, _), before in zip(whole, kept, strict=True):
                p.data = before


def _let_go_of_gathered(units: Iterable[FSDPModule]) -> None:
    for unit in units:
        unit.reshard()


def rows_of(rows: int, rank: int, ranks: int) -> tuple[int, int]:
    """(first, end) of the rows that a rank holds of so many, as `torch.chunk` cuts them: the last ranks may have fewer,
    or none."""
    each = -(-rows // ranks)
    return min(rank * each, rows), min((rank + 1) * each, rows)


@dataclass(frozen=True)
class Place:
    """Which rows of a weight lie here."""

    shape: tuple[int, ...]
    """Of the whole weight."""
    rank: int
    """Among the ranks that hold a shard of it."""
    ranks: int

    @property
    def rows(self) -> tuple[int, int]:
        """(first, end)"""
        return rows_of(self.shape[0], self.rank, self.ranks)


def place_of(tensor: Tensor) -> Place:
    """Which rows of a weight lie on this rank; all of one that is not sharded, as if one rank held it."""
    if not isinstance(tensor, DTensor):
        return Place(tuple(tensor.shape), 0, 1)
    along, mesh = cut_along(tensor)[0], tensor.device_mesh
    return Place(tuple(tensor.shape), mesh.get_local_rank(along), mesh.size(along))


def is_cut_by_rows(tensor: DTensor) -> bool:
    """Whether ranks hold rows of a weight; else they hold columns, or parts of parts (layers split between ranks)."""
    along = cut_along(tensor)
    return len(along) == 1 and tensor.placements[along[0]].is_shard(0)


def part_of(whole: Tensor, weight: Tensor) -> Tensor:
    """The part that lies here of a tensor of a weight's shape, all of which is known: as the weight is cut."""
    if not isinstance(weight, DTensor):
        return whole
    return distribute_tensor(whole, weight.device_mesh, weight.placements, src_data_rank=None).to_local()


def as_part(own: Tensor, whole: Tensor, mesh: DeviceMesh, placement: Placement) -> nn.Parameter:
    """A parameter in the place of a whole one, of which a part lies here.

    Args:
        own: the part.
        whole: what it is of.
        placement: how it was cut, along the one dimension of `mesh`.
    """
    how: dict[str, Any] = {"run_check": False, "shape": whole.shape, "stride": whole.stride()}
    return nn.Parameter(DTensor.from_local(own, mesh, [placement], **how), requires_grad=whole.requires_grad)


def parts_of(weights: Iterable[Tensor]) -> dict[str, tuple[int, int]]:
    """(number of this rank, how many) along each dimension of device meshes whose ranks hold parts of weights."""
    found: dict[str, tuple[int, int]] = {}
    for weight in weights:
        if isinstance(weight, DTensor):
            mesh = weight.device_mesh
            for along in cut_along(weight):
                name = (mesh.mesh_dim_names or ())[along] if mesh.mesh_dim_names else str(along)
                found[name] = mesh.get_local_rank(along), mesh.size(along)
    return dict(sorted(found.items()))


def own_rows(tensor: Tensor, rank: int, ranks: int) -> tuple[Tensor, int] | None:
    """The rows of a weight that this rank saves, and the number of the first; None where others save it.

    Of a weight of ZeRO-3, whose parts are no rows, all ranks ask together, one weight after the other. What is not
    sharded the first rank saves, and of several copies (HSDP) the first copy's ranks.

    Args:
        rank: of all `ranks`.
    """
    if is_partitioned(tensor) and shape_of(tensor):
        first, end = rows_of(shape_of(tensor)[0], rank, ranks)
        return gathered(tensor)[first:end].to("cpu", copy=True), first
    if isinstance(tensor, DTensor):
        copies = [number for number, each in enumerate(tensor.placements) if each.is_replicate()]
        saves = all(tensor.device_mesh.get_local_rank(number) == 0 for number in copies)
        return (local_of(tensor), place_of(tensor).rows[0]) if saves else None
    whole = whole_of(tensor)
    return (whole, 0) if rank == 0 else None


def group_of(tensor: DTensor) -> dist.ProcessGroup:
    """The ranks that hold the shards of one copy of a weight."""
    return tensor.device_mesh.get_group(cut_along(tensor)[0])


def cut_along(tensor: DTensor) -> list[int]:
    """The dimensions of its device mesh whose ranks hold parts of a tensor, and not copies."""
    return [number for number, each in enumerate(tensor.placements) if not each.is_replicate()]


def norm_of(tensors: Sequence[Tensor]) -> Tensor:
    """The norm of tensors, over the shards of all ranks."""
    sharded = [tensor for tensor in tensors if isinstance(tensor, DTensor)]
    if not sharded:
        return nn.utils.get_total_norm(tensors)
    alike: dict[Any, list[Tensor]] = {}
    for tensor in sharded:
        alike.setdefault((tensor.device_mesh, *cut_along(tensor)), []).append(local_of(tensor))
    total = nn.utils.get_total_norm([tensor for tensor in tensors if not isinstance(tensor, DTensor)]).double() ** 2
    for (mesh, *along), parts in alike.items():
        square = nn.utils.get_total_norm(parts).double() ** 2
        for number in along:
            dist.all_reduce(square, group=mesh.get_group(number))
        total = total.to(square.device) + square
    return total.sqrt().to(local_of(sharded[0]).dtype)


def local_twin(tensor: Tensor) -> Tensor:
    """The part of a parameter that lies here, with the part of its gradient; both share their memory with it."""
    if not isinstance(tensor, DTensor):
        return tensor
    twin = local_of(tensor)
    twin.grad = None if tensor.grad is None else local_of(tensor.grad)
    return twin


class LocalShard(nn.Parameter):
    """The part of a sharded parameter that lies here, as an optimizer steps it: it shares the parameter's memory."""

    whole: nn.Parameter
    """The parameter, a `DTensor`."""

    @classmethod
    def of(cls, parameter: Any) -> LocalShard:
        made = subclassed(cls, local_of(parameter), True)
        made.whole = parameter
        return made


def step_local_shards(optimizer: torch.optim.Optimizer) -> None:
    """Puts in place of an optimizer's sharded parameters, before it has states, their parts that lie here.

    Every optimizer that acts number by number then steps them, with its own kernels, and keeps states of shards alone.
    """
    for group in optimizer.param_groups:
        group["params"] = [LocalShard.of(p) if isinstance(p, DTensor) else p for p in group["params"]]


@contextlib.contextmanager
def local_gradients(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """While it lasts, the local shards of an optimizer have the gradients of their parameters, and from now on the
    memory: a call of `model.to` gives a `DTensor` other memory, even on the device where it is."""
    shards = [p for group in optimizer.param_groups for p in group["params"] if isinstance(p, LocalShard)]
    for shard in shards:
        shard.grad, shard.data = None, local_of(shard.whole)
        shard.grad = None if shard.whole.grad is None else local_of(shard.whole.grad)
    try:
        yield
    finally:
        for shard in shards:
            shard.grad = None


DIGESTED = 1 << 20
"""Numbers of a weight that are copied at a time, as 64-bit ones."""


@torch.no_grad()
def equal_weights(model: nn.Module, device: torch.device) -> None:
    """Gives every rank the weights and buffers of the first, where they differ.

    What is equal is only read: weights that are mapped from a file stay mapped.
    """
    tensors = [part for tensor in (*model.parameters(), *model.buffers()) for part in sent_parts(tensor)]
    digests = torch.stack([_digest(tensor) for tensor in tensors]).to(device)
    low, high = digests.clone(), digests
    dist.all_reduce(low, dist.ReduceOp.MIN)
    dist.all_reduce(high, dist.ReduceOp.MAX)
    equal = ((low == high) | (low.isnan() & high.isnan())).all(1)
    for tensor, same in zip(tensors, equal.tolist(), strict=True):
        if not same:
            here = tensor.to(device)
            dist.broadcast(here, src=0)
            tensor.copy_(here)


def _digest(tensor: Tensor) -> Tensor:
    """[2]: numbers that two tensors hardly share unless they are equal."""
    total = torch.zeros(2, dtype=torch.float64)
    for numbers in tensor.detach().flatten().split(DIGESTED):
        wide = numbers.double()
        total += torch.stack([wide.sum(), wide[::2].sum()]).cpu()
    return total
