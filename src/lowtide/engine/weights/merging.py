"""Writes the model that a base and its adapters are together, or that ranks saved in parts, one file at a time.

PEFT's `merge_and_unload` changes the base in place, and of a quantized one makes a quantized one again, with a second
rounding. Here the model stays as it is. Each adapted weight is merged by itself, by PEFT's own `merge`, in a float32
copy of that weight; dequantized weights are made one by one as well. What is held beside the model is one shard, and
one layer where a model type's checkpoints name its weights otherwise than the model does.

Equal to `merge_and_unload().save_pretrained()` to the last bit for dense bases: there too a sum is rounded once.
"""

from __future__ import annotations

import contextlib
import copy
import json
import logging
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers import AutoConfig, GenerationConfig, PreTrainedModel

from lowtide.compat.peft import caches_kept
from lowtide.compat.torch import saved_buffers, with_parameters
from lowtide.compat.transformers import names_not_saved
from lowtide.engine.forward import causal_model, embedding_weight
from lowtide.engine.heads import HEADS
from lowtide.engine.virtual_tokens import kind_of_prompt, prompt_config
from lowtide.engine.weights.quantized import dense_weight, is_quantized
from lowtide.engine.weights.sharded.shard_files import OF_A_MODEL, WeightFiles, missing_shards, shards_in
from lowtide.ops.layers.stacks import stored_stacks
from lowtide.own_files import share_file
from lowtide.ranks.shards import held_whole

logger = logging.getLogger(__name__)

MAX_SHARD_BYTES = 2 << 30
INDEX = "model.safetensors.index.json"


class Weights(NamedTuple):
    """The weights of one module under the names that they have without adapters."""

    names: dict[str, object]
    """What stands behind each: the tensor itself, so that tied names show; or something of its own."""
    make: Callable[[], dict[str, Tensor]]
    """Merges and dequantizes; what needs neither is the model's own tensor."""
    modules: list[nn.Module]
    """Whose own parameters it reads, which are to be whole for it."""


@torch.no_grad()
def save_merged(
    model: nn.Module, folder: Path, *, dtype: torch.dtype | None = None, max_shard_bytes: int = MAX_SHARD_BYTES
) -> None:
    """Writes the merged model: safetensors shards with their index, config and generation config.

    Args:
        model: a PEFT model, whose active adapters are merged, or any transformers model; unchanged afterwards.
        folder: made if it is not there; shards and an index of an earlier model in it are removed.
        dtype: of all weights in floating point; by default each in its own, dequantized ones in the embedding's.
        max_shard_bytes: of a file, unless one weight alone is larger.

    Raises:
        OSError: something cannot be written.
        ValueError: an adapter cannot be merged, or has no weights but virtual tokens; nothing is written.
    """
    merged = MergedModel(model, dtype)
    folder.mkdir(parents=True, exist_ok=True)
    merged.save_configs(folder)
    write_shards(merged.weights(), folder, max_shard_bytes)


