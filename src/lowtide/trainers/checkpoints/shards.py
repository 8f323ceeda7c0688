"""Checkpoints of a run whose weights lie in shards: a whole model or one in a file a rank, and optimizer states in a
file a rank.

A whole model is put together weight by weight on the first rank's host, and saved as any model is. Otherwise each rank
writes its own rows (`engine.weights.sharded.shard_files`), and none holds more than these and one weight. Optimizer
states stay cut in any case, since together they are larger than the model. A run on another number of ranks cuts all of
it anew, reading no more than its own rows of each file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lowtide.compat.deepspeed import is_partitioned, put_in
from lowtide.compat.torch import let_go
from lowtide.engine.forward import causal_model
from lowtide.engine.over_ranks.stage import stage_of
from lowtide.engine.weights.sharded.shard_files import WeightFiles, shard_name
from lowtide.engine.weights.sharded.stages import gathered_weights
from lowtide.memory.optimizers.narrow_step import unwrap_optimizer
from lowtide.ranks.shards import (
    Place,
    is_cut_by_rows,
    is_sharded,
    local_of,
    own_rows,
    part_of,
    parts_of,
    place_of,
    rows_of,
    whole_of,
)
from lowtide.trainers.checkpoints.soundness import OPTIMIZER, load_states

SHARD = re.compile(r"optimizer-(\d+)-of-(\d+)\.pt")
"""The name of a rank's file."""


def whole_state(model: nn.Module, keep: bool) -> dict[str, Tensor]:
    """A model's weights and buffers, put together on the host; of adapters, those alone that are saved with them.

    All ranks call it together.

    Args:
        keep: whether this rank wants them; the others get nothing.
    """
    let_go(model)
    if (stage := stage_of(causal_model(model))) is not None:
        return gathered_weights(model, saved_weights(stage.whole), keep)
    found: dict[str, Tensor] = {}
    gathered: dict[int, Tensor] = {}
    for name, value in saved_weights(model).items():
        if id(value) not in gathered:
            whole = whole_of(value)
            gathered[id(value)] = whole.cpu() if keep else torch.empty(0)
        found[name] = gathered[id(value)]
    return found if keep else {}


def saved_weights(model: nn.Module) -> dict[str, Tensor]:
    """What a checkpoint holds of a model: all, or of adapters what is saved with them."""
    state = model.state_dict(keep_vars=True)
    if not hasattr(model, "peft_config"):
        return state
    from peft import get_peft_model_state_dict

    own: Mapping[str, Tensor] = get_peft_model_state_dict(model, state_dict=state)  # type: ignore[arg-type]
    wanted = {id(value) for value in own.values()}
    return {name: value for name, value in state.items() if id(value) in wanted}


def own_shard(model: nn.Module) -> tuple[str, dict[str, tuple[Tensor, int]]]:
    """The rows of a model's weights and buffers that this rank writes, and the name of their file; weights that are
    shared come once. All ranks call it together.

    Args:
        model: without adapters.
    """
    let_go(model)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    targets = getattr(model, "all_tied_weights_keys", None) or {}
    found: dict[str, tuple[Tensor, int]] = {}
    place = Place((), rank, ranks)
    for value, names in _values(model):
        if isinstance(value, DTensor):
            place = place_of(value)
        if (part := own_rows(value, rank, ranks)) is not None and (part[0].numel() or not part[1]):
            found[next((name for name in names if name not in targets), names[0])] = part
    return shard_name(place.rank, place.ranks), found


@torch.no_grad()
def load_weights(model: nn.Module, files: Sequence[Path]) -> None:
    """Puts saved weights into a model, whole or in shards, one after the other: each rank reads its own rows, of
    ZeRO-3's the first rank reads all. All ranks call it together.

    Args:
        model: without adapters.
        files: of a whole model, or of ranks.
    """
    let_go(model)
    with WeightFiles(files) as saved:
        for value, names in _values(model):
            name = next((name for name in names if name in saved.shapes), None)
            if is_partitioned(value):
                put_in(value, saved.rows(name) if name and dist.get_rank() == 0 else None)
            elif name is not None:
                by_rows = isinstance(value, DTensor) and is_cut_by_rows(value)
                own = saved.rows(name, *place_of(value).rows) if by_rows else part_of(saved.rows(name), value)
                local_of(value).copy_(own)


