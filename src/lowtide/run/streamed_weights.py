"""Streams the weights of a run's models: what is refused, and where the weights wait.

Trained ones are asked for by `trained_weights="stream"`, frozen ones by `base_weights="stream"`: the base under
adapters, a reference, a teacher, a reward model. They are streamed from the moment that they are loaded, so
that the probe and the making of adapters take no more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from lowtide.compat.torch import FakeTensor, leave_in_place, parts_of
from lowtide.compat.transformers_loading import joined_as_loaded
from lowtide.engine.forward import causal_model
from lowtide.engine.weights.quantized import (
    check_brought,
    compute_where_brought,
    is_quantized,
    move_stored,
    stored_tensors,
)
from lowtide.engine.weights.streamed_files import check_streamable
from lowtide.memory.allocators.measure import bytes_text
from lowtide.memory.weights.mapped_files import MappedFiles
from lowtide.memory.weights.pinned_layers import PinnedLayers
from lowtide.memory.weights.streaming import STREAM, Store, Unresident, WeightStream, stream_of, units_of
from lowtide.memory.weights.trained_layers import TrainedLayers
from lowtide.memory.weights.written_file import file_beside
from lowtide.ops.mapped import can_let_go, declare, declare_in_files, keep, lying_in_files
from lowtide.ops.target import kind_of
from lowtide.run.optimizers import streams_trained

FEW = 0.02
"""Of the bytes of frozen weights, what may be resident all the same: such as buffers that are weights by name."""
OUT = "or leave base_weights out"


def wants_stream(args: Any) -> bool:
    """Whether frozen weights are to be streamed."""
    return getattr(args, "base_weights", "resident") == "stream"


def check_before_loading(model: Any, args: Any, init: Mapping[str, Any], *, frozen: bool, what: str = "model") -> None:
    """Refuses what cannot be streamed, before anything is loaded.

    Args:
        model: a name, or a model that is loaded already.
        init: the arguments of loading.
        frozen: whether any of its weights will be.

    Raises:
        ValueError: says why, and what to do.
    """
    if not wants_stream(args):
        return
    if args.device.type not in ("cpu", "cuda") or (args.device.type == "cpu" and not can_let_go()):
        raise ValueError(
            f"base_weights='stream' needs Linux with a CPU or a CUDA device: here, leave it out ({args.device})"
        )
    if (quantization := init.get("quantization_config")) is not None:
        if args.device.type == "cuda":
            check_brought(quantization)
    elif isinstance(model, str) and frozen:
        check_streamable(model, init, what=what)


def loaded_on_host(init: Mapping[str, Any], args: Any) -> dict[str, Any]:
    """The arguments of loading, with which a quantized model that is streamed to a GPU is made on the host: by itself
    transformers makes all of it on the GPU."""
    if wants_stream(args) and args.device.type == "cuda" and init.get("quantization_config") is not None:
        return {**init, "device_map": {"": "cpu"}}
    return {**init}


def stream_frozen(model: nn.Module, args: Any, *, what: str = "model") -> None:
    """Streams the weights of a model that are not trained, if this is asked for; once it has its adapters.

    Raises:
        ValueError: they lie in no file, or are cast as they are used; says what to do.
    """
    if not wants_stream(args) or stream_of(model) is not None:
        return
    frozen = {id(p): p for p in model.parameters() if not p.requires_grad}
    weights = [*frozen.values()]
    if not weights:
        return
    if isinstance(weights[0], FakeTensor):
        if kind_of(args.device) == "cpu" and not any(map(is_quantized, weights)):
            weights = _in_files(model, weights, args, what)
        store: Store = Unresident(on_device=kind_of(args.device) == "cuda")
    elif args.device.type == "cpu":
        if any(map(is_quantized, weights)):
            _move_to_file(model, weights, args, what)
        else:
            weights = _in_files(model, weights, args, what)
        store = MappedFiles()
    else:
        layers = units_of(model, weights, layers_only=True, lying={})
        _check_not_cast([weight for unit in layers for weight in unit.weights], args, what)
        compute_where_brought(model, args.device)
        store = PinnedLayers(args.device)
    stream = WeightStream(model, weights, store, stored_tensors(model))
    vars(causal_model(model))[STREAM] = stream
    if isinstance(store, MappedFiles):
        for weight in stream.weights:
            declare(weight)
        for parameter in model.parameters():
            if parameter.requires_grad:
                keep(parameter)
    if isinstance(store, PinnedLayers):
        _place_the_rest(model, stream, args.device)
    stream.let_all_go()


def stream_trained(model: nn.Module, args: Any) -> None:
    """Streams the weights of a model that is trained whole, if this is asked for: on a CPU all of them lie in a
    temporary file, beside a GPU those of layers lie in pinned host memory.

    Raises:
        ValueError: some are frozen, or there is no room for a file, or it is another device; says what to do.
    """
    if not streams_trained(args):
        return
    if args.device.type not in ("cpu", "cuda") or (args.device.type == "cpu" and not can_let_go()):
        raise ValueError(
            f"trained_weights='stream' needs Linux with a CPU or a CUDA device: here, leave it out ({args.device})"
        )
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
    if frozen:
        raise ValueError(
            f"trained_weights='stream' is for a run that trains all weights, and {len(frozen)} are frozen "
            f"({frozen[0]}, ...): take base_weights='stream', which streams these"
        )
    parameters = [*model.parameters()]
    on_device = kind_of(args.device) == "cuda"
    if isinstance(parameters[0], FakeTensor):
        store: Store = Unresident(on_device=on_device, written=True)
    elif on_device:
        store = TrainedLayers(args.device)
    else:
        declare_in_files(parameters)
        file_beside(args.output_dir).take(parameters)
        store = MappedFiles()
    attach_trained(model, store, args.device)


def attach_trained(model: nn.Module, store: Store, device: torch.device) -> WeightStream:
    """Has a store hold the weights of a model that is trained whole; what it does not hold goes to the device."""
    stream = WeightStream(model, [*model.parameters()], store)
    vars(causal_model(model))[STREAM] = stream
    if isinstance(store, TrainedLayers):
        _place_the_rest(model, stream, device)
        model.register_state_dict_pre_hook(lambda *_: stream.settle())
        model.register_load_state_dict_pre_hook(lambda *_: stream.settle())
    stream.let_all_go()
    return stream


def declare_base(model: nn.Module, args: Any) -> None:
    """Has what reads a model's weights before it has its adapters let their pages go."""
    if wants_stream(args) and args.device.type == "cpu":
        declare_in_files(part for parameter in model.parameters() for part in parts_of(parameter))


