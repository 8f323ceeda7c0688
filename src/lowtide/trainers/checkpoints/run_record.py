"""What a run says of itself in its checkpoints, and how another run that resumes from one differs.

The states of an optimizer are numbers without names: those of another optimizer, or of other parameters, may fit by
accident. So a checkpoint names the optimizer, with the settings that decide what its states hold, and the parameters
that it stepped; and what decides how far the data was read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from transformers.trainer_utils import has_length

from lowtide.compat.transformers import made_own_schedule
from lowtide.process.versions import version_of
from lowtide.ranks.shards import parts_of, whole_shape
from lowtide.ranks.tensor import MESH
from lowtide.trainers.checkpoints.soundness import OPTIMIZER, SCHEDULER

LAYOUT = ("amsgrad", "momentum", "centered", "rank", "proj_type", "remainder", "moment_bits", "block_size")
"""Settings of parameter groups that decide which states a parameter has."""
IN_STATES = ("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon")
"""Options that the states of optimizer and scheduler carry on from the checkpoint."""
OF_METRICS = {"reduce_lr_on_plateau", "greedy"}
"""Schedules that follow a metric; the others follow the number of the step."""


def run_record(trainer: Any) -> dict[str, Any]:
    """The run of a trainer, as JSON."""
    args, rows = trainer.args, trainer.train_dataset
    trained = (p for p in trainer.model.parameters() if p.requires_grad)
    return {
        "versions": {name: version_of(name) for name in ("lowtide", "torch", "transformers")},
        "optimizer": trainer.optimizer_maker.layout,
        "scheduler": scheduler_name(trainer),
        "settings": {name: getattr(args, name) for name in IN_STATES} if trainer.optimizer_maker.name else {},
        "adapters": hasattr(trainer.model, "peft_config"),
        "trained": digest(trainer.model),
        "rows": len(rows) if has_length(rows) else None,
        "rows_a_step": args.per_device_train_batch_size * args.gradient_accumulation_steps * args.data_ranks,
        "ranks": args.world_size,
        "stages": args.sharding.pipeline_parallel,
        "parts": {name: ranks for name, (_, ranks) in parts_of(trained).items()},
    }


def optimizer_layout(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What decides which states an optimizer has: its class, and the settings of its groups that say so."""
    kind = type(optimizer)
    settings = [{name: group[name] for name in LAYOUT if group.get(name)} for group in optimizer.param_groups]
    bits = getattr(getattr(optimizer, "args", None), "optim_bits", None)  # bitsandbytes
    return {
        "class": f"{kind.__module__.split('.')[0]}.{kind.__qualname__}",
        **({"bits": bits} if bits is not None else {}),
        **({"groups": settings} if any(settings) else {}),
    }


def scheduler_name(trainer: Any) -> str:
    """The learning-rate schedule: a name of transformers, or the class of one that was passed."""
    given = trainer.lr_scheduler
    if given is not None and not made_own_schedule(trainer):
        return type(given).__name__
    return str(getattr(trainer.args.lr_scheduler_type, "value", trainer.args.lr_scheduler_type))


def digest(model: nn.Module) -> dict[str, Any]:
    """The parameters that are trained: how many, and a digest of their names and shapes in the optimizer's order."""
    trained = [f"{name} {tuple(whole_shape(p))}" for name, p in model.named_parameters() if p.requires_grad]
    return {"parameters": len(trained), "digest": hashlib.sha256("\n".join(trained).encode()).hexdigest()[:16]}


def unfit_states(then: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, str]:
    """The states of a checkpoint that this run cannot go on from, and why; by the names of their files."""
    found = {}
    if then["optimizer"] != now["optimizer"]:
        found[OPTIMIZER] = (
            f"it is of {_words(then['optimizer'])}, and this run's optimizer is {_words(now['optimizer'])}"
        )
    elif (stages := then.get("stages", 1)) != now["stages"]:
        found[OPTIMIZER] = (
            f"it is of the stages of pipeline_parallel_size={stages}, and this run has pipeline_parallel_size="
            f"{now['stages']}"
        )
    elif (parts := then.get("parts", {})) and parts != now["parts"] and MESH in {*parts, *now["parts"]}:
        # parts that are no rows, here or there
        found[OPTIMIZER] = (
            f"it is of layers that were split {_parts(parts)}, which cannot be cut anew for layers that are split "
            f"{_parts(now['parts'])}"
        )
    elif then["trained"] != now["trained"]:
        counts = then["trained"]["parameters"], now["trained"]["parameters"]
        whose = "others by name or shape" if counts[0] == counts[1] else f"{counts[1]}"
        found[OPTIMIZER] = f"it is of {counts[0]} trained parameters, and this run trains {whose}"
    if then["scheduler"] != now["scheduler"] and OF_METRICS & {then["scheduler"], now["scheduler"]}:
        found[SCHEDULER] = f"it is of {then['scheduler']}, and this run's schedule is {now['scheduler']}"
    return found


def _parts(parts: Mapping[str, int]) -> str:
    names = {MESH: "tp_size"}
    return "by " + " and ".join(f"{names.get(name, 'shards')}={size}" for name, size in parts.items() or [(MESH, 1)])


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """What else differs, and what comes of it."""
    for name, value in then["settings"].items():
        current = now["settings"].get(name, value)
        if current != value:
            yield f"{name}={current} has no effect: the states of the checkpoint go on with {value}"
    if then["scheduler"] != now["scheduler"] and not OF_METRICS & {then["scheduler"], now["scheduler"]}:
        yield f"the learning rate goes on at its step of schedule {now['scheduler']}, and was on {then['scheduler']}"
    if then["rows_a_step"] != now["rows_a_step"]:
        yield (
            f"a step has {now['rows_a_step']} rows and had {then['rows_a_step']}: the place in the data is counted in "
            "steps, so rows of this epoch are skipped or repeated"
        )
    if None not in (then["rows"], now["rows"]) and then["rows"] != now["rows"]:
        yield f"the dataset has {now['rows']:,} rows and had {then['rows']:,}: the order of rows is another"
    if then["ranks"] != now["ranks"]:
        yield f"{now['ranks']} rank(s) train and {then['ranks']} did: random numbers (dropout) are others"
    for name, earlier in then["versions"].items():
        if now["versions"].get(name) != earlier:
            yield f"{name} is {now['versions'].get(name)} and was {earlier}: the last bits may differ"


def _words(layout: Mapping[str, Any]) -> str:
    """An optimizer in words: class and settings."""
    settings = {name: value for group in layout.get("groups", ()) for name, value in group.items()}
    if "bits" in layout:
        settings["bits"] = layout["bits"]
    text = ", ".join(f"{name}={value}" for name, value in settings.items())
    return layout["class"] + (f" ({text})" if text else "")