class MergedModel:
    """The model that a base and its adapters are together, as its files describe it, weight by weight."""

    def __init__(self, model: nn.Module, dtype: torch.dtype | None = None) -> None:
        """Args and errors as of `save_merged`."""
        tokens = prompt_config(model)
        if tokens is not None:
            raise ValueError(
                f"virtual tokens ({kind_of_prompt(tokens)}) stand before the rows and change no weight, so there is "
                "nothing to merge: use the folder of adapters as it is"
            )
        self._base = causal_model(model)
        self._dense = embedding_weight(model).dtype if dtype is None else dtype
        self._parts = list(effective_weights(self._base, "", dtype, self._dense))
        tied, self._same = _tied(self._base, self._parts)
        self._untied = tied != self._same

    def save_configs(self, folder: Path) -> None:
        """Writes the config and the generation config."""
        _save_configs(self._base, folder, self._dense, untied=self._untied)

    @torch.no_grad()
    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The weights, merged one by one, under the names that they have in files; those that are tied come once."""
        yield from _checkpoint_weights(self._base, self._parts, self._same | names_not_saved(self._base))


@torch.no_grad()
def save_joined(
    checkpoint: Path,
    folder: Path,
    *,
    dtype: torch.dtype | None = None,
    trust_remote_code: bool = False,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Writes one model of what ranks saved in a file each, as `save_merged` writes it.

    Args:
        checkpoint: the folder of those files, and of the model's config.
        dtype: of all weights in floating point; by default each in its own.

    Raises:
        OSError: something cannot be written.
        ValueError: files or weights are missing.
    """
    if missing := missing_shards(checkpoint):
        raise ValueError(f"{checkpoint} lacks {', '.join(missing)}: copy the whole folder again")
    model = _described(checkpoint, trust_remote_code)
    with WeightFiles(shards_in(checkpoint)) as files:
        own: dict[str, Tensor] = model.state_dict(keep_vars=True)
        tied = getattr(model, "all_tied_weights_keys", None) or {}
        held = {id(value) for name, value in own.items() if name in files.shapes}
        lacking = [name for name, v in own.items() if id(v) not in held and tied.get(name, name) not in files.shapes]
        wrong = [name for name, shape in files.shapes.items() if name not in own or tuple(own[name].shape) != shape]
        if lacking or wrong:
            raise ValueError(
                f"{checkpoint} does not hold the weights that its config.json describes, {(lacking + wrong)[0]} among "
                "them: copy the whole folder again"
            )

        def part(name: str) -> Weights:
            return Weights({name: name}, lambda: {name: _in_dtype(files.rows(name), dtype)}, [])

        stored = files.rows(next(iter(files.shapes)), 0, 1).dtype
        folder.mkdir(parents=True, exist_ok=True)
        _save_configs(model, folder, dtype or stored, untied=False)
        parts = [part(name) for name in own if name in files.shapes]
        write_shards(_checkpoint_weights(model, parts, names_not_saved(model)), folder, max_shard_bytes)


def _described(folder: Path, trust_remote_code: bool) -> PreTrainedModel:
    """The model that a folder's config describes, without weights."""
    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    [name] = config.architectures or [""]
    for head in HEADS:
        with torch.device("meta"), contextlib.suppress(ValueError):  # no model of this type has such a head
            model = head.loader(config).from_config(config, trust_remote_code=trust_remote_code)
            if type(model).__name__ == name:
                if head.trains_beside is not None:
                    head.attach(model)
                if (folder / "generation_config.json").is_file():
                    model.generation_config = GenerationConfig.from_pretrained(folder)
                return model
    raise ValueError(f"{folder / 'config.json'} names an unknown architecture: {name or 'none'}")


def _in_dtype(value: Tensor, dtype: torch.dtype | None) -> Tensor:
    return value.to(dtype) if dtype is not None and value.is_floating_point() else value


def checkpoint_weights(
    model: nn.Module, wanted: Callable[[str], bool] = lambda module: True, *, adapted: bool = True
) -> Iterator[tuple[str, Tensor]]:
    """The weights of the merged model one by one, under the names that checkpoints of the model type have.

    What needs neither merging nor another name is the model's own tensor. Tied weights come once. Of a model that is
    sharded each rank holds a layer whole at a time, and all ranks take all of the weights together.

    Args:
        wanted: of a module's name, whether its weights are. Where a model type's checkpoints name weights otherwise,
            all modules of a layer are to be wanted together.
        adapted: with LoRA adapters in them; otherwise the weights that these were put on.

    Raises:
        ValueError: an adapter cannot be merged, or only one of two tied weights has adapters: then they are no longer
            the same, and the config that says so would have to change.
    """
    base = causal_model(model)
    with torch.no_grad():
        parts = list(effective_weights(base, "", None, embedding_weight(model).dtype, adapted=adapted))
        tied, same = _tied(base, parts)
        if tied != same:
            name = sorted(tied - same)[0]
            raise ValueError(
                f"{name} is tied to another weight, and adapters make the two differ: a copy of the model that ties "
                "them cannot take them. Leave it out of the adapters' target modules, or set "
                "ensure_weight_tying=True in the LoraConfig"
            )
        chosen = [part for part in parts if wanted(next(iter(part.names)).rpartition(".")[0])]
        yield from _checkpoint_weights(base, chosen, same | names_not_saved(base))


def _tied(base: PreTrainedModel, parts: list[Weights]) -> tuple[set[str], set[str]]:
    """The names that the model ties to others, and those of them whose weights are indeed the same."""
    known = {name: what for part in parts for name, what in part.names.items()}
    sources: dict[str, str] = getattr(base, "all_tied_weights_keys", None) or {}
    tied = {name for name, source in sources.items() if name != source and name in known}
    return tied, {name for name in tied if known[name] is known.get(sources[name])}