def text_of(stream: WeightStream | None) -> str:
    """What the start-up report says of a stream."""
    if stream is None:
        return "nothing is frozen"
    waits = "in files" if isinstance(stream.store, MappedFiles) else "in pinned host memory"
    return f"{bytes_text(stream.bytes)} wait {waits}, of which a layer takes {bytes_text(stream.largest)}"


def _check_not_cast(weights: Sequence[torch.Tensor], args: Any, what: str) -> None:
    half = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None
    plain = [weight for weight in weights if not is_quantized(weight) and weight.dim() > 1]
    cast = next((weight for weight in plain if half is not None and weight.dtype != half), None)
    if cast is not None:
        asked = "bf16" if args.bf16 else "fp16"
        wanted = str(half).removeprefix("torch.")
        raise ValueError(
            f"{asked}=True computes in {wanted}, and each weight of {what}, stored in "
            f"{str(cast.dtype).removeprefix('torch.')}, would be a resident copy once it is cast: set {asked}=False, "
            f"save the model in {wanted} and load it with dtype={wanted!r}, {OUT}"
        )


def _in_files(model: nn.Module, weights: list[nn.Parameter], args: Any, what: str) -> list[nn.Parameter]:
    """Those that lie in files, and so can be streamed from there: few may stay resident.

    Raises:
        ValueError: more do not, or they are cast as they are used.
    """
    _check_not_cast(weights, args, what)
    names = {id(p): name for name, p in model.named_parameters()}
    joins = joined_as_loaded(causal_model(model))
    if isinstance(weights[0], FakeTensor):  # of which as many lie there as transformers leaves as they are
        in_files = {weight for weight in weights if not joins(names[id(weight)])}
    else:
        in_files = lying_in_files(weights)
    lost = [weight for weight in weights if weight not in in_files]
    if sum(weight.nbytes for weight in lost) > FEW * sum(weight.nbytes for weight in weights):
        first = names[id(lost[0])]
        maps = f"base_weights='stream' maps weights from the files that they came from, and {first} of {what} (one of "
        if joins(first):
            raise ValueError(
                f"{maps}{len(lost)}) is none of their tensors: experts are joined as they are loaded. Quantize what is "
                f"streamed (load_in_4bit=True), {OUT}"
            )
        raise ValueError(
            f"{maps}{len(lost)}) does not lie in a file as it is used. It was made or cast in memory: the model was "
            "not loaded from safetensors, or in another dtype than it is stored in (set dtype), or its adapters "
            f"changed it (init_lora_weights). Give the model by name, in the dtype of its files, {OUT}"
        )
    return [weight for weight in weights if weight in in_files]


def _move_to_file(model: nn.Module, weights: list[nn.Parameter], args: Any, what: str) -> None:
    """Weights of a quantized model, which are made as it is loaded, go to a temporary file, and so do the others, since
    the model's own files, as long as one weight lies in them, keep all that was read of them resident.

    Raises:
        ValueError: no file can be written.
    """
    _check_not_cast(weights, args, what)
    file = file_beside(args.output_dir)
    move_stored(model, file.copy_of)
    file.take([weight for weight in weights if not is_quantized(weight)])


def _place_the_rest(model: nn.Module, stream: WeightStream, device: torch.device) -> None:
    """Moves to a device what is not streamed, and has what is stay where it is."""
    streamed = {id(weight) for weight in stream.weights}
    for tensor in (*model.parameters(), *model.buffers()):
        if id(tensor) not in streamed:
            tensor.data = tensor.data.to(device)
    for unit in stream.units:
        leave_in_place(unit.module)
