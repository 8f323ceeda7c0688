"""Whether the weights of a checkpoint are those of the model that resumes: names and shapes, before any is loaded.

transformers loads what has a matching name and only warns of the rest, so that the checkpoint of another model, or one
with adapters beside a model without, would leave weights at the values that a run starts with.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel

from lowtide.compat.transformers import names_not_saved
from lowtide.engine.weights.sharded.shard_files import WeightFiles, shards_in
from lowtide.parsing import parse_json
from lowtide.process.ways_out import in_python
from lowtide.ranks.shards import whole_shape
from lowtide.trainers.checkpoints.beside import beside_adapters, folder_of_other
from lowtide.trainers.checkpoints.soundness import load_states

Shapes = Mapping[str, tuple[int, ...]]
ADAPTER = ("adapter_model.safetensors", "adapter_model.bin")
MODEL = ("model.safetensors", "pytorch_model.bin")
SETTINGS = ("peft_type", "r", "lora_alpha", "use_rslora", "use_dora")
"""Of an adapter's configuration, what decides how its weights act."""


def check_weights(model: Any, folder: Path) -> None:
    """Refuses a checkpoint whose weights are not those of a model.

    Raises:
        ValueError: says which file, and which weights are missing or of another shape.
    """
    adapters, found, shards = hasattr(model, "peft_config"), _file(folder, MODEL), shards_in(folder)
    if adapters and found is None and not shards:
        for name in model.peft_config:
            _check_adapter(model, name, folder if name == "default" else folder / name)
        if (other := beside_adapters(model)) is not None:
            check_weights(other, folder_of_other(model, folder))
        return
    if adapters or (found is None and not shards):
        here, there = ("adapters", "a whole model") if adapters else ("a whole model", "adapters")
        raise ValueError(
            f"{folder} holds {there}, and this run trains {here}: resume with use_peft"
            f"{in_python(' or `peft_config`')} as the run began"
        )
    aliases = {name: names for names in _aliases(model) for name in names}
    if found is not None:
        _compare(found, shapes_in(found), aliases, saved_form(model))
        return
    with WeightFiles(shards) as files:
        _compare(folder, files.shapes, aliases, _own_form(model))


def saved_form(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Names and shapes as a checkpoint of the model has them, which may split or join those of the model."""
    from transformers.core_model_loading import revert_weight_conversion

    unsaved, dtypes = names_not_saved(model), {name: v.dtype for name, v in model.state_dict(keep_vars=True).items()}
    own = {
        name: torch.empty(shape, dtype=dtypes[name], device="meta")  # known without being gathered
        for name, shape in _own_form(model).items()
        if name not in unsaved
    }
    saved = revert_weight_conversion(model, own) if isinstance(model, PreTrainedModel) else own
    return {name: tuple(value.shape) for name, value in saved.items()}


def _own_form(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Names and shapes as the model has them, in whatever parts they lie."""
    return {name: tuple(whole_shape(value)) for name, value in model.state_dict(keep_vars=True).items()}


def is_converted(model: nn.Module) -> bool:
    """Whether checkpoints of a model name its weights otherwise than the model does (mixtures of experts)."""
    return not saved_form(model).keys() <= model.state_dict().keys()


def shapes_in(path: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the weights in a file, or in those that an index names."""
    if path.suffix == ".json":
        files = sorted(set(parse_json(path.read_text())["weight_map"].values()))
        return {name: shape for file in files for name, shape in shapes_in(path.with_name(file)).items()}
    if path.suffix == ".bin":
        return {name: tuple(value.shape) for name, value in load_states(path).items()}
    with safe_open(path, framework="pt") as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118


def _check_adapter(model: Any, name: str, folder: Path) -> None:
    from peft import get_peft_model_state_dict

    found = _file(folder, ADAPTER)
    if found is None:
        raise ValueError(f"{folder} holds no weights of the adapter {name!r} that this run trains")
    then, now = parse_json((folder / "adapter_config.json").read_text()), model.peft_config[name].to_dict()
    for setting in SETTINGS:
        was, value = then.get(setting), getattr(now.get(setting), "value", now.get(setting))
        if setting in then and was != value:
            raise ValueError(
                f"{folder / 'adapter_config.json'}: {setting} is {was!r}, and this run's adapter has {value!r}: resume "
                "with the adapter that the run began with"
            )
    state: Any = model.state_dict(keep_vars=True)
    own = get_peft_model_state_dict(model, state, adapter_name=name, save_embedding_layers=False)
    _compare(found, shapes_in(found), {}, {key: tuple(whole_shape(value)) for key, value in own.items()})


def _compare(path: Path, there: Shapes, aliases: Mapping[str, set[str]], wanted: Shapes) -> None:
    missing = [name for name in wanted if name not in there and not aliases.get(name, set()) & there.keys()]
    other = [name for name, shape in wanted.items() if name in there and there[name] != shape]
    if not missing and not other:
        return
    parts = []
    if missing:
        parts.append(f"{len(missing)} of the model's {len(wanted)} weights are missing ({missing[0]}, ...)")
    if other:
        name = other[0]
        parts.append(f"{len(other)} have another shape ({name}: {there[name]}, the model's is {wanted[name]})")
    raise ValueError(
        f"{path} is of another model: {' and '.join(parts)}. Resume with the model that the run began with, or name "
        "another checkpoint"
    )


def _aliases(model: nn.Module) -> list[set[str]]:
    """Names that share one weight, of which a file has one."""
    by_weight: dict[int, set[str]] = {}
    values: Mapping[str, Tensor] = model.state_dict(keep_vars=True)
    for name, value in values.items():
        by_weight.setdefault(id(value), set()).add(name)
    return [names for names in by_weight.values() if len(names) > 1]


def _file(folder: Path, names: tuple[str, ...]) -> Path | None:
    """The first of some files that a folder has, or the index of its shards."""
    candidates = (folder / each for name in names for each in (name, f"{name}.index.json"))
    return next((path for path in candidates if path.exists()), None)
