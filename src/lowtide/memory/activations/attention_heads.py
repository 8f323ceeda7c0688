"""Attention a few heads at a time, so that queries, keys, values and outputs exist for those alone.

Each head of keys, with the queries that read it, is computed by itself anyway, and the projection at the end adds heads
up. So the heads may come in groups: forward computes the groups without a graph and keeps nothing but the input;
backward computes each group again, with a graph this time, and goes back through it at once. The idea is UPipe
(arXiv 2602.21196), which takes heads in turn within Ulysses. Here it is the family's own forward that runs, with the
weights of the group's heads in the place of all: rows of the projections to queries, keys and values, columns of the
one at the end, as in tensor parallelism.

Exact to rounding: what the heads give is laid side by side for one product, as without groups, so that forward's sums
are the same. The gradient at the input is added up over groups, in float32 at least.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lowtide.compat.torch import is_traceable_wrapper_subclass
from lowtide.compat.transformers import holds_cache
from lowtide.memory.activations.computed_again import Shell, computing_parts, own_forward, sum_wide
from lowtide.ops.attention.cached_attention import CachedPlan
from lowtide.ops.surroundings import Surroundings
from lowtide.ranks.shards import local_of

FAMILIES = frozenset(
    {
        *("apertus", "arcee", "cohere", "cohere2", "ernie4_5", "exaone4", "gemma", "gemma2", "gemma3_text", "glm4"),
        *("glm4_moe", "gpt_oss", "granite", "granitemoe", "helium", "hunyuan_v1_dense", "llama", "ministral"),
        *("mistral", "mixtral", "olmo", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss", "smollm3"),
        "starcoder2",
    }
)
"""Model types whose attention takes the number of heads from the projections' outputs, and treats each by itself."""
PROJECTIONS = ("q_proj", "k_proj", "v_proj")
OUTPUT = "o_proj"
ROWS, COLUMNS, WHOLE, ONCE = "rows", "columns", "whole", "once"
"""What of a parameter a group of heads has; `ONCE`: the first group has it all, and the others nothing."""


def install_attention_heads(model: nn.Module, chunks: int) -> int:
    """Lets every attention of a model run over groups of heads; called again, it changes their number.

    Args:
        model: of transformers, wrapped or not, with its adapters.
        chunks: groups; each has an equal share of the heads of keys, and the heads of queries that read them.

    Returns:
        How many attentions run over groups.

    Raises:
        ValueError: the model is of a family, or has a part in its attention, that this is not known for; or its heads
            of keys do not divide by the groups. Names the model type or the module, and what to do.
    """
    kind = _model_type(model)
    if kind not in FAMILIES:
        raise ValueError(
            f"the attention of model type {kind} is not known to run over groups of heads "
            "(docs/memory/attention-heads.md names the families that do): leave attention_head_chunks out"
        )
    found = {path: module for path, module in model.named_modules() if _is_attention(module)}
    for path, module in found.items():
        if reason := _why_not(module, chunks):
            raise ValueError(f"{path}, a {type(module).__name__}, cannot run over {chunks} groups of heads: {reason}")
    for module in found.values():
        if isinstance(getattr(module, "head_groups", None), _HeadGroups):
            module.head_groups.count = chunks  # type: ignore[union-attr]
        else:
            module.head_groups = _HeadGroups(own_forward(module), chunks)  # type: ignore[assignment]
            module.forward = types.MethodType(_forward, module)
    return len(found)


# -- which modules ------------------------------------------------------------------------------------------------


