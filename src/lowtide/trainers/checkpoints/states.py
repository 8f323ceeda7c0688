"""Whether optimizer states fit where a checkpoint does not say which run it is of: transformers' and older ones."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowtide.memory.optimizers.compressed_adamw import CompressedAdamW
from lowtide.trainers.checkpoints.soundness import OPTIMIZER, load_states

MOMENTS = {"exp_avg", "exp_avg_sq"}
KNOWN: Mapping[type, set[str]] = {
    torch.optim.AdamW: {"step", "max_exp_avg_sq"} | MOMENTS,
    torch.optim.Adam: {"step", "max_exp_avg_sq"} | MOMENTS,
    CompressedAdamW: {"step", "remainder", "seed", "ties", "exp_avg_scale", "exp_avg_sq_scale"} | MOMENTS,
}
"""By optimizer, the names of the states that a parameter may have; others' are not known."""
NEWER = {"foreach", "maximize", "capturable", "differentiable", "fused", "decoupled_weight_decay", "initial_lr"}
"""Settings of groups that torch fills in where older checkpoints lack them."""


def check_states(trainer: Any, path: Path) -> dict[str, str]:
    """Why optimizer states do not fit the run of a trainer, by their file; empty where nothing says they do not."""
    saved, trained = load_states(path), [p for p in trainer.model.parameters() if p.requires_grad]
    count = sum(len(group["params"]) for group in saved["param_groups"])
    if count != len(trained):
        return {OPTIMIZER: f"it is of {count} trained parameters, and this run trains {len(trained)}"}
    kind: type = trainer.optimizer_maker.kind
    foreign = _foreign(trainer, saved)
    if foreign:
        return {OPTIMIZER: f"it is of another optimizer than this run's {kind.__name__}: it {foreign}"}
    first = (state.get("exp_avg") for state in saved["state"].values())
    moments = [each for each in first if isinstance(each, Tensor) and each.is_floating_point()]
    shapes = sorted(tuple(p.shape) for p in trained)
    if kind in KNOWN and len(moments) == count and sorted(tuple(m.shape) for m in moments) != shapes:
        return {OPTIMIZER: "its moments have other shapes than this run's parameters"}
    return {}


def _foreign(trainer: Any, saved: Mapping[str, Any]) -> str:
    """What tells that states are of another optimizer; empty where nothing does."""
    if lacking := trainer.optimizer_maker.group_settings - NEWER - saved["param_groups"][0].keys():
        return f"lacks {min(lacking)}"
    names = {name for state in saved["state"].values() for name in state}
    known = KNOWN.get(trainer.optimizer_maker.kind)
    if known is None or not names:
        return ""
    if others := names - known:
        return f"holds {min(others)}"
    return "" if names >= MOMENTS else "holds no moments"