def _save_configs(model: PreTrainedModel, folder: Path, dtype: torch.dtype, *, untied: bool) -> None:
    config = copy.deepcopy(model.config)
    vars(config).pop("quantization_config", None)
    config.dtype = str(dtype).removeprefix("torch.")
    config.architectures = [type(model).__name__]
    if untied:
        config.tie_word_embeddings = False
    config.save_pretrained(folder)
    if model.can_generate():
        cast(Any, model.generation_config).save_pretrained(folder)


# -- the weights of the model, module by module ------------------------------------------------------------------


def effective_weights(
    module: nn.Module, prefix: str, dtype: torch.dtype | None, dense: torch.dtype, *, adapted: bool = True
) -> Iterator[Weights]:
    """All weights of a module and those below it, with its adapters in them, module by module.

    Args:
        prefix: of their names.
        dtype: of all in floating point; by default each in its own.
        dense: the dtype of dequantized ones otherwise.
        adapted: False leaves the adapters of layers out.

    Raises:
        ValueError: an adapter has a bias, and what it would be merged into has none.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import ModulesToSaveWrapper, TrainableTokensWrapper

    wrapper: Any = module
    tuners: list[Any] = []
    if isinstance(module, ModulesToSaveWrapper):
        active = wrapper.active_adapters  # none where another adapter alone has a copy
        module = wrapper.modules_to_save[active[0]] if active else wrapper.original_module
    elif isinstance(module, TrainableTokensWrapper):
        module = wrapper.token_adapter
    while isinstance(module, BaseTunerLayer):
        tuners += [module] if adapted else []
        module = cast(nn.Module, module.base_layer)
    _check_biases(tuners, module, prefix)
    if own := _own(module):
        merges = any(set(tuner.active_adapters) & _adapters(tuner) for tuner in tuners)
        names = {prefix + name: object() if merges else tensor for name, tensor in own.items()}

        def make() -> dict[str, Tensor]:
            twin = _merged(tuners, module) if merges else _own(_dense(module))
            return {prefix + name: _cast(twin[name], own[name], dtype, dense) for name in own}

        adapters = [each for tuner in tuners for each in tuner.modules() if each is not module]
        yield Weights(names, make, [module, *adapters])
    for name, child in module.named_children():
        yield from effective_weights(child, f"{prefix}{name}.", dtype, dense, adapted=adapted)


def _check_biases(tuners: list[Any], module: nn.Module, prefix: str) -> None:
    biased = [name for tuner in tuners for name, own in getattr(tuner, "lora_bias", {}).items() if own]
    if biased and getattr(module, "bias", None) is None:
        raise ValueError(
            f"adapter {biased[0]!r} has a bias (lora_bias=True) at {prefix.rstrip('.')}, which has none to merge it "
            "into: keep the adapter beside the model, or train it without lora_bias"
        )


def _own(module: nn.Module) -> dict[str, Tensor]:
    """A module's parameters and the buffers that are saved, without those below it."""
    return {**dict(module.named_parameters(recurse=False)), **saved_buffers(module)}


def _adapters(tuner: Any) -> set[str]:
    """The names of the adapters that a layer has."""
    return {name for kind in tuner.adapter_layer_names for name in getattr(tuner, kind.split(".")[0], {})}


def _cast(value: Tensor, stored: Tensor, dtype: torch.dtype | None, dense: torch.dtype) -> Tensor:
    if not value.is_floating_point():
        return value
    wanted = dtype or (dense if is_quantized(stored) else stored.dtype)
    return value.detach().to(wanted)


def _dense(module: nn.Module) -> nn.Module:
    """The module itself, or where it is quantized a dense one with its values."""
    if stacks := stored_stacks(module):
        made = {name: stack.dense(torch.float32) for name, stack in stacks.items()}
        return with_parameters(module, {name: nn.Parameter(each, requires_grad=False) for name, each in made.items()})
    weight = getattr(module, "weight", None)
    if not (isinstance(module, nn.Linear) and isinstance(weight, Tensor) and is_quantized(weight)):
        return module
    twin = nn.Linear(module.in_features, module.out_features, bias=False, device="meta")
    twin.weight = nn.Parameter(dense_weight(module, torch.float32), requires_grad=False)
    twin.register_parameter("bias", module.bias)
    return twin


