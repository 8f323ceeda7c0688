"""Linear layers that read one input, with low-rank adapters or without, forward and backward, without autograd.

What a decoder layer's own backward (`ops.layers.decoder_layer`) is made of. A LoRA layer (arXiv 2106.09685) gives
`x W' + s (x A') B'`. As PEFT computes it, that is two small products, a scale and an addition over the whole output.
Here the small product comes first and the large one adds to it in its own epilogue (`addmm`), which has the scale too;
the first matrices of layers that read one input are one matrix; and the gradients at that input meet in one buffer.

All of it is called under `torch.no_grad`. Products are of one dtype, to which weights and adapters are cast for a pass.
A gradient has its parameter's dtype.

Shapes: `inputs` and `outputs` are those of a layer, `rank` its adapter's; a product's rows are tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from lowtide.compat.torch import copy_each
from lowtide.ops import few_rows
from lowtide.ops.layers import float8
from lowtide.ops.layers.float8 import RowScaled, in_rows


class Adapter(NamedTuple):
    """A low-rank adapter of a linear layer."""

    first: Float[Tensor, "rank inputs"]
    second: Float[Tensor, "outputs rank"]
    scale: float
    """By which its product is multiplied."""
    drop: Callable[[Tensor], Tensor] | None = None
    """Dropout of its input, differentiable; None where there is none."""


class Projection(NamedTuple):
    """A linear layer."""

    weight: Tensor
    """[outputs, inputs], or what it is stored as."""
    bias: Float[Tensor, " outputs"] | None = None
    adapter: Adapter | None = None
    dense: Callable[[torch.dtype], Tensor] | None = None
    """Makes a quantized weight whole, in a dtype, [outputs, inputs]; None: the weight is whole."""
    float8: Callable[[], RowScaled] | None = None
    """Gives the weight in 8 bits, where products are taken in these; None where they are not."""

    def trained(self) -> list[Tensor]:
        """The parameters that a gradient is wanted of."""
        adapted = () if self.adapter is None else self.adapter[:2]
        return [each for each in (self.weight, self.bias, *adapted) if each is not None and each.requires_grad]


class Together:
    """Linear layers that read one input, and what of them stays from pass to pass.

    Attributes:
        parts: the layers.
        adapters: of those that have one, in their order; their ranks are one beside the other.
        places: by the number of a layer, which of the adapters is its own.
        columns: of each adapter, among the ranks.
        drops: whether an adapter drops some of its input.
    """

    def __init__(self, parts: Sequence[Projection]) -> None:
        self.parts = parts
        numbers = [number for number, part in enumerate(parts) if part.adapter is not None]
        self.adapters = [part.adapter for part in parts if part.adapter is not None]
        self.places = {number: place for place, number in enumerate(numbers)}
        self.ranks = [each.first.shape[0] for each in self.adapters]
        stops = [0, *accumulate(self.ranks)]
        self.columns = [slice(*each) for each in pairwise(stops)]
        self.drops = any(each.drop is not None for each in self.adapters)
        matrices = [*(each.first for each in self.adapters), *(each.second for each in self.adapters)]
        self.shapes = [each.shape for each in matrices]
        self.sizes = [each.numel() for each in matrices]
        self.dtypes = {each.dtype for each in matrices}

    def trained(self) -> list[Tensor]:
        """The parameters that a gradient is wanted of."""
        return [each for part in self.parts for each in part.trained()]


class _Copies(NamedTuple):
    """Adapters in the dtype of the products."""

    first: Float[Tensor, "ranks inputs"]
    """All first matrices, one under the other."""
    second: Sequence[Tensor]
    """[outputs, rank] of each."""


class Projections:
    """Linear layers of one input in one pass through them.

    The order of calls in a forward is `reduce`, then `product` for each layer; in a backward `reduce` (with what is
    there from a forward, again), `input_gradient`, `weight_gradients`. Where an adapter has no dropout, the input may
    come after `input_gradient`.

    Args:
        parts: the layers; as `Together`, where they are passed through more than once.
        dtype: of all products.
        again: whether weights that are cast or dequantized for a product are kept for that of `input_gradient`.

    Attributes:
        found: by the `id` of a parameter, its gradient.
    """

    def __init__(self, parts: Sequence[Projection] | Together, dtype: torch.dtype, *, again: bool = False) -> None:
        self.layers = parts if isinstance(parts, Together) else Together(parts)
        self.parts, self.dtype, self.again = self.layers.parts, dtype, again
        self.found: dict[int, Tensor] = {}
        self.drops = self.layers.drops
        self._copies: _Copies | None = None
        self._weights: dict[int, Any] = {}
        self._rows: tuple[Tensor, RowScaled] | None = None
        self._reduced: Sequence[Tensor] = ()
        self._dropped: list[tuple[Tensor, Tensor]] = []
        self._slopes: Tensor | None = None

    # -- forward --------------------------------------------------------------------------------------------------

    def reduce(self, x: Float[Tensor, "tokens inputs"]) -> None:
        """The products with the adapters' first matrices, of the input after dropout."""
        layers = self.layers
        if not layers.adapters:
            return
        first = self._adapters().first
        if not layers.drops:
            self._reduced = torch.split_with_sizes(x @ first.t(), layers.ranks, 1)
            return
        self._dropped = [_dropped(x, adapter) for adapter in layers.adapters]
        self._reduced = [
            (x if kept is leaf else kept.detach()) @ first[own].t()
            for (leaf, kept), own in zip(self._dropped, layers.columns, strict=True)
        ]

    def product(
        self, x: Float[Tensor, "tokens inputs"], number: int, onto: Tensor | None = None, factor: float = 1.0
    ) -> Float[Tensor, "tokens outputs"]:
        """What one of the layers gives.

        Args:
            number: which.
            onto: is added to the result; stays as it is.
            factor: multiplies what is added to it.
        """
        part, weight = self.parts[number], self._weight(number)
        if isinstance(weight, RowScaled):
            return self._in_float8(x, number, weight, onto, factor)
        bias = None if part.bias is None else _in(part.bias, self.dtype)
        plain = part.adapter is None and (onto is None or factor == 1)
        if plain and (found := few_rows.product(x, weight, bias, onto)) is not None:
            return found
        start = onto
        if bias is not None:
            start = bias if onto is None else torch.add(onto, bias, alpha=factor)
        if part.adapter is None:
            return x @ weight.t() if start is None else torch.addmm(start, x, weight.t(), alpha=factor)
        place = self.layers.places[number]
        reduced, second = self._reduced[place], self._adapters().second[place]
        scale = factor * part.adapter.scale
        if start is None:
            out = _scaled(reduced, second.t(), scale)
        else:
            out = torch.addmm(start, reduced, second.t(), alpha=scale)
        return out.addmm_(x, weight.t(), alpha=factor)

    def _in_float8(
        self, x: Tensor, number: int, weight: RowScaled, onto: Tensor | None, factor: float
    ) -> Float[Tensor, "tokens outputs"]:
        """As `product`, whose input is put into 8 bits once for all layers. Such a product adds to nothing."""
        part = self.parts[number]
        rows = self._rows[1] if self._rows is not None and self._rows[0] is x else in_rows(x)
        self._rows = None if number == len(self.parts) - 1 else (x, rows)
        out = float8.product(rows, weight, self.dtype)
        if part.adapter is not None:
            place = self.layers.places[number]
            out.addmm_(self._reduced[place], self._adapters().second[place].t(), alpha=part.adapter.scale)
        if part.bias is not None:
            out.add_(_in(part.bias, self.dtype))
        return out if onto is None else torch.add(onto, out, alpha=factor, out=out)

    # -- backward -------------------------------------------------------------------------------------------------

    def input_gradient(self, grads: Sequence[Tensor]) -> Float[Tensor, "tokens inputs"]:
        """The gradient at the input, of those at the outputs, [tokens, outputs] in the dtype of the products."""
        found: Tensor | None = None
        if self.layers.adapters:
            slopes, first = self._of_ranks(grads), self._adapters().first
            if not self.drops:
                found = slopes @ first
            else:
                for (leaf, kept), own in zip(self._dropped, self.layers.columns, strict=True):
                    back = slopes[:, own] @ first[own]
                    (part,) = (back,) if kept is leaf else torch.autograd.grad(kept, leaf, back)
                    found = part if found is None else found.add_(part)
        for number, grad in enumerate(grads):
            weight = self._weight(number)
            if isinstance(weight, RowScaled):
                back = float8.input_gradient(grad, weight)
                found = back if found is None else found.add_(back)
            else:
                found = grad @ weight if found is None else found.addmm_(grad, weight)
            self._weights.pop(number, None)
            del weight
        assert found is not None
        return found

    def weight_gradients(self, x: Float[Tensor, "tokens inputs"], grads: Sequence[Tensor]) -> None:
        """Puts the gradients of all trained parameters into `found`."""
        for part, grad in zip(self.parts, grads, strict=True):
            if part.weight.requires_grad:
                self.found[id(part.weight)] = (grad.t() @ x).to(part.weight.dtype)
            if part.bias is not None and part.bias.requires_grad:
                wide = torch.promote_types(grad.dtype, torch.float32)
                self.found[id(part.bias)] = grad.sum(0, dtype=wide).to(part.bias.dtype)
        layers = self.layers
        if not any(each.requires_grad for adapter in layers.adapters for each in adapter[:2]):
            return
        slopes = self._of_ranks(grads)
        into: list[Tensor] = []
        if not layers.drops and all(adapter.first.requires_grad for adapter in layers.adapters):
            into += torch.split_with_sizes(slopes.t() @ x, layers.ranks)
        else:
            for place, (adapter, own) in enumerate(zip(layers.adapters, layers.columns, strict=True)):
                if adapter.first.requires_grad:
                    kept = self._dropped[place][1].detach() if layers.drops else x
                    into.append(slopes[:, own].t() @ kept)
        targets = [adapter.first for adapter in layers.adapters if adapter.first.requires_grad]
        for number, place in layers.places.items():
            adapter = layers.adapters[place]
            if adapter.second.requires_grad:
                into.append(_scaled(grads[number].t(), self._reduced[place], adapter.scale))
                targets.append(adapter.second)
        self.found |= {id(target): each for target, each in zip(targets, _as(targets, into), strict=True)}

    def _of_ranks(self, grads: Sequence[Tensor]) -> Float[Tensor, "tokens ranks"]:
        """The gradients at the products with the first matrices, side by side."""
        if self._slopes is None:
            layers, second = self.layers, self._adapters().second
            if len(layers.parts) == len(layers.ranks) == 1:
                self._slopes = _scaled(grads[0], second[0], layers.adapters[0].scale)
                return self._slopes
            self._slopes = grads[0].new_empty(grads[0].shape[0], sum(layers.ranks))
            parts = torch.split_with_sizes(self._slopes, layers.ranks, 1)
            for number, place in layers.places.items():
                part, scale = parts[place], layers.adapters[place].scale
                torch.addmm(part, grads[number], second[place], beta=0, alpha=scale, out=part)
        return self._slopes

    # -- weights --------------------------------------------------------------------------------------------------

    def _weight(self, number: int) -> Tensor | RowScaled:
        """[outputs, inputs] in the dtype of the products, or in 8 bits."""
        if number in self._weights:
            return self._weights[number]
        part = self.parts[number]
        if part.float8 is not None:
            made = part.float8()
        else:
            made = _in(part.weight, self.dtype) if part.dense is None else part.dense(self.dtype)
        if self.again:
            self._weights[number] = made
        return made

    def _adapters(self) -> _Copies:
        if self._copies is None:
            layers = self.layers
            first = [each.first for each in layers.adapters]
            second = [each.second for each in layers.adapters]
            if layers.dtypes == {self.dtype}:
                self._copies = _Copies(first[0] if len(first) == 1 else torch.cat(first), second)
            else:
                self._copies = self._copied(first + second)
        return self._copies

    def _copied(self, sources: list[Tensor]) -> _Copies:
        """Copies in the dtype of the products, side by side in memory and made at once."""
        layers, count = self.layers, len(self.layers.adapters)
        flat = sources[0].new_empty(sum(layers.sizes), dtype=self.dtype)
        parts = torch.split_with_sizes(flat, layers.sizes)
        copies = [part.view(shape) for part, shape in zip(parts, layers.shapes, strict=True)]
        copy_each(copies, sources)
        ranks, width = sum(layers.ranks), layers.shapes[0][1]
        return _Copies(flat[: ranks * width].view(ranks, width), copies[count:])


def _in(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x if x.dtype == dtype else x.to(dtype)


def _as(parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> Sequence[Tensor]:
    """Gradients in their parameters' dtype, all cast at once."""
    if all(p.dtype == each.dtype for p, each in zip(parameters, gradients, strict=True)):
        return gradients
    cast = [torch.empty_like(p) for p in parameters]
    copy_each(cast, gradients)
    return cast


def _scaled(one: Tensor, other: Tensor, scale: float) -> Tensor:
    """A product of two matrices times a number, in one pass."""
    if scale == 1:
        return one @ other
    out = one.new_empty(one.shape[0], other.shape[1])
    return torch.addmm(out, one, other, beta=0, alpha=scale, out=out)


def _dropped(x: Tensor, adapter: Adapter) -> tuple[Tensor, Tensor]:
    """A leaf that stands for the input, and what dropout makes of it, in the input's dtype; the leaf itself where
    nothing is dropped. Dropout scales in float32, as PEFT's adapters do."""
    leaf = x.detach()
    if adapter.drop is None:
        return leaf, leaf
    leaf.requires_grad_()
    with torch.enable_grad():
        wide: Any = leaf.to(torch.promote_types(x.dtype, torch.float32))
        return leaf, adapter.drop(wide).to(x.dtype)