def _values(model: nn.Module) -> list[tuple[Tensor, list[str]]]:
    """A model's weights and buffers, each with all names that it has."""
    found: dict[int, tuple[Tensor, list[str]]] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        found.setdefault(id(value), (value, []))[1].append(name)
    return list(found.values())


def states_are_cut(model: nn.Module, optimizer: Any) -> bool:
    """Whether each rank has states of its own."""
    return is_sharded(model) or hasattr(unwrap_optimizer(optimizer), "place")


def save_optimizer_shard(optimizer: Any, folder: Path) -> None:
    """Writes the states of what lies here: of shards of all weights, or of the weights of a pipeline's stage."""
    place = _place(optimizer)
    folder.mkdir(parents=True, exist_ok=True)  # the first rank's may be on another disk
    torch.save(optimizer.state_dict(), folder / f"optimizer-{place.rank + 1:05}-of-{place.ranks:05}.pt")


class OfAnotherRun(ValueError):
    """Why states that are whole are of no use to this run."""


def optimizer_files(folder: Path) -> list[Path]:
    """The files of a checkpoint's optimizer states, in the order of ranks; none where some are missing."""
    if (folder / OPTIMIZER).exists():
        return [folder / OPTIMIZER]
    found = {int(match[1]): (int(match[2]), path) for path in folder.glob("*.pt") if (match := SHARD.match(path.name))}
    counts = {ranks for ranks, _ in found.values()}
    if len(counts) != 1 or len(found) != max(counts):
        return []
    return [found[rank][1] for rank in sorted(found)]


def load_optimizer_states(optimizer: Any, folder: Path) -> Any:
    """A checkpoint's optimizer states for the shards that lie here, cut anew where other ranks wrote them.

    Raises:
        OfAnotherRun: states that are not a row for each row of their weight, written by another number of ranks.
    """
    files = optimizer_files(folder)
    here = _place(optimizer)
    if here.ranks == len(files):
        return load_states(files[here.rank])
    if hasattr(unwrap_optimizer(optimizer), "place"):
        raise OfAnotherRun(
            f"optimizer states of {len(files)} rank(s) cannot be cut anew for {here.ranks}, where each steps parts of "
            f"its own: resume on {len(files)}, or with resume_without_states=True"
        )
    saved = [load_states(path) for path in files]
    parameters = _parameters(optimizer)
    state = {}
    for number, parameter in enumerate(parameters):
        of_ranks = [each["state"].get(number, {}) for each in saved]
        state[number] = {
            name: _cut(f"{name} of parameter {number}", [each[name] for each in of_ranks], parameter)
            for name in of_ranks[0]
        }
    return {**saved[0], "state": {number: values for number, values in state.items() if values}}


def _cut(what: str, values: Sequence[Any], parameter: Tensor) -> Any:
    """The part that lies here of a parameter's state, from what each rank wrote of it; what has no rows is every
    rank's."""
    first = values[0]
    if not isinstance(first, Tensor) or first.dim() == 0:
        return first
    if len(values) == 1 and first.shape == parameter.shape:
        return part_of(first, parameter)
    place = place_of(parameter)
    ranks, (start, stop) = len(values), place.rows
    spans = [rows_of(place.shape[0], rank, ranks) for rank in range(ranks)]
    if any(tuple(v.shape) != (b - a, *place.shape[1:]) for v, (a, b) in zip(values, spans, strict=True)):
        raise OfAnotherRun(
            f"{what} was written by {ranks} rank(s) in a form that cannot be cut anew for {place.ranks}: resume on "
            f"{ranks}, or with resume_without_states=True"
        )
    pieces = [v[max(start, a) - a : max(min(stop, b) - a, 0)] for v, (a, b) in zip(values, spans, strict=True)]
    return torch.cat([piece for piece in pieces if len(piece)] or pieces[:1])


def _parameters(optimizer: Any) -> list[Tensor]:
    """As an optimizer's states count them: the whole of each, of which it steps the shard that lies here."""
    groups = unwrap_optimizer(optimizer).param_groups
    return [getattr(parameter, "whole", parameter) for group in groups for parameter in group["params"]]


def _place(optimizer: Any) -> Place:
    """Of all ranks that hold parts, this one; DeepSpeed's optimizers say it themselves."""
    own: Place | None = getattr(unwrap_optimizer(optimizer), "place", None)
    if own is not None:
        return own
    rank, ranks = 0, 1
    for number, size in parts_of(_parameters(optimizer)).values():
        rank, ranks = rank * size + number, ranks * size
    return Place((0,), rank, ranks)
