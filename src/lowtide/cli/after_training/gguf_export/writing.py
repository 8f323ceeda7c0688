"""A model as one GGUF file for llama.cpp, written tensor by tensor: it takes the memory of one tensor, and of the model
where adapters are merged into it.

Names of keys and tensors are those of PyPI's `gguf`, which llama.cpp publishes; which keys a family has, and how its
weights are laid out, follows llama.cpp's own converter (`conversion/`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self, TypeAlias

import numpy as np
from safetensors import safe_open
from torch import Tensor

from lowtide.cli.after_training.gguf_export.families import FAMILIES, Family, head_dim, rope
from lowtide.cli.after_training.gguf_export.vocabulary import write_vocabulary
from lowtide.engine.weights.merging import MergedModel
from lowtide.engine.weights.weight_files import broken_files_named

TYPES = {"f32": "F32", "bf16": "BF16", "f16": "F16", "q8_0": "Q8_0"}
"""Kinds of files, and gguf's name of the type of their matrices; vectors are in float32."""
BLOCK = 32
"""Numbers that share a scale in q8_0; a matrix whose rows are no multiple of it stays in float16."""


def check_family(config: Mapping[str, Any], folder: Path) -> Family:
    """The record of a model's family.

    Raises:
        ValueError: there is none, or llama.cpp would pass over something of the config.
    """
    kind = config.get("model_type")
    instead = "use llama.cpp's convert_hf_to_gguf.py"
    if kind not in FAMILIES:
        raise ValueError(f"{folder} is a {kind}, and what is written is {', '.join(FAMILIES)}: {instead}")
    family = FAMILIES[kind]
    reason = family.why_not(config) if family.why_not is not None else None
    if reason is None and rope(config)["rope_type"] not in ("default", "llama3"):
        reason = f"has rotary positions of type {rope(config)['rope_type']!r}"
    if reason is not None:
        raise ValueError(f"{folder} {reason}, which this export does not write: {instead}")
    return family


def write_gguf(folder: Path, path: Path, kind: str, tokenizer: Any, weights: Weights, pre: str | None = None) -> None:
    """Writes a file.

    Args:
        folder: of the model's config and tokenizer, after which the model is called.
        weights: `FileWeights` of a whole model, or `MergedWeights` of one with adapters.
        kind: of `TYPES`.
        pre: llama.cpp's name of the pre-tokenizer; None to tell it from the tokenizer.

    Raises:
        ValueError: the family, the tokenizer or a weight is not written here.
    """
    from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, GGMLQuantizationType, GGUFWriter, get_tensor_name_map, quants

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    family = check_family(config, folder)
    arch = MODEL_ARCH[family.arch]
    writer = GGUFWriter(path, MODEL_ARCH_NAMES[arch])
    writer.add_name(folder.resolve().name)
    _write_config(writer, config, family)
    with weights:
        shapes = weights.shapes()
        size = next(shape[0] for name, shape in shapes.items() if name.endswith("embed_tokens.weight"))
        writer.add_vocab_size(size)
        write_vocabulary(writer, folder, size, tokenizer, pre)
        names, planned = get_tensor_name_map(arch, config["num_hidden_layers"]), {}
        for name, shape in shapes.items():
            if name == "lm_head.weight" and config.get("tie_word_embeddings"):
                continue
            new = names.get_name(name, try_suffixes=(".weight", ".bias"))
            if new is None:
                raise ValueError(f"{folder}: llama.cpp has no place for the weight {name!r} in a {family.arch} model")
            wanted = _type_of(shape, kind)
            type_of = GGMLQuantizationType[wanted]
            stored = quants.quant_shape_to_byte_shape(shape, type_of) if wanted in ("Q8_0", "BF16") else shape
            dtype = np.dtype({"F32": np.float32, "F16": np.float16}.get(wanted, np.uint8))
            writer.add_tensor_info(new, stored, dtype, math.prod(stored) * dtype.itemsize, raw_dtype=type_of)
            planned[name] = type_of
        factors = _long_factors(config)
        if factors is not None:
            whole = GGMLQuantizationType.F32
            writer.add_tensor_info("rope_freqs.weight", factors.shape, factors.dtype, factors.nbytes, raw_dtype=whole)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        change = _layout(config, family)
        for name, tensor in weights.read():
            if name in planned:
                values = change(name, tensor.float()).contiguous().numpy()
                writer.write_tensor_data(quants.quantize(values, planned[name]))
        if factors is not None:
            writer.write_tensor_data(factors)
    writer.close()


