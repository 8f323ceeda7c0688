"""Which of a model's adapters a forward goes through: the policy's, none, or the one that a head has of its own.

A head with an adapter of its own shares the frozen base with the policy, and no weight that is trained.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

from torch import nn

from lowtide.compat.peft import adapter_active, same_weights_trained
from lowtide.engine.forward import causal_model
from lowtide.engine.heads.head import Head
from lowtide.process.ways_out import in_python

PLAIN_STARTS = (True, False, "gaussian", "orthogonal")
"""What `init_lora_weights` may be for adapters that begin beside the base; others change the base, or look at data."""


def leaves_base(peft_config: Any) -> bool:
    """Whether making the adapters of a configuration leaves the model's own weights as they are."""
    return getattr(peft_config, "init_lora_weights", True) in PLAIN_STARTS


def adapter_of(model: nn.Module, head: type[Head] | None) -> AbstractContextManager:
    """Has the adapter active that a head is read through: its own where the model has one, else the policy's.

    The backward belongs inside too, since gradient checkpointing runs the forward again there.
    """
    known = getattr(causal_model(model), "peft_config", None) or {}
    if head is None or head.adapter not in known:
        return nullcontext()
    return adapter_active(model, cast(str, head.adapter))


@contextlib.contextmanager
def adapters_off(model: Any) -> Iterator[None]:
    """The base model of a PEFT model, wrapped by others or not."""
    while not hasattr(model, "disable_adapter"):
        model = model.module
    with same_weights_trained(model), model.disable_adapter():
        yield


def check_second_adapter(peft_config: Any) -> None:
    """Refuses a configuration of which no second adapter can be put on the same base.

    Raises:
        ValueError: says what was passed, and what to do.
    """
    if peft_config is None or getattr(peft_config, "peft_type", None) != "LORA":
        found = "there is none" if peft_config is None else f"it is a {type(peft_config).__name__}"
        raise ValueError(
            "value_adapter=True gives the value function a LoRA adapter beside the policy's, on one frozen base: set "
            f"use_peft=True{in_python(f', or pass a LoraConfig as `peft_config` ({found})')}, or "
            "leave value_adapter out"
        )
    if not leaves_base(peft_config):
        raise ValueError(
            "value_adapter=True puts two adapters on one base, and "
            f"init_lora_weights={peft_config.init_lora_weights!r} is made for one: leave one of the two options out"
        )


def add_adapter_of(model: Any, head: type[Head]) -> None:
    """Puts an adapter of a head's own beside the policy's, of the same configuration, and the head's new module on it.

    It adapts and saves nothing of the language model's head, which it does not run.

    Args:
        model: PEFT's, with the policy's LoRA adapter, for which `check_second_adapter` passed.
    """
    assert head.adapter is not None
    assert head.added_module is not None
    inner = causal_model(model)
    output = next(name for name, module in inner.named_modules() if module is inner.get_output_embeddings())
    head.attach(inner)
    inner.get_submodule(head.added_module).requires_grad_(False)  # as the base; the adapter trains a copy
    config = copy.deepcopy(model.peft_config[model.active_adapter])
    config.modules_to_save = [*(name for name in config.modules_to_save or () if name != output), head.added_module]
    config.ensure_weight_tying = False
    if isinstance(config.target_modules, set):
        config.target_modules -= {output}
    model.add_adapter(head.adapter, config)
    model.set_requires_grad(head.adapter)
