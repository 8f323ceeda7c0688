"""DeepSpeed's config, from where users give it, checked against the options and filled in from them.

It comes as `deepspeed`, a dict or the path of a JSON file, or by `accelerate launch`. Values that are `"auto"`, and
those of batch sizes and clipping that are left out, are the options'; values that contradict them are refused.
The optimizer is the options': a section for it has to say the same. A section `scheduler` says the schedule, as in
transformers. See docs/deepspeed.md.
"""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Mapping
from typing import Any

from lowtide.compat.deepspeed import check_installed, schedule_arguments_of
from lowtide.memory.optimizers.states import optimizer_name
from lowtide.parsing import parse_json
from lowtide.ranks.sharding import ZERO_FIELDS, loaded, sizes_by_model
from lowtide.ranks.world import is_on
from lowtide.run.optimizers import OPTIMIZERS
from lowtide.spelling import nearest

AUTO = "auto"
SWITCH = "ACCELERATE_USE_DEEPSPEED"
"""The variable by which `accelerate launch` turns DeepSpeed on; the others begin as `VARIABLES` does."""
VARIABLES = "ACCELERATE_DEEPSPEED_"
NOT_RUN = {
    "fp16": "float16 is not scaled by DeepSpeed here yet: take bf16=True",
    "amp": "mixed precision is the option bf16=True",
    "torch_autocast": "mixed precision is the option bf16=True",
    "autotuning": "`lowtide plan` chooses settings",
    "elasticity": "the number of ranks is the launcher's",
    "hybrid_engine": "completions are written by lowtide's own generators",
    "data_efficiency": "rows are ordered by lowtide",
    "curriculum_learning": "rows are ordered by lowtide",
    "compile": "layers are compiled by torch_compile=True",
}
"""The sections that are refused where they are enabled, and why."""
OPTIMIZERS_OF = {"adam": ("adamw_torch",), "adamw": ("adamw_torch",), "sgd": ("sgd",), "adagrad": ("adagrad",)}
"""DeepSpeed's names, and the beginnings of those of `optim` that are the same optimizer."""
logger = logging.getLogger(__name__)


def given_config(config: Any) -> tuple[str, dict[str, Any]] | None:
    """(where it was given, DeepSpeed's config); None where there is none.

    Raises:
        ValueError: it cannot be read, or lacks what says how states are cut.
    """
    if config.deepspeed:
        where, found = "deepspeed", _read(config.deepspeed)
    elif is_on(SWITCH):
        where, found = "accelerate's deepspeed config", _from_environment()
    else:
        return None
    if not isinstance(found.get("zero_optimization"), Mapping):
        raise ValueError(
            f"{where}: the config has no `zero_optimization`, which says what is cut between ranks: add "
            '"zero_optimization": {"stage": 2}, or 1 or 3'
        )
    return where, found


