"""Leaves on each rank its share of the matrices of a model's layers, by the plan that transformers has for the model.

A plan (`model.tp_plan`) names how each module is split: by the outputs of its matrix ("colwise") or by its inputs
("rowwise"), so that a rank has whole attention heads and a part of the MLP. See `ranks.tensor` for what ranks exchange.
Parts are `DTensor`s, as other shards are; a module computes with the part that lies here. LoRA adapters are split as
the module that they are on: by outputs the second matrix is, by inputs the first, and the other one is whole on every
rank. Of a matrix in FP8 a rank has the codes, and where it is split by outputs the scales of these. Head and embedding
are split by the vocabulary (`engine.weights.sharded.split_vocabulary`).
"""

from __future__ import annotations

import re
import types
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from lowtide.compat.torch import parameters_replaced, strided_shard
from lowtide.engine.forward import TENSOR_PARALLEL, causal_model
from lowtide.engine.layers.dropout import drop
from lowtide.engine.layers.experts import run_experts
from lowtide.engine.weights.quantized import is_quantized, multiply_rows
from lowtide.engine.weights.sharded.split_vocabulary import split_vocabulary
from lowtide.ops.layers import float8
from lowtide.ops.layers.float8 import RowScaled
from lowtide.ranks.shards import as_part
from lowtide.ranks.tensor import TensorParallel

HEADS = ("q_proj", "k_proj", "v_proj")
"""Matrices whose outputs are attention heads, of which a rank has whole ones."""
SHARDS = "shard its weights in place of it (`fsdp=True`)"
"""What to do with a model that cannot be split."""


@dataclass(frozen=True)
class Style:
    """How a module is split."""

    dimension: int
    """Of a weight [..., out, in]."""
    enter: Callable[[TensorParallel, Tensor], Tensor]
    """What becomes of its input."""
    leave: Callable[[TensorParallel, Tensor], Tensor]
    """What becomes of its output."""
    parts: int = 1
    """Matrices that lie one after the other along that dimension, of each of which a rank has its share."""


def _as_is(ranks: TensorParallel, x: Tensor) -> Tensor:
    return x


_PACKED = Style(-2, TensorParallel.shared, _as_is, parts=2)
STYLES: dict[str, Style] = {
    "colwise": Style(-2, TensorParallel.shared, _as_is),
    "colwise_gather_output": Style(-2, TensorParallel.shared, TensorParallel.gathered),
    "colwise_rep": Style(-2, TensorParallel.shared, TensorParallel.gathered),
    "packed_colwise": _PACKED,
    "rowwise": Style(-1, _as_is, TensorParallel.summed),
    "rowwise_split_input": Style(-1, TensorParallel.own, TensorParallel.summed),
    "rowwise_rep": Style(-1, TensorParallel.own, TensorParallel.summed),
}
"""Those of transformers that split a matrix, by its name for them."""
WHOLE = "replicated_with_grad_allreduce"
"""The style of a module that is whole on each rank, and sees that rank's heads alone."""
EXPERTS = "moe_tp_experts"
"""The style of a module with the experts of a layer, whose parameters have styles of their own."""


def style_of(name: str, plan: Mapping[str, str]) -> str:
    """How a plan treats a parameter: by its own name, or by its module's; empty where it does not."""
    generic = _generic(name)
    return plan.get(generic) or plan.get(generic.rpartition(".")[0], "")


def split_layers(model: nn.Module, ranks: TensorParallel, mesh: DeviceMesh, device: torch.device) -> None:
    """Splits a model that is whole on each rank; all ranks call it together.

    Args:
        model: prepared by `engine.forward.install`, wrapped by PEFT or not.
        ranks: that it is split between.
        mesh: of these ranks, in one line.
        device: where the parts are to lie.

    Raises:
        ValueError: the model cannot be split so; names the module, with the numbers.
    """
    inner: Any = causal_model(model)
    plan: Mapping[str, str] = getattr(inner, "tp_plan", None) or {}
    if not plan:
        raise _refused(inner, "transformers has no plan for it (`model.tp_plan` is empty)")
    vocabulary = {*inner.get_input_embeddings().modules()}
    if (head := inner.get_output_embeddings()) is not None:
        vocabulary |= {*head.modules()}
    planned = [(path, module, plan.get(_generic(path), "")) for path, module in inner.named_modules()]
    planned = [(path, module, style) for path, module, style in planned if style and module not in vocabulary]
    for path, module, style in planned:
        _check(inner, path, module, style, ranks.size)
    split_vocabulary(inner, mesh, device)
    for path, module, style in planned:
        _split(path, module, style, plan, ranks, mesh)
    for parameter in model.parameters():
        if not isinstance(parameter, DTensor):
            parameter.data = parameter.data.to(device)
    for buffer in model.buffers():
        buffer.data = buffer.data.to(device)
    vars(inner)[TENSOR_PARALLEL] = ranks


