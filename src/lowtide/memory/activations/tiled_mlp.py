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
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import get_device_states, set_device_states

from lowtide.compat.torch import FakeTensor, gathered

NAMES = ("mlp", "feed_forward", "feedforward", "ffn", "DenseReluDense")
"""What transformers' models call the MLP of a layer."""
PACKAGES = ("torch.nn.modules.activation", "torch.nn.modules.dropout", "transformers.activations", "peft.")
"""Where modules without children come from that treat each token by itself, besides linear ones."""

computing_tiles: ContextVar[bool] = ContextVar("computing_tiles", default=False)
"""Whether tiles are being computed in the forward of a step, whose inner results nobody needs to keep."""


def install_tiled_mlp(model: nn.Module, tile_tokens: int) -> int:
    """Lets every MLP of a model run over tiles; called again, it changes their size.

    Args:
        model: of transformers, wrapped or not; adapters may come before or after.
        tile_tokens: tokens that an MLP sees at a time.

    Returns:
        How many MLPs run over tiles.

    Raises:
        ValueError: the model has no MLP that is known as one, or has one that is more than that (a mixture of experts,
            a recurrence, an MLP that takes a second tensor); names the module.
    """
    if tile_tokens < 1:
        raise ValueError(f"an MLP cannot run over tiles of {tile_tokens} tokens: give 1 or more")
    found = dict(_candidates(model))
    if not found:
        kind = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
        raise ValueError(
            f"no layer of this model (model type {kind}) has a module named {', '.join(NAMES)}: its MLPs cannot be "
            "tiled, leave the option off"
        )
    for path, module in found.items():
        with gathered(model, module):
            reason = None if hasattr(module, "tiling") else _why_not(module)
        if reason:
            raise ValueError(
                f"{path}, a {type(module).__name__}, cannot run over tiles of tokens: it {reason}; leave the option off"
            )
    for module in found.values():
        if hasattr(module, "tiling"):
            module.tiling.tokens = tile_tokens  # type: ignore[union-attr]
        else:
            module.tiling = _Tiling(_plain(module), module.__dict__.get("forward"), tile_tokens)  # type: ignore[assignment]
            module.forward = types.MethodType(_forward, module)
    return len(found)


def remove_tiled_mlp(model: nn.Module) -> None:
    """Undoes `install_tiled_mlp`."""
    for module in model.modules():
        tiling = module.__dict__.pop("tiling", None)
        if isinstance(tiling, _Tiling):
            del module.forward
            if tiling.before is not None:
                module.forward = tiling.before


# -- which modules ------------------------------------------------------------------------------------------------


