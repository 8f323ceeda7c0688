"""What quantized bases need so that adapters on them train with the right gradients.

A weight is quantized where it is not the tensor that its layer multiplies by: bitsandbytes stores bytes beside a state,
torchao a tensor subclass. The fused head, which multiplies by the weight itself, is kept from them. Their layers are
made to compute in training, evaluation and as a reference alike, and with every cut of a batch:

- bitsandbytes in 4 bits has its own layer, which a CPU would repack in the first evaluation: after that there is no
  gradient any more, and a warning alone says so;
- bitsandbytes in 8 bits would round activations too, to a scale on which the other tokens of the batch have a say
  (LLM.int8, arXiv 2208.07339), on a CPU in evaluation alone. Torchao's layers keep a dequantized weight each until
  backward. Both dequantize here, for one product at a time, in forward and once more in backward; so do layers in
  4 bits that are streamed to a GPU;
- weights in FP8 (`put_in_float8`) are lowtide's own: codes beside scales of rows, which are multiplied as they are
  where that can be (`ops.layers.float8`);
- bitsandbytes begins the blocks of 4-bit weights anew with each row on a CPU, where it reads them: rows whose width is
  no multiple of a block's would be multiplied by others' scales.

Stacks of experts' weights are multiplied elsewhere (`engine.layers.experts`).
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lowtide.compat.bitsandbytes import dense_of, multiplied_4_bit, quant_state, reads_apart
from lowtide.compat.torch import parts_of
from lowtide.ops.layers import float8
from lowtide.ops.layers.float8 import RowScaled
from lowtide.ops.target import autocast_dtype

INSTEAD = (
    "as the base of adapters take bitsandbytes (load_in_4bit, load_in_8bit), or torchao's Int8WeightOnlyConfig, "
    "Float8WeightOnlyConfig or IntxWeightOnlyConfig"
)


def is_quantized(weight: Tensor) -> bool:
    """Whether a weight is stored otherwise than as the numbers that it stands for."""
    return not weight.is_floating_point() or _is_torchao(weight)


def put_in_float8(layer: nn.Linear, device: torch.device) -> None:
    """Stores the weight of a linear layer in FP8, with a scale a row; computed on a device, stored where it was."""
    weight = layer.weight
    rows = float8.in_rows(weight.detach().to(device))
    float8.store(layer, RowScaled(*(each.to(weight.device) for each in rows)))


def put_in_nvfp4(layer: nn.Linear, device: torch.device) -> None:
    """The same in NVFP4: 4 bits a weight, with a scale of 8 bits for each 16. Torchao's, which calls it a prototype."""
    from torchao.prototype.mx_formats import NVFP4WeightOnlyConfig
    from torchao.quantization import quantize_

    home = layer.weight.device
    quantize_(layer.to(device), NVFP4WeightOnlyConfig())
    layer.to(home).weight.requires_grad_(False)


def dense_weight(layer: Any, dtype: torch.dtype) -> Tensor:
    """[outputs, inputs]: the numbers that the quantized weight of a layer stands for."""
    if (rows := float8.stored(layer)) is not None:
        return rows.dense(dtype)
    if _is_torchao(layer.weight):
        return layer.weight.dequantize().to(dtype)
    if (dense := dense_of(layer)) is not None:
        return dense(dtype)
    scale = layer.weight.SCB if layer.state.SCB is None else layer.state.SCB
    return layer.weight.data.to(dtype).mul_(scale[:, None] / 127)


def multiply_rows(x: Tensor, weight: RowScaled, bias: Tensor | None = None) -> Tensor:
    """What a layer gives whose frozen weight is in FP8, [..., outputs] of [..., inputs], in autocast's dtype if any."""
    out = cast(Tensor, _RowsProduct.apply(x.to(autocast_dtype(x.device) or x.dtype), weight))
    return out if bias is None else out + bias.to(out.dtype)


def product_dtype(layer: Any, computed_in: torch.dtype | None, passed_on: torch.dtype) -> torch.dtype:
    """In which a quantized layer takes its product.

    Args:
        computed_in: what autocast takes products in; None: there is none.
        passed_on: of what goes from layer to layer.
    """
    return computed_in or getattr(layer, "compute_dtype", None) or passed_on


def multiplied_weight(layer: Any, dtype: torch.dtype) -> Tensor:
    """[outputs, inputs]: the matrix by which a quantized layer multiplies, for a product in a dtype."""
    if _has_own_forward(layer) or quant_state(layer) is None:
        return dense_weight(layer, dtype)
    return multiplied_4_bit(layer, getattr(layer, "compute_dtype", None) or dtype).to(dtype)


