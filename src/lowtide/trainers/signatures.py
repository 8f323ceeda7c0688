"""The arguments of each method's trainer: TRL's, by name and in its order."""

from __future__ import annotations

from inspect import Parameter, Signature
from typing import Any

from lowtide.methods.method import Method

DEFAULTS: dict[str, Any] = {"optimizers": (None, None)}
"""Defaults that are not None."""
DATA = ("args", "data_collator", "train_dataset", "eval_dataset", "processing_class")
OF_OPTIMIZER = ("optimizers", "optimizer_cls_and_kwargs")
OF_MODEL = ("quantization_config", "peft_config")
PLAIN = ("model", *DATA, "compute_metrics", "callbacks", *OF_OPTIMIZER, *OF_MODEL)
WITH_REFERENCE = (
    *("model", "ref_model", *DATA, "compute_metrics", "callbacks", "optimizers", *OF_MODEL),
    "optimizer_cls_and_kwargs",
)
WITH_FORMATTING = (
    *("model", *DATA, "compute_loss_func", "compute_metrics", "callbacks", *OF_OPTIMIZER),
    *("preprocess_logits_for_metrics", *OF_MODEL, "formatting_func"),
)

ONLINE = (
    *("model", "reward_funcs", "args", "train_dataset", "eval_dataset", "processing_class"),
    *("reward_processing_classes", "callbacks", "optimizers", *OF_MODEL, "tools", "rollout_func"),
    *("environment_factory", "optimizer_cls_and_kwargs"),
)


def signature_of(method: Method) -> Signature:
    """The signature of a method's trainer; what an older TRL took beside it comes as `older`."""
    names = method.arguments or (
        ONLINE
        if method.writes
        else WITH_REFERENCE
        if method.compares
        else WITH_FORMATTING
        if method.rows.formats
        else PLAIN
    )
    required = {"model"}
    parameters = [
        Parameter(
            name,
            Parameter.POSITIONAL_OR_KEYWORD,
            default=Parameter.empty if name in required else DEFAULTS.get(name),
        )
        for name in names
    ]
    return Signature([*parameters, Parameter("older", Parameter.VAR_KEYWORD)])