def _candidates(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    inside = ()
    for path, module in model.named_modules():
        if path.rpartition(".")[2] in NAMES and not (inside and path.startswith(inside)):
            inside = (*inside, path + ".")
            yield path, module


def _why_not(module: nn.Module) -> str | None:
    """What keeps a module from being a token-wise MLP; None if nothing does."""
    leaves = [(name, part) for name, part in module.named_modules() if not any(part.children())]
    for name, part in leaves:
        known = isinstance(part, (nn.Identity, nn.ModuleDict, nn.ParameterDict))
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
def _tiles_differ(module: nn.Module, width: int, parameters: Sequence[Tensor]) -> str | None:
    """The proof: five random tokens together, and in tiles of two."""
    like = next((p for p in parameters if p.is_floating_point()), torch.empty(0, device=parameters[0].device))
    x = torch.randn(1, 5, width, generator=torch.Generator().manual_seed(0)).to(like)
    with _evaluation(module):
        try:
            whole = _plain(module)(module, x)
            tiles = torch.cat([_plain(module)(module, piece) for piece in x.split(2, dim=1)], dim=1)
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
    """The module's own forward, unbound, so that a copy of the module calls its own."""
    before: Callable[..., Tensor] | None
    """A forward that the module had instead of its class's."""
    tokens: int


def _plain(module: nn.Module) -> Callable[..., Tensor]:
    inner: Any = module.forward
    return inner.__func__ if getattr(inner, "__self__", None) is module else lambda _, *args: inner(*args)


def _forward(self: Any, *args: Tensor, **kwargs: Tensor) -> Tensor:
    (x,) = (*args, *kwargs.values())
    trainable = {name: parameter for name, parameter in self.named_parameters() if parameter.requires_grad}
    if not torch.is_grad_enabled() or not (x.requires_grad or trainable):
        return _tile_by_tile(self, x)
    return _Output.apply(self, _Input.apply(self, tuple(trainable), x, *trainable.values()))


def _tile_by_tile(module: Any, x: Tensor) -> Tensor:
    flat = x.reshape(1, -1, x.shape[-1])
    pieces = flat.split(module.tiling.tokens, dim=1)
    with _casts_kept():
        first = module.tiling.plain(module, pieces[0])
        if len(pieces) == 1:
            return first.view(x.shape)
        out = first.new_empty(flat.shape)
        for into, piece in zip(out.split(module.tiling.tokens, dim=1), pieces, strict=True):
            into.copy_(first if piece is pieces[0] else module.tiling.plain(module, piece))
    return out.view(x.shape)


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
    def forward(ctx, module: nn.Module, names: tuple[str, ...], x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.module, ctx.names = module, names
        ctx.surroundings = _Surroundings(x, module.training)
        ctx.save_for_backward(x, *parameters)
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *parameters = ctx.saved_tensors
        aliases = {name: p.detach().requires_grad_() for name, p in zip(ctx.names, parameters, strict=True)}
        with ctx.surroundings.restored():
            return None, None, *_backward_by_tile(ctx.module, aliases, x, grads[0], ctx.needs_input_grad[2])


class _Output(torch.autograd.Function):
    """The MLP's values. Keeps nothing, and hands the gradient at the output on to `_Input`."""

    @staticmethod
    def forward(ctx, module: nn.Module, x: Tensor) -> Tensor:
        token = computing_tiles.set(True)
        try:
            out = _tile_by_tile(module, x)
        finally:
            computing_tiles.reset(token)
        # What comes back from here passes `_Input` in the input's dtype, which must lose nothing of it.
        assert torch.promote_types(out.dtype, x.dtype) == x.dtype, "the output of an MLP is no wider than its input"
        return out

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[None, Tensor]:
        return None, grads[0]


def _backward_by_tile(
    module: Any, aliases: dict[str, Tensor], x: Tensor, grad: Tensor, needs_x: bool
) -> tuple[Tensor | None, ...]:
    """Gradients of the input and of the parameters.

    Args:
        aliases: leaves that stand for the parameters, so that no hook on a parameter sees the gradient of one tile.
        grad: at the output.
    """
    shell, named = _Shell(module), {f"module.{name}": alias for name, alias in aliases.items()}
    grad_x = torch.empty_like(x, memory_format=torch.contiguous_format) if needs_x else None
    totals: dict[Tensor, Tensor] = {}

    def add(alias: Tensor) -> None:
        """One tile's gradient, as soon as it is there, so that no two of them are."""
        assert alias.grad is not None
        totals[alias], alias.grad = _sum(totals.get(alias), alias.grad), None

    tile = module.tiling.tokens
    pieces, grad_pieces = (each.reshape(1, -1, each.shape[-1]).split(tile, dim=1) for each in (x, grad))
    with contextlib.ExitStack() as stack:  # a leaf and the totals that its hook knows would keep each other
        for alias in aliases.values():
            stack.callback(alias.register_post_accumulate_grad_hook(add).remove)
        for number, (piece, grad_piece) in enumerate(zip(pieces, grad_pieces, strict=True)):
            piece = piece.detach().requires_grad_(needs_x)
            with torch.enable_grad():
                out = torch.func.functional_call(shell, named, (piece,))
            wanted = [piece, *aliases.values()] if needs_x else list(aliases.values())
            torch.autograd.backward(out, grad_piece.to(out.dtype), inputs=wanted)
            if grad_x is not None:
                assert piece.grad is not None
                grad_x.view(1, -1, x.shape[-1])[:, number * tile : (number + 1) * tile] = piece.grad
    return grad_x, *(totals[alias].to(alias.dtype) if alias in totals else None for alias in aliases.values())


def _sum(total: Tensor | None, part: Tensor) -> Tensor:
    """Adds in float32 at least: a lower dtype would round once a tile."""
    if total is None:
        return part
    wide = torch.promote_types(total.dtype, torch.float32)
    return total.add_(part) if total.dtype == wide else total.to(wide).add_(part)


class _Shell(nn.Module):
    """Calls a module's own forward, for `functional_call`."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        module: Any = self.module
        return module.tiling.plain(module, x)


class _Surroundings:
    """Autocast and random numbers as they are in forward, for backward."""

    def __init__(self, x: Tensor, random: bool) -> None:
        kind = x.device.type
        self.autocast = (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
        self.host_state = torch.get_rng_state() if random else None
        started = kind != "cpu" and getattr(torch.get_device_module(x.device), "is_initialized", lambda: False)()
        self.devices, self.states = get_device_states(x) if random and started else ([], [])

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        kind, dtype, enabled = self.autocast
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.autocast(kind, dtype, enabled))
            if self.host_state is not None:
                stack.enter_context(torch.random.fork_rng(self.devices, device_type=kind))
                torch.set_rng_state(self.host_state)
                set_device_states(self.devices, self.states, device_type=kind)
            yield