# -- what is refused -----------------------------------------------------------------------------------------------


def _check(model: Any, path: str, module: Any, style: str, ranks: int) -> None:
    """Refuses a module that cannot be split by its style."""
    if style in (WHOLE, EXPERTS):
        if hasattr(module, "base_layer"):
            raise _refused(model, f"{path} has an adapter, which is not split: leave it out of what is adapted")
        names = [name for name, _ in _own(module)] if style == EXPERTS else []
        unknown = [name for name in names if name not in ("gate_up_proj", "down_proj")]
        if unknown:
            raise _refused(model, f"{path} has experts of another kind ({unknown[0]})")
        return
    if style not in STYLES:
        raise _refused(model, f"its plan splits {path} as {style!r}, which is not built")
    base = module.base_layer if hasattr(module, "base_layer") else module
    if base is not module:
        _check_adapters(model, path, module)
    stored = isinstance(base, nn.Linear) and float8.stored(base) is not None
    if not isinstance(base, nn.Linear) or (is_quantized(base.weight) and not stored):
        kind = f"{type(base).__name__} with weights of type {type(getattr(base, 'weight', None)).__name__}"
        remedy = "take base_dtype='float8', or leave `tp_size` out" if isinstance(base, nn.Linear) else SHARDS
        raise _refused(model, f"{path} is a {kind}, and nothing but plain matrices and those in FP8 is split", remedy)
    if style == "packed_colwise" and base is not module:
        raise _refused(model, f"{path} packs two matrices and has an adapter, which is not split")
    width = base.weight.shape[STYLES[style].dimension] // STYLES[style].parts
    owner = model.get_submodule(path.rpartition(".")[0])
    dim = getattr(owner, "head_dim", None)
    if style == "colwise" and path.rpartition(".")[2] in HEADS and dim:
        if (heads := width // dim) % ranks:
            raise _refused(model, f"{path} has {heads} heads, which {ranks} ranks cannot share equally", divisor=heads)
    elif width % ranks:
        raise _refused(model, f"{path} has a width of {width}, which {ranks} ranks cannot share equally", divisor=width)
    elif stored and (left := width // ranks) % float8.MULTIPLE:
        raise _refused(model, f"{path} is in FP8, and of its width {width} each of {ranks} ranks would have {left}, "
                       f"which is no multiple of {float8.MULTIPLE}")  # fmt: skip


def _check_adapters(model: Any, path: str, module: Any) -> None:
    """Refuses adapters other than plain LoRA."""
    names = [*getattr(module, "lora_A", ())]
    variants = [type(each).__name__ for each in getattr(module, "lora_variant", {}).values()]
    linear = all(isinstance(module.lora_A[n], nn.Linear) and isinstance(module.lora_B[n], nn.Linear) for n in names)
    if not names or variants or not linear:
        kind = variants[0] if variants else f"{type(module).__module__.rpartition('.')[0]}.{type(module).__name__}"
        raise _refused(model, f"{path} has an adapter of the kind {kind}, and plain LoRA alone is split")


def _refused(model: Any, reason: str, remedy: str = SHARDS, divisor: int | None = None) -> ValueError:
    if divisor is not None:
        remedy = f"take a `tp_size` that divides {divisor}, or {remedy}"
    return ValueError(
        f"model type {model.config.model_type} cannot be split by tp_size: {reason}. {remedy[0].upper()}{remedy[1:]}"
    )


# -- splitting -----------------------------------------------------------------------------------------------------


def _split(
    path: str, module: Any, style: str, plan: Mapping[str, str], ranks: TensorParallel, mesh: DeviceMesh
) -> None:
    if style == WHOLE:
        _install(module, _forward_of_own_heads, ranks)
    elif style == EXPERTS:
        for name, _ in _own(module):
            _split_weight(module, name, STYLES[style_of(f"{path}.{name}", plan)], ranks, mesh)
        _install(module, _forward_of_experts, ranks)
    elif hasattr(module, "base_layer"):
        _split_linear(module.base_layer, STYLES[style], ranks, mesh)
        _split_adapters(module, STYLES[style], ranks, mesh)
    else:
        _split_linear(module, STYLES[style], ranks, mesh)


def _split_adapters(module: Any, style: Style, ranks: TensorParallel, mesh: DeviceMesh) -> None:
    """Splits the LoRA adapters on a module as it is split."""
    for name in module.lora_A:
        by_inputs = style.dimension == -1
        _split_linear((module.lora_A if by_inputs else module.lora_B)[name], style, ranks, mesh)
        if by_inputs and style.enter is _as_is:
            _install(module.lora_dropout[name], _forward_of_dropout, ranks)


def _split_linear(module: nn.Linear, style: Style, ranks: TensorParallel, mesh: DeviceMesh) -> None:
    _split_weight(module, "weight", style, ranks, mesh)
    if module.bias is not None and style.dimension == -2:
        module.bias = _cut(module.bias, style, ranks, mesh)
    vars(module)["_style"] = style
    _install(module, _forward_of_linear, ranks)


def _split_weight(module: Any, name: str, style: Style, ranks: TensorParallel, mesh: DeviceMesh) -> None:
    """Leaves a module the part of a weight that lies here, and of one in FP8 the scales of its rows."""
    if style.dimension == -2 and (rows := float8.stored(module, name)) is not None:
        setattr(module, name + float8.SCALES, _here(rows.scales, style, ranks, rows.scales.dim() - 2))
    setattr(module, name, _cut(getattr(module, name), style, ranks, mesh))


def _cut(whole: Tensor, style: Style, ranks: TensorParallel, mesh: DeviceMesh) -> nn.Parameter:
    """The part of a weight, or of a bias with a number for each output, that lies here."""
    dimension = whole.dim() + style.dimension if whole.dim() > 1 else 0
    placement = Shard(dimension) if style.parts == 1 else strided_shard(dimension, style.parts)
    return as_part(_here(whole, style, ranks, dimension), whole, mesh, placement)


def _here(whole: Tensor, style: Style, ranks: TensorParallel, dimension: int) -> Tensor:
    """A rank's share of a tensor, along a dimension."""
    parts = [part.chunk(ranks.size, dimension)[ranks.rank] for part in whole.detach().chunk(style.parts, dimension)]
    return torch.cat(parts, dimension).contiguous()


def _generic(name: str) -> str:
    """A name with `*` for the number of a layer, as plans have it."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


# -- forwards ------------------------------------------------------------------------------------------------------


def _install(module: Any, forward: Callable[..., Any], ranks: TensorParallel) -> None:
    vars(module)["_ranks"] = ranks
    module.forward = types.MethodType(forward, module)  # a copy of the module calls its own


def _parts_here(module: nn.Module, ranks: TensorParallel) -> AbstractContextManager[None]:
    """While it lasts, a module's parameters are the parts that lie here, and what is whole goes by `ranks.shared`.
    Gradients arrive at the parameters themselves."""
    own = {name: p.to_local() if isinstance(p, DTensor) else ranks.shared(p) for name, p in _own(module)}
    return parameters_replaced(module, own)


def _own(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The parameters of a module itself."""
    return [*module.named_parameters(recurse=False)]


def _forward_of_linear(self: Any, x: Tensor) -> Tensor:
    style, ranks = self._style, self._ranks
    bias = self.bias if style.dimension == -1 else None  # added once, after the sum
    weight = self.weight.to_local()
    own = self.bias.to_local() if bias is None and self.bias is not None else None
    scales: Any = getattr(self, "weight" + float8.SCALES, None)
    if scales is None:
        out = F.linear(style.enter(ranks, x), weight, own)
    else:
        out = multiply_rows(style.enter(ranks, x), RowScaled(weight.view(float8.FORMAT), scales), own)
    out = style.leave(ranks, out)
    return out if bias is None else out + bias


def _forward_of_own_heads(self: Any, *args: Any, **kwargs: Any) -> Any:
    with _parts_here(self, self._ranks):
        return type(self).forward(self, *args, **kwargs)


def _forward_of_experts(self: Any, hidden: Tensor, chosen: Tensor, weights: Tensor, *args: Any) -> Tensor:
    ranks = self._ranks
    with _parts_here(self, ranks):
        return ranks.summed(run_experts(self, ranks.shared(hidden), chosen, ranks.shared(weights), *args))


def _forward_of_dropout(self: Any, x: Tensor) -> Tensor:
    """Of this rank's columns, as one rank draws it of all."""
    if not self.training or not getattr(self, "p", 0.0):
        return x
    whole = x.new_ones(*x.shape[:-1], x.shape[-1] * self._ranks.size)
    return x * self._ranks.columns(drop(self, whole))