def _model_type(model: nn.Module) -> str | None:
    config: Any = next((each.config for each in model.modules() if hasattr(each, "config")), None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return getattr(text, "model_type", None)


def _is_attention(module: nn.Module) -> bool:
    return all(isinstance(getattr(module, name, None), nn.Module) for name in (*PROJECTIONS, OUTPUT))


def _why_not(module: Any, chunks: int) -> str | None:
    """What keeps an attention from running over groups of heads, with what to do; None if nothing does."""
    kv_heads = module.k_proj.out_features // module.head_dim
    if kv_heads % chunks:
        few = [n for n in range(1, kv_heads + 1) if kv_heads % n == 0]
        return f"its {kv_heads} heads of keys do not divide by {chunks}. Set attention_head_chunks to one of {few}"
    for name in (*PROJECTIONS, OUTPUT):
        part = getattr(module, name)
        linear = getattr(part, "base_layer", part)
        if type(linear) is not nn.Linear:
            return f"{name} is a {type(linear).__name__}, whose weight cannot be cut. Leave attention_head_chunks out"
        weight = local_of(linear.weight)
        if not weight.is_floating_point() or is_traceable_wrapper_subclass(weight):
            return f"the weight of {name} is quantized and cannot be cut. Leave attention_head_chunks out"
    for name, parameter in module.named_parameters():
        if _share(module, name, parameter.shape) is None:
            return f"it has {name}, which is not known to be of single heads. Leave attention_head_chunks out"
    dropping = [name for name, part in module.named_modules() if isinstance(part, nn.Dropout) and part.p > 0]
    if dropping or getattr(module, "attention_dropout", 0):
        what = f"its {dropping[0]} drops" if dropping else "it drops attention weights"
        return f"{what} at random, for each group anew. Set lora_dropout (or the config's attention_dropout) to 0"
    return None


def _share(module: Any, name: str, shape: torch.Size) -> str | None:
    """What of a parameter a group of heads has; None of one that is not known."""
    part, _, rest = name.partition(".")
    first = rest.split(".")[0]
    if part in PROJECTIONS:
        if rest in ("weight", "bias", "base_layer.weight", "base_layer.bias") or first == "lora_B":
            return ROWS
        return WHOLE if first == "lora_A" else None
    if part == OUTPUT:
        if rest in ("weight", "base_layer.weight") or first == "lora_A":
            return COLUMNS
        if rest in ("bias", "base_layer.bias") or (first == "lora_B" and rest.endswith("bias")):
            return ONCE
        return WHOLE if first == "lora_B" else None
    if tuple(shape) == (module.head_dim,) and part != "sinks":
        return WHOLE  # a norm of each head
    heads = {getattr(module, each).out_features // module.head_dim for each in ("q_proj", "k_proj")}
    by_head = part == "sinks" or len(shape) == 2
    return ROWS if by_head and shape[0] in heads else None


# -- the computation ----------------------------------------------------------------------------------------------


@dataclass
class _HeadGroups:
    plain: Callable[..., tuple[Tensor, Any]]
    """The module's own forward."""
    count: int


class _Call(NamedTuple):
    """What an attention is given beside hidden states."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def _forward(self: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
    if "hidden_states" not in kwargs:
        kwargs["hidden_states"], *rest = args
        args = tuple(rest)
    x = kwargs.pop("hidden_states")
    if holds_cache(kwargs) or any(isinstance(each, CachedPlan) for each in kwargs.values()):
        return self.head_groups.plain(self, x, *args, **kwargs)  # keys are kept for later, of all heads
    call = _Call(args, kwargs)
    trainable = {name: parameter for name, parameter in self.named_parameters() if parameter.requires_grad}
    if not torch.is_grad_enabled() or not (x.requires_grad or trainable):
        return _in_turn(self, x, call), None
    return _InTurn.apply(self, call, tuple(trainable), x, *trainable.values()), None


def _in_turn(module: Any, x: Tensor, call: _Call) -> Tensor:
    parameters, count = dict(module.named_parameters()), module.head_groups.count
    whole, width = x, 0
    with computing_parts():
        for group in range(count):
            part = _attend(module, _of_group(module, parameters, group), x, call)
            if group == 0:
                width = part.shape[-1]
                whole = part.new_empty(*part.shape[:-1], width * count)
            whole.narrow(-1, group * width, width).copy_(part)
            del part
    return getattr(module, OUTPUT)(whole)


class _InTurn(torch.autograd.Function):
    """Attention over groups of heads, which keeps its input."""

    @staticmethod
    def forward(ctx, module: nn.Module, call: _Call, names: tuple[str, ...], x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.module, ctx.call, ctx.names = module, call, names
        ctx.surroundings = Surroundings(x, random=False)
        ctx.save_for_backward(x, *parameters)
        return _in_turn(module, x, call)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *parameters = ctx.saved_tensors
        trained = dict(zip(ctx.names, parameters, strict=True))
        with ctx.surroundings.restored():
            found = _backward_in_turn(ctx.module, ctx.call, trained, x, grads[0], ctx.needs_input_grad[3])
        return None, None, None, *found


def _backward_in_turn(
    module: Any, call: _Call, trained: Mapping[str, Tensor], x: Tensor, grad: Tensor, needs_x: bool
) -> tuple[Tensor | None, ...]:
    """Gradients of the input and of the parameters.

    Args:
        trained: the parameters that gradients are wanted of.
        grad: at the output.
    """
    parameters = {**dict(module.named_parameters()), **trained}
    totals: dict[str, Tensor] = {}
    grad_x: Tensor | None = None
    for group in range(module.head_groups.count):
        given = _of_group(module, parameters, group)
        leaves = {name: given[name].detach().requires_grad_() for name in trained if _is_leaf(module, name, group)}
        given.update(leaves)
        piece = x.detach().requires_grad_(needs_x)
        with torch.enable_grad():
            out = _project(module, given, _attend(module, given, piece, call))
        wanted = [piece, *leaves.values()] if needs_x else list(leaves.values())
        torch.autograd.backward(out, grad.to(out.dtype), inputs=wanted)
        del out
        for name, leaf in leaves.items():
            if leaf.grad is not None:
                _collect(totals, name, leaf.grad, trained[name], _share_of(module, name, trained[name]), group)
                leaf.grad = None
        if needs_x:
            assert piece.grad is not None
            grad_x = sum_wide(grad_x, piece.grad)
    found = (totals[name].to(each.dtype) if name in totals else None for name, each in trained.items())
    return None if grad_x is None else grad_x.to(x.dtype), *found


def _collect(totals: dict[str, Tensor], name: str, grad: Tensor, parameter: Tensor, share: str, group: int) -> None:
    """Puts a group's gradient of its part of a parameter to those of the others."""
    if share in (WHOLE, ONCE):
        totals[name] = sum_wide(totals.get(name), grad)
        return
    if name not in totals:
        totals[name] = torch.zeros_like(parameter, memory_format=torch.contiguous_format)
    dim = 0 if share == ROWS else 1
    size = grad.shape[dim]
    totals[name].narrow(dim, group * size, size).copy_(grad)


def _share_of(module: Any, name: str, parameter: Tensor) -> str:
    share = _share(module, name, parameter.shape)
    assert share is not None, f"{name} was added after attention ran over groups of heads"
    return share


def _is_leaf(module: Any, name: str, group: int) -> bool:
    """Whether a group has a part of a parameter."""
    return group == 0 or _share(module, name, module.get_parameter(name).shape) != ONCE


def _of_group(module: Any, parameters: Mapping[str, Tensor], group: int) -> dict[str, Tensor]:
    """Of each parameter what a group of heads has."""
    count, found = module.head_groups.count, {}
    for name, parameter in parameters.items():
        share = _share_of(module, name, parameter)
        if share in (ROWS, COLUMNS):
            dim = 0 if share == ROWS else 1
            size = parameter.shape[dim] // count
            found[name] = parameter.narrow(dim, group * size, size)
        else:
            found[name] = torch.zeros_like(parameter) if share == ONCE and group else parameter
    return found


def _attend(module: Any, given: Mapping[str, Tensor], x: Tensor, call: _Call) -> Tensor:
    """[batch, tokens, width of the group]: what heads give, before the projection at the end."""
    own = {f"module.{name}": each for name, each in given.items() if not name.startswith(f"{OUTPUT}.")}
    with _without_output(module):
        return torch.func.functional_call(Shell(module, module.head_groups.plain), own, (x, *call.args), call.kwargs)[0]


def _project(module: Any, given: Mapping[str, Tensor], part: Tensor) -> Tensor:
    """[batch, tokens, hidden]: what the heads of a group add to the output."""
    own = {name.removeprefix(f"{OUTPUT}."): each for name, each in given.items() if name.startswith(f"{OUTPUT}.")}
    return torch.func.functional_call(getattr(module, OUTPUT), own, (part,))


@contextlib.contextmanager
def _without_output(module: nn.Module) -> Iterator[None]:
    """The module gives what its heads give."""
    before = getattr(module, OUTPUT)
    setattr(module, OUTPUT, nn.Identity())
    try:
        yield
    finally:
        setattr(module, OUTPUT, before)