def _merged(tuners: list[Any], module: nn.Module) -> dict[str, Tensor]:
    """The weights of a module with its adapters in them, of which there may be several, one around the other."""
    from peft.tuners.lora import Linear

    dense = _dense(module)
    twin = _in_float32(dense)
    with contextlib.ExitStack() as stack:
        innermost = tuners[-1]
        innermost.base_layer = twin
        stack.callback(setattr, innermost, "base_layer", module)
        for tuner in tuners:
            stack.callback(setattr, tuner, "merged_adapters", list(tuner.merged_adapters))
            stack.enter_context(caches_kept(tuner))
            # The merge of a quantized linear layer's own tuner would quantize the sum again.
            requantizes = dense is not module and isinstance(dense, nn.Linear)
            merge = Linear.merge if requantizes else type(tuner).merge
            merge(tuner)
    return _own(twin)


def _in_float32(module: nn.Module) -> nn.Module:
    """A copy of a module, its own weights in float32 at least."""
    wide = {}
    for name, p in module.named_parameters(recurse=False):
        dtype = torch.promote_types(p.dtype, torch.float32)
        wide[name] = nn.Parameter(p.detach().to(dtype, copy=True), requires_grad=False)
    return with_parameters(module, wide)


# -- as files ----------------------------------------------------------------------------------------------------


def _checkpoint_weights(
    model: PreTrainedModel, parts: list[Weights], left_out: set[str]
) -> Iterator[tuple[str, Tensor]]:
    """Names and weights as the checkpoints of the model type have them, which may split or join those of a layer."""
    from transformers.core_model_loading import revert_weight_conversion

    for _, group in groupby(parts, key=lambda part: _layer_of(next(iter(part.names)))):
        layer = list(group)
        with held_whole(module for part in layer for module in part.modules):
            own = {name: tensor for part in layer for name, tensor in part.make().items() if name not in left_out}
        own = revert_weight_conversion(model, own)
        for name in list(own):
            yield name, own.pop(name)


def _layer_of(name: str) -> str:
    """The name up to the number of the layer; all of a name that is outside of numbered layers."""
    words = name.split(".")
    number = next((n for n, word in enumerate(words) if word.isdigit()), len(words))
    return ".".join(words[: number + 1])


def _telling_of_no_numbers(weights: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The same weights; warns in the end of those that hold NaN or infinity, as float16 makes of large ones."""
    wrong = []
    for name, tensor in weights:
        has_infinity = tensor.is_floating_point() and tensor.element_size() > 1
        if has_infinity and not tensor.isfinite().all():
            wrong.append(name)
        yield name, tensor
    if wrong:
        logger.warning(
            f"{len(wrong):,} of the weights that are written hold NaN or infinity ({wrong[0]} first): the adapters or "
            "the model do, or they are beyond the range of the dtype"
        )


def write_shards(weights: Iterator[tuple[str, Tensor]], folder: Path, max_bytes: int = MAX_SHARD_BYTES) -> None:
    """Writes weights to safetensors files of at most so many bytes, in the place of those of a model there."""
    from safetensors.torch import save_file

    for old in folder.iterdir():
        if OF_A_MODEL.fullmatch(old.name):
            old.unlink()
    shard: dict[str, Tensor] = {}
    shards: list[list[str]] = []
    total = held = 0

    def write() -> None:
        shards.append(list(shard))
        save_file(shard, folder / f"model-{len(shards):05}.safetensors", metadata={"format": "pt"})
        share_file(folder / f"model-{len(shards):05}.safetensors")
        shard.clear()

    for name, tensor in _telling_of_no_numbers(weights):
        size = tensor.numel() * tensor.element_size()
        if shard and held + size > max_bytes:
            write()
            held = 0
        shard[name] = tensor.detach().cpu().contiguous()
        held, total = held + size, total + size
    write()
    if len(shards) == 1:
        (folder / "model-00001.safetensors").replace(folder / "model.safetensors")
        return
    files: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        (folder / f"model-{number:05}.safetensors").replace(folder / file)
        files.update(dict.fromkeys(names, file))
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(files.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