def _type_of(shape: tuple[int, ...], kind: str) -> str:
    """gguf's name of the type that a weight is stored in."""
    if len(shape) < 2:
        return "F32"
    *_, columns = shape
    return "F16" if kind == "q8_0" and columns % BLOCK else TYPES[kind]


def _write_config(writer: Any, config: Mapping[str, Any], family: Family) -> None:
    heads, width = config["num_attention_heads"], head_dim(config)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.get("num_key_value_heads") or heads)
    writer.add_key_length(width)
    writer.add_value_length(width)
    share = rope(config).get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    writer.add_rope_dimension_count(int(width * share))
    writer.add_rope_freq_base(float(rope(config)["rope_theta"]))
    if "rms_norm_eps" in config:
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    for name in ("layer_norm_eps", "norm_epsilon", "layer_norm_epsilon"):
        if name in config:
            writer.add_layer_norm_eps(config[name])
    if family.keys is not None:
        family.keys(writer, config)


def _layout(config: Mapping[str, Any], family: Family) -> Callable[[str, Tensor], Tensor]:
    """From a weight as transformers has it to llama.cpp's."""
    heads = config["num_attention_heads"]
    counts = {".q_proj.": heads, ".k_proj.": config.get("num_key_value_heads") or heads}

    def change(name: str, values: Tensor) -> Tensor:
        count = next((count for part, count in counts.items() if part in name), None)
        if family.permutes and count is not None:
            halves = values.unflatten(0, (count, 2, -1))
            values = halves.transpose(1, 2).reshape(values.shape)
        if family.adds_one and name.endswith("norm.weight"):
            values = values + 1
        return values

    return change


def _long_factors(config: Mapping[str, Any]) -> np.ndarray | None:
    """[head_dim / 2]: what each frequency is divided by, of Llama 3.1's long contexts; None elsewhere."""
    given = rope(config)
    if given["rope_type"] != "llama3":
        return None
    dim, old = head_dim(config), given["original_max_position_embeddings"]
    frequencies = given["rope_theta"] ** -(np.arange(0, dim, 2) / dim)
    turns = old * frequencies / (2 * math.pi)
    low, high = given["low_freq_factor"], given["high_freq_factor"]
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    return (1 / ((1 - smooth) / given["factor"] + smooth)).astype(np.float32)


class FileWeights:
    """The weights in a folder's safetensors, in the files' order."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.paths = folder, sorted(folder.glob("model*.safetensors"))
        if not self.paths:
            raise ValueError(f"{folder} holds no model*.safetensors: save the model whole, as `lowtide merge` does")
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        opened = (safe_open(str(path), "pt") for path in self.paths)  # type: ignore[no-untyped-call]
        with broken_files_named(str(self.folder)):
            files = [self._stack.enter_context(each) for each in opened]
        self._files = {name: file for file in files for name in file.keys()}  # noqa: SIM118
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of all weights, without reading them."""
        return {name: tuple(file.get_slice(name).get_shape()) for name, file in self._files.items()}

    def read(self) -> Iterator[tuple[str, Tensor]]:
        """The weights one by one, in the order of their shapes."""
        for name, file in self._files.items():
            yield name, file.get_tensor(name)


class MergedWeights:
    """The weights of a model with its adapters merged, one at a time. A file says all shapes before the first weight,
    so each is merged twice: nothing is kept of it."""

    def __init__(self, model: MergedModel) -> None:
        self.model = model

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None: ...

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of all weights."""
        return {name: tuple(tensor.shape) for name, tensor in self.model.weights()}

    def read(self) -> Iterator[tuple[str, Tensor]]:
        """The weights one by one, in the order of their shapes."""
        return self.model.weights()


Weights: TypeAlias = FileWeights | MergedWeights