def _read(given: Any) -> dict[str, Any]:
    if isinstance(given, Mapping):
        return copy.deepcopy(dict(given))
    text = str(given).strip()
    try:
        found = parse_json(text) if text.startswith("{") else loaded(text)
    except ValueError as error:
        raise ValueError(f"deepspeed={given!r}: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"deepspeed={given!r} holds no object of sections: give a DeepSpeed config")
    return found


def _from_environment() -> dict[str, Any]:
    """What `accelerate launch` says of DeepSpeed, which has a file or a few values."""
    said = {k.removeprefix(VARIABLES).lower(): v for k, v in os.environ.items() if k.startswith(VARIABLES)}
    if (path := said.get("config_file", "none")) != "none":
        return _read(path)
    zero: dict[str, Any] = {"stage": int(said.get("zero_stage", 2))}
    for name in ("optimizer", "param"):
        device, path = said.get(f"offload_{name}_device", "none"), said.get(f"offload_{name}_nvme_path", "none")
        if device != "none":
            zero[f"offload_{name}"] = {"device": device} | ({"nvme_path": path} if path != "none" else {})
    if said.get("zero3_save_16bit_model", "").lower() in ("true", "false"):
        zero["stage3_gather_16bit_weights_on_model_save"] = said["zero3_save_16bit_model"].lower() == "true"
    clipping = os.environ.get("ACCELERATE_GRADIENT_CLIPPING", AUTO)
    return {
        "zero_optimization": zero,
        "bf16": {"enabled": AUTO},
        "gradient_clipping": AUTO if clipping in (AUTO, "none", "") else float(clipping),
    }


def asked_bf16(config: Any) -> bool | None:
    """Whether DeepSpeed's config computes in bfloat16; None where it leaves that to the options, or there is none."""
    found = given_config(config)
    value = AUTO if found is None else found[1].get("bf16", {}).get("enabled", AUTO)
    return None if value == AUTO else bool(value)


def checked_config(config: Any, ranks: int) -> dict[str, Any]:
    """The config for DeepSpeed's engine of options that ask for one, filled in from them.

    Raises:
        ValueError: options cannot work with DeepSpeed, or its config contradicts them.
    """
    found = given_config(config)
    assert found is not None, "only DeepSpeed's config asks for its stages"
    _check_options(config)
    _check_saving(found[1], config)
    return _filled(found[1], found[0], config, ranks)


def _check_options(config: Any) -> None:
    """Refuses options that cannot work with DeepSpeed.

    Raises:
        ValueError: names the option, why, and what to do.
    """
    check_installed()
    name = optimizer_name(config)
    if name in OPTIMIZERS:
        raise ValueError(
            f"optim={name!r} keeps each weight in its own form, and DeepSpeed steps flat parts of many weights: take "
            "optim='adamw_torch_fused'"
        )
    if config.optimizer_in_backward:
        raise ValueError(
            f"optimizer_in_backward={config.optimizer_in_backward!r} steps a parameter in backward, and DeepSpeed "
            "steps after it: leave it out; ZeRO-2 frees gradients in backward too"
        )
    if config.optimizer_states_on_host:
        raise ValueError(
            "optimizer_states_on_host=True is done by DeepSpeed here: leave it out, and set "
            '"offload_optimizer": {"device": "cpu"} in `zero_optimization`'
        )
    if config.fp16:
        raise ValueError(f"fp16=True does not go with deepspeed: {NOT_RUN['fp16']}")
    if config.sharding.cuts_weights:
        _check_stage_3(config)
    if config.requested.get("rehearsal"):
        raise ValueError(
            "rehearsal=True repeats a micro-batch until it fits, which one rank of DeepSpeed cannot do by itself: "
            "leave it out"
        )


def _check_saving(given: Mapping[str, Any], config: Any) -> None:
    offload = given["zero_optimization"].get("offload_optimizer") or {}
    saves = str(getattr(config.save_strategy, "value", config.save_strategy)) != "no"
    if offload.get("device") == "nvme" and saves and not config.save_only_model:
        raise ValueError(
            "states that DeepSpeed keeps on NVMe are not saved with a checkpoint: set save_only_model=True, or "
            'offload to {"device": "cpu"}'
        )


def _check_stage_3(config: Any) -> None:
    if config.mlp_tile_tokens is not None:
        raise ValueError(
            f"mlp_tile_tokens={config.mlp_tile_tokens} would gather an MLP's weights for each tile, and ranks have "
            "other numbers of tiles: take ZeRO-2 or FSDP2 (fsdp=True), or a smaller tokens_per_microbatch"
        )
    if config.attention_head_chunks is not None:
        raise ValueError(
            f"attention_head_chunks={config.attention_head_chunks} cuts weights that ZeRO-3 gathers whole: take ZeRO-2 "
            "or FSDP2 (fsdp=True)"
        )
    following = getattr(config, "following", None)
    if following is not None:
        raise ValueError(
            f"{following.option} moves whole weights, and ZeRO-3 cuts those of model and reference: take ZeRO-2"
        )


def _filled(given: Mapping[str, Any], where: str, config: Any, ranks: int) -> dict[str, Any]:
    """A config for DeepSpeed's engine, with the options' values; sizes that depend on the model are left as they are.

    Args:
        given: of `given_config`.
        where: what messages call it.
        config: the options.

    Raises:
        ValueError: a value contradicts an option, with both; or a section cannot be carried out, with the reason.
    """
    made = copy.deepcopy(dict(given))
    for name, why in NOT_RUN.items():
        if isinstance(section := made.get(name), Mapping) and section.get("enabled") not in (None, False, AUTO):
            raise ValueError(f"{where}: the section {name!r} is refused: {why}")
        made.pop(name, None)
    for name, only in (("gradient_allreduce_op", "average"), ("managed_gradient_accumulation", True)):
        if made.pop(name, only) != only:
            raise ValueError(f"{where}: {name}={given[name]!r} would change the gradients: leave it out")
    rows, steps = config.per_device_train_batch_size, config.gradient_accumulation_steps
    options = {
        "train_micro_batch_size_per_gpu": (rows, "per_device_train_batch_size"),
        "gradient_accumulation_steps": (steps, "gradient_accumulation_steps"),
        "train_batch_size": (rows * steps * ranks, "per_device_train_batch_size x gradient_accumulation_steps x ranks"),
        "gradient_clipping": (float(config.max_grad_norm or 0), "max_grad_norm"),
    }
    for key, (value, option) in options.items():
        _check(where, key, made.get(key), value, option)
    _check(where, "bf16.enabled", made.get("bf16", {}).get("enabled"), bool(config.bf16), "bf16")
    _check_optimizer(made.pop("optimizer", None), where, config)
    _check_scheduler(made.pop("scheduler", None), where, config)
    if "bf16" in made:
        made["bf16"] = {**made["bf16"], "enabled": bool(config.bf16)}
    return {
        **made,
        # the whole batch of a step is cut by lowtide, so nothing accumulates for DeepSpeed
        "train_micro_batch_size_per_gpu": rows,
        "gradient_accumulation_steps": 1,
        "train_batch_size": rows * ranks,
        "gradient_clipping": float(config.max_grad_norm or 0),
        "zero_allow_untested_optimizer": True,  # which ones step flat parts rightly is checked here
        "zero_force_ds_cpu_optimizer": False,
    }


def sized(config: Mapping[str, Any], hidden_size: int) -> dict[str, Any]:
    """A filled config with the sizes that depend on the model, where it has no number of its own: those that are
    `"auto"`, as transformers fills them in, and those that are left out."""
    zero = dict(config["zero_optimization"])
    for name, size in sizes_by_model(hidden_size).items():
        spellings = [key for key, field in ZERO_FIELDS.items() if field == name]
        if all(zero.get(key, AUTO) == AUTO for key in spellings):
            zero = {key: value for key, value in zero.items() if key not in spellings} | {spellings[0]: size}
    return {**config, "zero_optimization": zero}


def _check(where: str, key: str, value: Any, wanted: Any, option: str) -> None:
    same = list(value) == list(wanted) if isinstance(value, list | tuple) else value == wanted
    if value in (None, AUTO) or same:
        return
    raise ValueError(
        f'{where} says {key}={value}, and the options say {option}={wanted}: set it to "auto" in the config, or make '
        "the two equal"
    )


def _check_optimizer(section: Mapping[str, Any] | None, where: str, config: Any) -> None:
    if section is None:
        return
    kind, name = str(section.get("type")), optimizer_name(config)
    if not name.startswith(OPTIMIZERS_OF.get(kind.lower(), ())):
        raise ValueError(
            f"{where} has an optimizer of type {kind!r}, and the option is optim={name!r}: remove the section "
            "`optimizer`, or set `optim` to the same"
        )
    wanted = {
        "lr": (config.learning_rate, "learning_rate"),
        "betas": ([config.adam_beta1, config.adam_beta2], "(adam_beta1, adam_beta2)"),
        "eps": (config.adam_epsilon, "adam_epsilon"),
        "weight_decay": (config.weight_decay, "weight_decay"),
    }
    params = section.get("params") or {}
    if params.get("adam_w_mode") is False and config.weight_decay:
        raise ValueError(
            f"{where}: optimizer.params.adam_w_mode=false adds weight_decay={config.weight_decay} to the gradients, "
            f"and {name} does not: leave it out, or set weight_decay=0"
        )
    for key, (value, option) in wanted.items():
        _check(where, f"optimizer.params.{key}", params.get(key), value, option)
    ignored = {key for key in params if key not in {*wanted, "torch_adam", "adam_w_mode", "fused"}}
    if ignored:
        raise ValueError(
            f"{where}: optimizer.params.{min(ignored)} is no option of {name}: remove the section `optimizer`, which "
            "the options say already"
        )


def _check_scheduler(section: Any, where: str, config: Any) -> None:
    if section is None:
        return
    if not isinstance(section, Mapping) or not isinstance(section.get("params") or {}, Mapping):
        raise ValueError(
            f'{where}: scheduler={section!r} is no schedule: write {{"type": "WarmupLR", "params": {{...}}}}'
        )
    kind, params = str(section.get("type")), section.get("params") or {}
    known = schedule_arguments_of(kind)
    if known is None:
        raise ValueError(
            f"{where} has a scheduler of type {kind!r}, which DeepSpeed does not have: take WarmupLR, WarmupDecayLR, "
            "WarmupCosineLR, OneCycle or LRRangeTest, or remove the section `scheduler` and set `lr_scheduler_type`"
        )
    for name in params:
        if name not in known:
            raise ValueError(f"{where}: scheduler.params.{name} is no argument of {kind}{nearest(name, known)}")
    _check(where, "scheduler.params.warmup_max_lr", params.get("warmup_max_lr"), config.learning_rate, "learning_rate")


def given_schedule(config: Any, steps: int) -> tuple[str, dict[str, Any]] | None:
    """(type, arguments) of the schedule that DeepSpeed's config says, filled in as transformers does; None where it
    says none, and the options do. A section without `params`, with which DeepSpeed cannot start, leaves all to the
    options.

    Args:
        config: the options.
        steps: of the run.

    Raises:
        ValueError: it is of another number of steps than the options say.
    """
    found = given_config(config)
    if found is None or found[1].get("scheduler") is None:
        return None
    where, section = found[0], found[1]["scheduler"]
    _check_scheduler(section, where, config)
    for name in ("lr_scheduler_type", "lr_scheduler_kwargs"):
        if name in config.requested:
            value = getattr(config, name)
            said = getattr(value, "value", value)
            logger.warning(f"{name}={said!r} has no effect: {where} has a scheduler, {section['type']}")
    options = {
        "warmup_min_lr": (0, ""),
        "warmup_max_lr": (config.learning_rate, "learning_rate"),
        "total_num_steps": (steps, "the number of steps"),
        "warmup_num_steps": (max(1, config.get_warmup_steps(steps)), "warmup_steps"),
    }
    known = schedule_arguments_of(str(section["type"])) or []
    params = dict(section.get("params") or {name: AUTO for name in options if name in known})
    for name, (value, option) in options.items():
        if name in params and option:
            _check(where, f"scheduler.params.{name}", params[name], value, option)
        if params.get(name) == AUTO:
            params[name] = value
    left = [name for name, value in params.items() if value == AUTO]
    if left:
        raise ValueError(f'{where}: scheduler.params.{left[0]}="auto" has no option that says it: give a value')
    return str(section["type"]), params
