"""A model as a folder of weights that torchao quantizes, as vLLM and transformers read them.

The folder is what transformers saves of a model that was loaded with a `TorchAoConfig`: safetensors with the parts of
each quantized weight, and a config that says how they belong together (`quantization_config`, which vLLM reads too).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, TorchAoConfig

from lowtide.engine.weights.loading import load_tokenizer, saved_config


def write_quantized(source: Path, folder: Path, kind: str) -> None:
    """Writes the folder, with the tokenizer.

    Args:
        source: of a whole model with its tokenizer.
        folder: where to, which is there.
        kind: of `CONFIGS`.

    Raises:
        ValueError: the model is no language model, is quantized already, or torchao cannot quantize it.
    """
    config = saved_config(str(source), {})
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError(f"{source} is quantized already: `lowtide merge` of its adapter writes it dequantized")
    stored = getattr(config, "dtype", None)
    dtype = stored if stored in (torch.bfloat16, torch.float16) else torch.bfloat16  # torchao's kernels take these
    quantized = TorchAoConfig(_config(kind))
    try:  # `load_model` takes weights that adapters are trained on, which is less
        model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, quantization_config=quantized)
    except (OSError, RuntimeError, NotImplementedError) as error:
        raise ValueError(f"{source} cannot be quantized by torchao's {kind}: {error}") from error
    model.save_pretrained(folder)
    load_tokenizer(str(source)).save_pretrained(folder)


def _config(kind: str) -> Any:
    """torchao's config of a kind: `int8` stores a weight in 8 bits and multiplies in 16; `int8_dynamic` also takes what
    it is multiplied with in 8 bits, a scale for each token."""
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, Int8WeightOnlyConfig

    kinds = {"int8": Int8WeightOnlyConfig, "int8_dynamic": Int8DynamicActivationInt8WeightConfig}
    return kinds[kind](version=2)  # whose tensors are saved as safetensors
