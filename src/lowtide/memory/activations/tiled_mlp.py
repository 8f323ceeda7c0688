"""The MLP of each layer over tiles of tokens, so that its wide inner tensors exist for one tile at a time.

An MLP treats each token by itself, so it may see them in portions. Forward computes the tiles without a graph and keeps
nothing but the input; backward computes each tile again, with a graph this time, and goes back through it at once. The
idea is TiledMLP of Arctic Long Sequence Training (arXiv 2506.13996). Deviations: gradients of the parameters are summed
here and handed to autograd once, so that hooks on parameters see the whole gradient once; and what backward needs is
kept *before* the tiles are computed, so that a layer under non-reentrant checkpointing whose last part is the MLP stops
its recomputation there: the MLP is computed twice, as without tiles. (A reentrant checkpoint, and a layer with a norm
after its MLP, compute it a third time.)

Exact to rounding: a weight's gradient is summed tile by tile (in float32 at least), which is another order than that of
one large product. Dropout inside is exact in that backward sees the masks of forward, which are others than without
tiles, drawn from the same distribution.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lowtide.compat.torch import FakeTensor, gathered
from lowtide.memory.activations.computed_again import Shell, computing_parts, own_forward, sum_wide
from lowtide.ops.layers.stacks import stored_stacks
from lowtide.ops.surroundings import Surroundings

NAMES = ("mlp", "feed_forward", "feedforward", "ffn", "DenseReluDense")
"""What transformers' models call the MLP of a layer."""
CHUNK, CHUNK_PARTS = "feed_forward_chunk", ("intermediate", "output")
"""The method by which a layer of BERT's kin runs its MLP, which is two modules, and these."""
EXPERTS = ("num_experts", "is_transposed", "has_gate", "down_proj")
"""The attributes that tell them."""
SHARED = ("shared_expert", "shared_experts", "shared_mlp")
"""What they call the experts of a mixture that see every token."""
PACKAGES = ("torch.nn.modules.activation", "torch.nn.modules.dropout", "transformers.activations", "peft.")
"""Where modules without children come from that treat each token by itself, besides linear ones."""


def install_tiled_mlp(model: nn.Module, tile_tokens: int) -> int:
    """Lets every MLP of a model run over tiles; called again, it changes their size.

    Args:
        model: of transformers, wrapped or not; adapters may come before or after.
        tile_tokens: tokens that an MLP sees at a time.

    Returns:
        How many MLPs run over tiles.

    Raises:
        ValueError: the model has no MLP that is known as one, or has one that is more than that (a recurrence, experts
            that are called otherwise than transformers' own, an MLP that takes a second tensor); names the module.
    """
    if tile_tokens < 1:
        raise ValueError(f"an MLP cannot run over tiles of {tile_tokens} tokens: give 1 or more")
    found = dict(_candidates(model))
    if not found:
        kind = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
        raise ValueError(
            f"no layer of this model (model type {kind}) has a module named {', '.join(NAMES)}, or a method {CHUNK}: "
            "its MLPs cannot be tiled, leave the option off"
        )
    for path, module in found.items():
        with gathered(model, module):
            reason = None if hasattr(module, "tiling") else _why_not(_mlp_of(module))
        if reason:
            raise ValueError(
                f"{path}, a {type(module).__name__}, cannot run over tiles of tokens: it {reason}; leave the option off"
            )
    for module in found.values():
        if hasattr(module, "tiling"):
            module.tiling.tokens = tile_tokens  # type: ignore[union-attr]
            continue
        name, tiled = (CHUNK, _forward_chunk) if _has_chunk(module) else ("forward", _forward)
        module.tiling = _Tiling(own_forward(_mlp_of(module)), tile_tokens, _are_experts(module))  # type: ignore[assignment]
        setattr(module, name, types.MethodType(tiled, module))
    return len(found)


# -- which modules ------------------------------------------------------------------------------------------------


