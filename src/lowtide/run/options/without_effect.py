"""Options of TRL and transformers that are accepted and change nothing here; the start-up report says why.

A script that was written for another trainer runs as it is. What would train something else than was asked for is not
in this table: it is refused (`REFUSED` in `run.options.training`).
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from transformers.trainer_utils import SchedulerType

from lowtide.memory.optimizers.states import optimizer_name
from lowtide.run.options.schedule import WITHOUT_WARMUP

OF_LOW_RANK = ("galore", "apollo")
"""How the names of the optimizers begin that `optim_target_modules` is for."""
DDP = ("ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_static_graph")

WITHOUT_EFFECT: dict[str, str] = {
    "pad_to_multiple_of": "batches have no padding",
    "pad_token": "batches have no padding",
    "label_smoothing_factor": "it smooths the targets of methods that learn given tokens or classes. The losses of "
    "preferences that can be smoothed have `label_smoothing`",
    "label_names": "labels are found by their column, `labels`",
    "liger_kernel_config": "use_liger_kernel=True puts in all kernels that the model can have, except Liger's losses",
    **dict.fromkeys(DDP, "ranks add up gradients after backward, without DistributedDataParallel"),
}
"""By name, why an option has no effect in any trainer."""


def without_effect(args: Any) -> list[tuple[str, str]]:
    """(option, sentence) for each option that was set and has no effect."""
    defaults = {each.name: each.default for each in fields(args)}
    found = []
    for name, why in args.without_effect.items():
        value = getattr(args, name, None)
        if value is not None and value != defaults.get(name):
            found.append((name, f"{value!r} has no effect: {why}"))
    strategy = getattr(args, "packing_strategy", None)
    packs = getattr(args, "packing", False) or getattr(args, "eval_packing", False)
    if strategy != defaults.get("packing_strategy") and not packs:
        found.append(("packing_strategy", f"{strategy!r} has no effect: it requires packing=True"))
    kind = SchedulerType(args.lr_scheduler_type)
    if kind in WITHOUT_WARMUP and args.warmup_steps not in (0, defaults.get("warmup_steps")):
        why = f"lr_scheduler_type={kind.value!r} has no warmup; 'constant_with_warmup' has one"
        found.append(("warmup_steps", f"{args.warmup_steps:g} has no effect: {why}"))
    optimizer = optimizer_name(args)
    if args.optim_target_modules is not None and not optimizer.startswith(OF_LOW_RANK):
        why = f"optim={optimizer!r} trains all modules; GaLore's and APOLLO's optimizers read it"
        found.append(("optim_target_modules", f"{args.optim_target_modules!r} has no effect: {why}"))
    if args.greater_is_better is not None and args.metric_for_best_model is None:
        why = "it requires metric_for_best_model, by which checkpoints are compared"
        found.append(("greater_is_better", f"{args.greater_is_better!r} has no effect: {why}"))
    return found