def dense_twin(layer: Any, weight: Tensor) -> nn.Linear:
    """A layer that computes with a dense weight what a quantized one does with its own.

    Args:
        weight: [outputs, inputs], in the dtype of the product.
    """
    own, dtype = _has_own_forward(layer), weight.dtype
    made = nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")
    made.weight = nn.Parameter(weight, requires_grad=False)
    bias = None if layer.bias is None else nn.Parameter(layer.bias.detach().to(dtype), requires_grad=False)
    made.register_parameter("bias", bias)
    keeps_dtype = dense_of(layer) is not None or _is_8_bit(layer)
    if own or keeps_dtype:
        made.forward = types.MethodType(partial(_dense_forward, keeps_dtype=keeps_dtype, adds_bias=own), made)
    return made


def stored_tensors(model: nn.Module) -> dict[int, list[Tensor]]:
    """By the `id` of each quantized weight of a model, the tensors that its codes and scales lie in."""
    return {id(weight): _stored(layer, name) for layer, name, weight in _quantized(model)}


def move_stored(model: nn.Module, place: Callable[[Tensor], Tensor]) -> None:
    """Has the codes and scales of a model's quantized weights lie in other tensors of the same values."""
    for layer, name, weight in _quantized(model):
        for tensor in _stored(layer, name):
            tensor.data = place(tensor.data)
        if getattr(weight, "CB", None) is not None:  # the codes again, which bitsandbytes holds beside them
            weight.CB = weight.data


def compute_where_brought(model: nn.Module, device: torch.device) -> None:
    """Has quantized layers compute on a device to which their codes and scales are brought for each use.

    What does not grow with a weight is there from now on. Nothing keeps the codes of a use: neither autograd, for which
    bitsandbytes' own product in 4 bits does, nor a second name.

    Raises:
        ValueError: a weight is in torchao's form, whose parts are not brought one by one.
    """
    for layer, name, weight in _quantized(model):
        check_brought(weight)
        if (whole := quant_state(layer, name)) is not None:
            for state in (whole, whole.state2):
                for part in ("code", "offset"):
                    if isinstance(small := getattr(state, part, None), Tensor):
                        setattr(state, part, small.to(device))
            if isinstance(layer, nn.Linear):
                layer.forward = types.MethodType(_forward, layer)
        elif float8.stored(layer, name) is None:
            for holder in (weight, cast(Any, layer).state):
                holder.CB, holder.SCB = None, None if holder.SCB is None else holder.SCB.to(device)
    for module in model.modules():
        vars(module).pop("hf_device_map", None)  # by which accelerate would take it for a model of the host


def check_brought(what: Any) -> None:
    """Refuses a weight, or a quantization config, of a form that cannot be brought to a device in parts.

    Raises:
        ValueError: it is torchao's.
    """
    if _is_torchao(what) or hasattr(what, "get_apply_tensor_subclass"):
        raise ValueError(
            "base_weights='stream' brings bitsandbytes' weights to a GPU, and these are in torchao's form: take "
            "load_in_4bit or load_in_8bit, or leave base_weights out"
        )


def keep_trainable(model: nn.Module) -> None:
    """Has quantized layers pass on the gradients of the dequantized model.

    Raises:
        ValueError: a layer was repacked for inference already, or is of a kind that has no gradients.
    """
    for name, module in model.named_modules():
        layer: Any = module
        if hasattr(layer, "support_avx512bf16_for_cpu"):
            if getattr(getattr(layer.weight, "quant_state", None), "packing_format_for_cpu", False):
                raise ValueError(
                    f"the 4-bit weight of {name} was repacked for inference, as bitsandbytes does on a CPU when a "
                    "model is called in eval mode; no gradient passes through it. Load the model anew, and hand it "
                    "over uncalled"
                )
            layer.support_avx512bf16_for_cpu = False
            if quant_state(layer) is not None and reads_apart(layer):
                layer.forward = types.MethodType(_forward, layer)
        elif float8.stored(layer) is not None:
            layer.forward = types.MethodType(_forward, layer)
        elif isinstance(layer, nn.Linear) and (_is_8_bit(layer) or _is_torchao(layer.weight)):
            if _is_torchao(layer.weight) and not _is_weight_only(layer.weight):
                raise ValueError(
                    f"the weight of {name} is a {type(layer.weight).__name__} of torchao, whose products are made for "
                    f"inference, and no gradient passes through them: {INSTEAD}"
                )
            layer.forward = types.MethodType(_forward, layer)


def check_shardable(model: nn.Module) -> None:
    """Refuses quantized weights that cannot be cut into shards; the bytes of bitsandbytes in 4 bits and of FP8 can.

    Raises:
        ValueError: the weights are of bitsandbytes in 8 bits, or of torchao.
    """
    for name, module in model.named_modules():
        layer: Any = module
        if isinstance(layer, nn.Linear) and (_is_torchao(layer.weight) or _is_8_bit(layer)):
            kind = "torchao's form" if _is_torchao(layer.weight) else "8 bits of bitsandbytes"
            raise ValueError(
                f"fsdp cannot shard the weight of {name}, which is in {kind}: take load_in_4bit=True or "
                "base_dtype='float8', whose weights are sharded, or leave `fsdp` out, and each rank holds all of the "
                "quantized weights"
            )


