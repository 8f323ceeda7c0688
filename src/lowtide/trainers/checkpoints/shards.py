"""Checkpoints of a run whose weights lie in shards: a whole model, and optimizer states in a file a rank.

The model is put together weight by weight on the first rank's host, and saved as any model is. Optimizer states stay
cut, since together they are larger than the model; a run on another number of ranks cuts them anew, reading no more
than its own rows of each file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lowtide.compat.deepspeed import is_partitioned, put_in
from lowtide.compat.torch import let_go
from lowtide.engine.forward import causal_model
from lowtide.engine.stage import stage_of
from lowtide.engine.weights.stages import gathered_weights
from lowtide.memory.optimizers.narrow_step import unwrap_optimizer
from lowtide.ranks.shards import Place, is_sharded, part_of, parts_of, place_of, rows_of, whole_of
from lowtide.ranks.tensor import MESH
from lowtide.trainers.checkpoints.soundness import OPTIMIZER, Damage, load_states
from lowtide.trainers.checkpoints.weights import weights_in

SHARD = re.compile(r"optimizer-(\d+)-of-(\d+)\.pt")
"""The name of a rank's file."""
CUT = "cut"
"""The key of a rank's file that says how states are cut."""


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


def load_partitioned(model: nn.Module, folder: Path) -> None:
    """Puts the weights of a checkpoint into a model of ZeRO-3, one after the other; the first rank reads them.

    Args:
        model: without adapters.
    """
    found: dict[int, tuple[Tensor, list[str]]] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        found.setdefault(id(value), (value, []))[1].append(name)
    saved = weights_in(folder) if dist.get_rank() == 0 else {}
    for value, names in found.values():
        if is_partitioned(value):
            put_in(value, next((saved[name] for name in names if name in saved), None))


def states_are_cut(model: nn.Module, optimizer: Any) -> bool:
    """Whether each rank has states of its own."""
    return is_sharded(model) or hasattr(unwrap_optimizer(optimizer), "place")


def save_optimizer_shard(optimizer: Any, folder: Path) -> None:
    """Writes the states of what lies here: of shards of all weights and how many ranks hold parts along which dimension
    of the ranks, or of the weights of a pipeline's stage."""
    place = _place(optimizer)
    folder.mkdir(parents=True, exist_ok=True)  # the first rank's may be on another disk
    torch.save(
        {**optimizer.state_dict(), CUT: _cut_into(optimizer)},
        folder / f"optimizer-{place.rank + 1:05}-of-{place.ranks:05}.pt",
    )


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
        Damage: states that are not a row for each row of their weight, and were written by another number of ranks; or
            parts of layers that were split otherwise.
    """
    files = optimizer_files(folder)
    here = _place(optimizer)
    if here.ranks == len(files):
        states = load_states(files[here.rank])
        _check_cut(states.pop(CUT, None), optimizer)
        return states
    if hasattr(unwrap_optimizer(optimizer), "place"):
        raise Damage(
            f"optimizer states of {len(files)} rank(s) cannot be cut anew for {here.ranks}, where each steps parts of "
            f"its own: resume on {len(files)}, or with resume_without_states=True"
        )
    saved = [load_states(path) for path in files]
    _check_cut(saved[0].pop(CUT, {}), optimizer)
    parameters = _parameters(optimizer)
    state = {}
    for number, parameter in enumerate(parameters):
        of_ranks = [each["state"].get(number, {}) for each in saved]
        state[number] = {
            name: _cut(f"{name} of parameter {number}", [each[name] for each in of_ranks], parameter)
            for name in of_ranks[0]
        }
    return {**saved[0], "state": {number: values for number, values in state.items() if values}}


def _check_cut(cut: Mapping[str, int] | None, optimizer: Any) -> None:
    """Refuses states of layers that were split otherwise than here: their parts are no rows.

    Args:
        cut: how they were cut, as `_cut_into` says; empty of whole ones, None where it is not known.
    """
    here = _cut_into(optimizer)
    if cut is None or cut == here or MESH not in {*cut, *here} or not cut:
        return
    raise Damage(
        f"optimizer states of layers that were split {_text(cut)} cannot be cut anew for layers that are split "
        f"{_text(here)}: resume as they were, or with resume_without_states=True"
    )


def _text(cut: Mapping[str, int]) -> str:
    names = {MESH: "tp_size"}
    return "by " + " and ".join(f"{names.get(name, 'shards')}={size}" for name, size in cut.items()) if cut else "by 1"


def _cut_into(optimizer: Any) -> dict[str, int]:
    """How many ranks hold parts, by the dimension of the ranks."""
    return {name: ranks for name, (_, ranks) in parts_of(_parameters(optimizer)).items()}


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
        raise Damage(
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
