"""Adapters that travel without the base: which can, as what, and where vLLM reads them.

They are written in PEFT's format, which is what vLLM loads, with one rank and one scale for all layers: `B` holds the
scale of its layer, and a smaller rank is filled up with zeros. So `rank_pattern`, `alpha_pattern` and rsLoRA need
nothing of vLLM's. vLLM 0.32 adapts dense layers of decoder blocks alone, and knows no DoRA.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn

from lowtide.engine.forward import causal_model
from lowtide.parsing import parse_json
from lowtide.ranks.shards import is_sharded
from lowtide.rollout.generators.vllm.facts import AdapterRoom
from lowtide.rollout.generators.vllm.label import Label
from lowtide.rollout.generators.vllm.weights import MAX_BODY_BYTES, is_adapter

PREFIX = "base_model.model."
"""Of the names of weights in PEFT's files."""
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def why_merged(model: nn.Module, room: AdapterRoom) -> str | None:
    """Why adapters travel merged into the base's weights; None where they travel alone.

    Args:
        room: of the vLLM that they go to.
    """
    layers, trained = _layers(model), [name for name, p in model.named_parameters() if p.requires_grad]
    if not layers:
        return "there are no LoRA adapters"
    if not room.rank or not room.count:
        return "the server takes no adapters (start it with --max_lora_rank)"
    if is_sharded(model):
        return "their weights are cut over ranks"
    for name, layer in layers.items():
        if (why := _why_not(name, layer)) is not None:
            return f"{name} {why}"
    if others := [name for name in trained if not is_adapter(name)]:
        return f"{others[0]} is trained beside them"
    tensors = [each for pair in _factors(model).values() for each in pair]
    if (rank := max(each.shape[0] for each in tensors[::2])) > room.rank:
        return f"their rank is {rank}, and the server takes {room.rank} (start it with --max_lora_rank {rank})"
    if (size := sum(each.numel() * each.element_size() for each in tensors)) > MAX_BODY_BYTES:
        return f"they have {size:,} bytes, and {MAX_BODY_BYTES:,} travel at a time"
    return None


def _layers(model: nn.Module) -> dict[str, Any]:
    """The layers with adapters of any kind, by their names in the model."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import ModulesToSaveWrapper, TrainableTokensWrapper

    kinds = (BaseTunerLayer, ModulesToSaveWrapper, TrainableTokensWrapper)
    return {name: module for name, module in causal_model(model).named_modules() if isinstance(module, kinds)}


def _why_not(name: str, layer: Any) -> str | None:
    """What of a layer's adapter vLLM does not take."""
    from peft.tuners.lora import LoraLayer

    if not isinstance(layer, LoraLayer) or not isinstance(layer.get_base_layer(), nn.Linear):
        return "has adapters that are no LoRA of a dense layer"
    if not any(word.isdigit() for word in name.split(".")):
        return "stands outside of the layers"
    if layer.lora_variant:
        return f"has a variant of LoRA ({type(next(iter(layer.lora_variant.values()))).__name__})"
    if any(layer.lora_bias.values()):
        return "has an adapter with a bias (lora_bias=True)"
    if len(layer.active_adapters) != 1 or layer.active_adapters[0] not in layer.lora_A:
        return f"has {len(layer.active_adapters)} active adapters"
    return None


def _factors(model: nn.Module) -> dict[str, tuple[Tensor, Tensor]]:
    """By the names of layers `A`, [rank, in], and `B` with its scale, [out, rank]."""
    found = {}
    for name, layer in _layers(model).items():
        [adapter] = layer.active_adapters
        a, b = layer.lora_A[adapter].weight.detach(), layer.lora_B[adapter].weight.detach()
        found[name] = a, b.to(torch.promote_types(b.dtype, torch.float32)) * layer.scaling[adapter]
    return found


def adapter_file(model: nn.Module, label: Label) -> bytes:
    """A model's adapters as safetensors, with their config and a label."""
    factors = _factors(model)
    rank = max(a.shape[0] for a, _ in factors.values())
    tensors = {}
    for name, (a, b) in factors.items():
        missing = rank - a.shape[0]
        tensors[f"{PREFIX}{name}.lora_A.weight"] = nn.functional.pad(a, (0, 0, 0, missing)).cpu().contiguous()
        tensors[f"{PREFIX}{name}.lora_B.weight"] = nn.functional.pad(b, (0, missing)).cpu().contiguous()
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted({name.rpartition(".")[2] for name in factors}),
    }
    return save(tensors, {"config": json.dumps(config), "label": json.dumps(asdict(label))})


def told_of(data: bytes) -> tuple[dict[str, Any], Any]:
    """(the config of an adapter, its label), of the file that `adapter_file` made.

    Raises:
        ValueError: it is none.
    """
    try:
        metadata = parse_json(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
        config, label = parse_json(metadata["config"]), parse_json(metadata["label"])
        if not isinstance(config, dict):
            raise TypeError("its config is no object")
        return config, label
    except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
        raise ValueError(f"these {len(data):,} bytes are no adapter: {error!r}") from error


class AdapterFolders:
    """Adapters where vLLM reads them, which it may do again at any time until they are dropped."""

    def __init__(self) -> None:
        self._folders: dict[str, Path] = {}

    def put(self, name: str, data: bytes) -> str:
        """Writes an adapter; returns its folder."""
        config, _ = told_of(data)
        self._folders[name] = folder = Path(tempfile.mkdtemp(prefix="lowtide-adapter-"))
        (folder / CONFIG).write_text(json.dumps(config), encoding="utf-8")
        (folder / WEIGHTS).write_bytes(data)
        return str(folder)

    def drop(self, name: str) -> None:
        """Deletes one, which vLLM has unloaded."""
        if (folder := self._folders.pop(name, None)) is not None:
            shutil.rmtree(folder, ignore_errors=True)

    def drop_all(self) -> list[str]:
        """Deletes all; returns their names."""
        names = [*self._folders]
        for name in names:
            self.drop(name)
        return names