def _candidates(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    inside: tuple[str, ...] = ()
    mixtures: set[str] = set()
    for path, module in model.named_modules():
        name = path.rpartition(".")[2]
        if inside and path.startswith(inside):
            continue
        is_mlp = name in NAMES and not _are_experts(getattr(module, "experts", None))
        if (
            is_mlp
            or _has_chunk(module)
            or _are_experts(module)
            or (name in SHARED and path.rpartition(".")[0] in mixtures)
        ):
            inside = (*inside, path + ".")
            yield path, module
        elif name in NAMES:
            mixtures.add(path)


def _has_chunk(module: Any) -> bool:
    """Whether a module is a layer that runs its MLP by a method of its own."""
    return callable(getattr(module, CHUNK, None)) and all(hasattr(module, name) for name in CHUNK_PARTS)


class _FeedForward(nn.Module):
    """The MLP of such a layer, residual and norm included, as a module: it stands in for the layer in its method."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        for name in CHUNK_PARTS:
            setattr(self, name, getattr(layer, name))
        self.training = layer.training
        self.chunk = getattr(type(layer), CHUNK)

    def forward(self, x: Tensor) -> Tensor:
        return self.chunk(self, x)


def _mlp_of(module: nn.Module) -> nn.Module:
    return _FeedForward(module) if _has_chunk(module) else module


def _are_experts(module: Any) -> bool:
    """Whether a module is the experts of a mixture that transformers calls through its interface: they are given the
    tokens, which of them see each, and with which weight."""
    return isinstance(module, nn.Module) and all(hasattr(module, name) for name in EXPERTS)


def _why_not(module: nn.Module) -> str | None:
    """What keeps a module from being a token-wise MLP; None if nothing does."""
    if _are_experts(module):
        return _experts_differ(module)
    if isinstance(experts := getattr(module, "experts", None), nn.Module):
        return f"is a mixture whose experts, a {type(experts).__name__}, are not transformers' own"
    leaves = [(name, part) for name, part in module.named_modules() if not any(part.children())]
    for name, part in leaves:
        known = isinstance(part, (nn.Identity, nn.LayerNorm, nn.ModuleDict, nn.ParameterDict))
        if not (known or _width(part) is not None or type(part).__module__.startswith(PACKAGES)):
            return f"contains a {type(part).__name__} ({name or 'itself'})"
    width = next((width for part in module.modules() if (width := _width(part)) is not None), None)
    if width is None:
        return "contains no linear layer"
    parameters = list(module.parameters())
    if any(p.is_meta or isinstance(p, FakeTensor) for p in parameters):
        return None  # nothing to compute with
    return _tiles_differ(module, width, parameters)


def _width(part: nn.Module) -> int | None:
    """Of the input of a linear layer, GPT-2's `Conv1D` or an adapted or quantized one; None for other modules."""
    width = getattr(part, "in_features", getattr(part, "nx", None))
    return width if isinstance(width, int) else None


@torch.no_grad()
def _experts_differ(module: Any) -> str | None:
    """The same proof of experts, for five tokens of which each sees two of them."""
    weight, stored = module.down_proj, stored_stacks(module).get("down_proj")
    if not isinstance(weight, Tensor) or (weight.ndim != 3 and stored is None):
        return "has experts whose weights are not one tensor"
    if weight.is_meta or isinstance(weight, FakeTensor):
        return None  # nothing to compute with
    generator = torch.Generator().manual_seed(0)
    shape = weight.shape if stored is None else stored.shape
    x = torch.randn(5, shape[2 if module.is_transposed else 1], generator=generator)
    x = x.to(weight.device, weight.dtype if stored is None else torch.bfloat16)
    chosen = torch.stack([torch.randperm(module.num_experts, generator=generator)[:2] for _ in range(5)])
    given = x, chosen.to(weight.device), torch.rand(chosen.shape, generator=generator).to(x)
    whole = own_forward(module)(module, *given)
    tiles = torch.cat(
        [own_forward(module)(module, *pieces) for pieces in zip(*(t.split(2) for t in given), strict=True)]
    )
    far = (whole - tiles).abs().max() > torch.finfo(whole.dtype).eps ** 0.5 * whole.abs().max()
    return "gives other values for tiles than for all tokens" if far else None


@torch.no_grad()
def _tiles_differ(module: nn.Module, width: int, parameters: Sequence[Tensor]) -> str | None:
    """The proof: five random tokens together, and in tiles of two."""
    like = next((p for p in parameters if p.is_floating_point()), torch.empty(0, device=parameters[0].device))
    x = torch.randn(1, 5, width, generator=torch.Generator().manual_seed(0)).to(like)
    plain = own_forward(module)
    with _evaluation(module):
        try:
            whole = plain(module, x)
            tiles = torch.cat([plain(module, piece) for piece in x.split(2, dim=1)], dim=1)
        except (TypeError, RuntimeError, ValueError, AttributeError) as error:
            return f"does not take one tensor [1, tokens, {width}] ({error})"
    if not isinstance(whole, Tensor) or whole.shape != x.shape:
        return "does not return one tensor of the shape of its input"
    quantized = any(not p.is_floating_point() for p in parameters)  # computed in 16 bits, whatever comes out
    rounding = torch.finfo(torch.bfloat16 if quantized else whole.dtype).eps
    far = (whole - tiles).abs().max() > rounding**0.5 * whole.abs().max()
    return "gives other values for tiles than for all tokens" if far else None


@contextlib.contextmanager
def _evaluation(module: nn.Module) -> Iterator[None]:
    """Without dropout."""
    training = {part: part.training for part in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for part, was in training.items():
            part.training = was


# -- the computation ----------------------------------------------------------------------------------------------


@dataclass
class _Tiling:
    plain: Callable[..., Tensor]
    """The module's own forward."""
    tokens: int
    experts: bool
    """Whether it is given the experts of each token, and their weights, beside [tokens, hidden]."""


def _forward(self: Any, *args: Tensor, **kwargs: Tensor) -> Tensor:
    given = (*args, *kwargs.values())
    trainable = {name: parameter for name, parameter in self.named_parameters() if parameter.requires_grad}
    if not torch.is_grad_enabled() or not (trainable or any(each.requires_grad for each in given)):
        return _tile_by_tile(self, given)
    x = _Input.apply(self, tuple(trainable), len(given), *given, *trainable.values())
    return _Output.apply(self, x, *(each.detach() for each in given[1:]))


def _forward_chunk(self: Any, x: Tensor) -> Tensor:
    mlp: Any = _FeedForward(self)
    mlp.tiling = self.tiling
    return _forward(mlp, x)


def _pieces(module: Any, given: Sequence[Tensor]) -> Iterator[tuple[Tensor, ...]]:
    """Each tile of what a module is given; an MLP takes [1, tokens, hidden], experts [tokens, ..]."""
    before = () if module.tiling.experts else (1,)
    flat = (each.reshape(*before, -1, each.shape[-1]) for each in given)
    return zip(*(each.split(module.tiling.tokens, dim=-2) for each in flat), strict=True)


def _tile_by_tile(module: Any, given: Sequence[Tensor]) -> Tensor:
    x, pieces = given[0], list(_pieces(module, given))
    with _casts_kept():
        first = module.tiling.plain(module, *pieces[0])
        if len(pieces) == 1:
            return first.view(x.shape)
        out = first.new_empty(x.shape)
        for number, (piece, (into,)) in enumerate(zip(pieces, _pieces(module, (out,)), strict=True)):
            into.copy_(module.tiling.plain(module, *piece) if number else first)
    return out


@contextlib.contextmanager
def _casts_kept() -> Iterator[None]:
    """Autocast casts each weight once for all tiles, and lets the casts go with them."""
    enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(True)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(enabled)
        if not enabled:
            torch.clear_autocast_cache()


class _Input(torch.autograd.Function):
    """The identity. Its backward is that of the whole MLP: the gradient at the output comes in through `_Output`."""

    @staticmethod
    def forward(ctx, module: nn.Module, names: tuple[str, ...], count: int, *tensors: Tensor) -> Tensor:
        ctx.module, ctx.names, ctx.count = module, names, count
        ctx.surroundings = Surroundings(tensors[0], module.training)
        ctx.save_for_backward(*tensors)
        return tensors[0].view_as(tensors[0])

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        tensors = ctx.saved_tensors  # a checkpoint gives them once
        given, parameters = tensors[: ctx.count], tensors[ctx.count :]
        aliases = {name: p.detach().requires_grad_() for name, p in zip(ctx.names, parameters, strict=True)}
        wanted = ctx.needs_input_grad[3 : 3 + ctx.count]
        with ctx.surroundings.restored():
            return None, None, None, *_backward_by_tile(ctx.module, aliases, given, grads[0], wanted)


class _Output(torch.autograd.Function):
    """The MLP's values. Keeps nothing, and hands the gradient at the output on to `_Input`."""

    @staticmethod
    def forward(ctx, module: nn.Module, *given: Tensor) -> Tensor:
        with computing_parts():
            out = _tile_by_tile(module, given)
        # What comes back from here passes `_Input` in the input's dtype, which must lose nothing of it.
        widest = torch.promote_types(out.dtype, given[0].dtype)
        assert widest == given[0].dtype, "the output of an MLP is no wider than its input"
        ctx.beside = len(given) - 1
        return out

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, grads[0], *([None] * ctx.beside)


def _backward_by_tile(
    module: Any, aliases: dict[str, Tensor], given: Sequence[Tensor], grad: Tensor, wanted: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """Gradients of what the module is given, and of the parameters.

    Args:
        aliases: leaves that stand for the parameters, so that no hook on a parameter sees the gradient of one tile.
        grad: at the output.
        wanted: of which tensors that are given a gradient is wanted.
    """
    shell, named = Shell(module, module.tiling.plain), {f"module.{name}": alias for name, alias in aliases.items()}
    found = [
        torch.empty_like(each, memory_format=torch.contiguous_format) if want else None
        for each, want in zip(given, wanted, strict=True)
    ]
    whole = [each for each in found if each is not None]
    totals: dict[Tensor, Tensor] = {}

    def add(alias: Tensor) -> None:
        """One tile's gradient, as soon as it is there, so that no two of them are."""
        assert alias.grad is not None
        totals[alias], alias.grad = sum_wide(totals.get(alias), alias.grad), None

    with contextlib.ExitStack() as stack:  # a leaf and the totals that its hook knows would keep each other
        for alias in aliases.values():
            stack.callback(alias.register_post_accumulate_grad_hook(add).remove)
        for every in _pieces(module, (*given, grad, *whole)):
            grad_piece, into = every[len(given)], every[len(given) + 1 :]
            pieces = [p.detach().requires_grad_(w) for p, w in zip(every, wanted, strict=False)]
            with torch.enable_grad():
                out = torch.func.functional_call(shell, named, tuple(pieces))
            leaves = [piece for piece, want in zip(pieces, wanted, strict=True) if want]
            torch.autograd.backward(out, grad_piece.to(out.dtype), inputs=[*leaves, *aliases.values()])
            for place, leaf in zip(into, leaves, strict=True):
                assert leaf.grad is not None
                place.copy_(leaf.grad)
    return *found, *(totals[alias].to(alias.dtype) if alias in totals else None for alias in aliases.values())