def check_sendable(model: nn.Module) -> None:
    """Refuses quantized weights that DeepSpeed cannot send from the first rank to the others: it views each weight as
    bytes. Those of bitsandbytes and of FP8 can be.

    Raises:
        ValueError: weights are in torchao's form.
    """
    for name, weight in model.named_parameters():
        if _is_torchao(weight):
            raise ValueError(
                f"DeepSpeed sends the bytes of each weight to all ranks, and {name} is in torchao's form, which "
                "cannot be read so: take base_dtype='float8' or load_in_4bit=True, or leave `deepspeed` out"
            )


def check_torchao(config: Any, dtype: torch.dtype, device: torch.device) -> None:
    """Quantizes a small layer as a `TorchAoConfig` says, before a whole model is loaded so.

    Raises:
        ValueError: torchao cannot do it here, or no gradients would pass through; says why, and what to take instead.
    """
    from torchao.quantization import quantize_

    kind = config.get_apply_tensor_subclass()
    trial = nn.ModuleDict({"a trial layer": nn.Linear(1024, 1024, bias=False, dtype=dtype, device=device)})
    try:
        quantize_(trial, kind)
    except (AssertionError, ImportError, NotImplementedError, RuntimeError, ValueError) as error:
        raise ValueError(
            f"torchao cannot quantize {str(dtype).removeprefix('torch.')} weights on {device.type} as its "
            f"{type(kind).__name__} says ({error}): {INSTEAD}"
        ) from error
    keep_trainable(trial)


def _quantized(model: nn.Module) -> Iterator[tuple[nn.Module, str, Any]]:
    """Each quantized weight once, with the module that has it, and its name there."""
    owners = {
        id(p): (module, name, p) for module in model.modules() for name, p in module.named_parameters(recurse=False)
    }
    return ((module, name, weight) for module, name, weight in owners.values() if is_quantized(weight))


def _stored(layer: nn.Module, name: str) -> list[Tensor]:
    """The tensors of one quantized weight that grow with it."""
    weight = getattr(layer, name)
    if _is_torchao(weight):
        return [*parts_of(weight)]
    state = getattr(weight, "quant_state", None)
    scales = [each.absmax for each in (state, getattr(state, "state2", None)) if each is not None]
    return [weight, *scales, *(each for beside, each in layer.named_buffers(recurse=False) if beside.startswith(name))]


def _has_own_forward(layer: Any) -> bool:
    return getattr(layer.forward, "__func__", None) is _forward


def _is_torchao(weight: Any) -> bool:
    return type(weight).__module__.startswith("torchao.")


def _is_weight_only(weight: Any) -> bool:
    """Whether a weight of torchao is multiplied by activations as they are, and can be dequantized."""
    of_activations = ("act_quant_kwargs", "act_pre_scale", "activation_quantization")
    known = type(weight).dequantize is not Tensor.dequantize
    return known and all(getattr(weight, name, None) is None for name in of_activations)


def _is_8_bit(layer: Any) -> bool:
    return type(layer).__name__ == "Linear8bitLt" and layer.weight.dtype == torch.int8


def _forward(self: Any, x: Tensor) -> Tensor:
    of_bitsandbytes = quant_state(self) is not None or _is_8_bit(self)  # whose layers give the dtype that they take
    computed_in = None if of_bitsandbytes else autocast_dtype(x.device)
    computed_in = getattr(self, "compute_dtype", None) or computed_in or x.dtype
    out = cast(Tensor, _Product.apply(x.to(computed_in), self))
    out = out if self.bias is None else out + self.bias.to(out.dtype)
    return out.to(x.dtype) if of_bitsandbytes else out


def _dense_forward(self: nn.Linear, x: Tensor, *, keeps_dtype: bool, adds_bias: bool) -> Tensor:
    """What a layer with a dense weight computes in the place of a quantized one."""
    out = F.linear(x.to(self.weight.dtype), self.weight, None if adds_bias else self.bias)
    if adds_bias and self.bias is not None:
        out = out + self.bias
    return out.to(x.dtype) if keeps_dtype else out


class _Product(torch.autograd.Function):
    """Activations times a frozen quantized weight, which is all that is kept for backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Any) -> Tensor:
        ctx.layer = layer
        if (rows := float8.stored(layer)) is not None:
            return float8.linear(x, rows)
        return F.linear(x, dense_weight(layer, x.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if (rows := float8.stored(ctx.layer)) is not None:
            return float8.linear_backward(grads[0], rows), None
        return grads[0] @ dense_weight(ctx.layer, grads[0].dtype), None


class _RowsProduct(torch.autograd.Function):
    """The same with a weight in FP8 that is not its layer's own, as a rank's part is not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: RowScaled) -> Tensor:
        ctx.weight = weight
        return float8.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return float8.linear_backward(grads[0], ctx.weight), None
