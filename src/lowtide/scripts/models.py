"""From `ModelConfig` to what trainers take: adapters, quantization, device map; and a frozen copy of a model."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import torch
from torch import nn

from lowtide.scripts.arguments import ModelConfig

if TYPE_CHECKING:
    from peft import LoraConfig
    from transformers import BitsAndBytesConfig


def get_peft_config(model_args: ModelConfig) -> LoraConfig | None:
    """The LoRA configuration that is asked for; None without `use_peft`."""
    if not model_args.use_peft:
        return None
    from peft import LoraConfig

    return LoraConfig(
        task_type=model_args.lora_task_type,
        r=model_args.lora_r,
        lora_alpha=model_args.lora_alpha,
        lora_dropout=model_args.lora_dropout,
        target_modules=model_args.lora_target_modules,
        target_parameters=model_args.lora_target_parameters,
        modules_to_save=model_args.lora_modules_to_save,
        use_rslora=model_args.use_rslora,
        use_dora=model_args.use_dora,
        bias="none",
    )


def get_quantization_config(model_args: ModelConfig) -> BitsAndBytesConfig | None:
    """The bitsandbytes configuration that is asked for; None where weights are stored as they are."""
    if not (model_args.load_in_4bit or model_args.load_in_8bit):
        return None
    from transformers import BitsAndBytesConfig

    if model_args.load_in_8bit:
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_compute_dtype=model_args.dtype,
        bnb_4bit_quant_type=model_args.bnb_4bit_quant_type,
        bnb_4bit_use_double_quant=model_args.use_bnb_nested_quant,
        bnb_4bit_quant_storage=model_args.bnb_4bit_quant_storage,
    )


def get_kbit_device_map() -> dict[str, int] | None:
    """Where a quantized model goes: this process's GPU, whole. None without a GPU. TRL had this until 0.24."""
    if not torch.cuda.is_available():
        return None
    from accelerate import PartialState

    return {"": PartialState().local_process_index}


def create_reference_model(
    model: nn.Module, num_shared_layers: int | None = None, pattern: str | None = None
) -> nn.Module:
    """A frozen copy of a model, in evaluation mode, for `ref_model`.

    A trainer makes one by itself where it needs one. With `num_shared_layers`, the parameters before that layer are
    frozen in the model too, and the copy holds the same storage.

    Args:
        pattern: text in the name of the first parameter that is not shared, such as `layers.{layer}`; by default the
            layer's place in the list of layers that the model has.

    Raises:
        ValueError: no parameter is of that layer.
    """
    frozen = copy.deepcopy(model).requires_grad_(False).eval()
    if num_shared_layers is None:
        return frozen
    names = [name for name, _ in model.named_parameters()]
    wanted = (pattern or _layers_of(model) + ".{layer}.").format(layer=num_shared_layers)
    first = next((place for place, name in enumerate(names) if wanted in name), None)
    if first is None:
        raise ValueError(
            f"num_shared_layers={num_shared_layers}: no parameter has {wanted!r} in its name: give `pattern`"
        )
    for name in names[:first]:
        shared = model.get_parameter(name).requires_grad_(False)
        frozen.get_parameter(name).data = shared.data
    return frozen


def _layers_of(model: nn.Module) -> str:
    """The name of the longest list of modules in a model: its layers."""
    lists = {name: len(module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    if not lists:
        raise ValueError(
            f"{type(model).__name__} has no list of layers: give `pattern`, or leave num_shared_layers out"
        )
    return max(lists, key=lambda name: lists[name])
