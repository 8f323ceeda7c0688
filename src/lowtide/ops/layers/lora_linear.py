"""Linear layers that read one input, with low-rank adapters or without, forward and backward, without autograd.

What a decoder layer's own backward (`ops.layers.decoder_layer`) is made of. A LoRA layer (arXiv 2106.09685) gives
`x W' + s (x A') B'`. As PEFT computes it, that is two small products, a scale and an addition over the whole output.
Here the small product comes first and the large one adds to it in its own epilogue (`addmm`), which has the scale too;
the first matrices of layers that read one input are one matrix; and the gradients at that input meet in one buffer.

Products are of one dtype, to which weights and adapters are cast for a pass. A gradient has its parameter's dtype.

Shapes: `inputs` and `outputs` are those of a layer, `rank` its adapter's; a product's rows are tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from lowtide.compat.torch import copy_each


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

    def trained(self) -> list[Tensor]:
        """The parameters that a gradient is wanted of."""
        adapted = () if self.adapter is None else self.adapter[:2]
        return [each for each in (self.weight, self.bias, *adapted) if each is not None and each.requires_grad]


@dataclass
class _Copies:
    """Adapters in the dtype of the products."""

    first: Float[Tensor, "ranks inputs"]
    """All first matrices, one under the other."""
    second: list[Tensor]
    """[outputs, rank] of each."""
    columns: list[slice]
    """Of each, among the ranks."""


class Projections:
    """Linear layers of one input in one pass through them.

    The order of calls in a forward is `reduce`, then `product` for each layer; in a backward `reduce` (with what is
    there from a forward, again), `input_gradient`, `weight_gradients`. Where an adapter has no dropout, the input may
    come after `input_gradient`.

    Args:
        parts: the layers.
        dtype: of all products.
        again: whether weights that are cast or dequantized for a product are kept for that of `input_gradient`.

    Attributes:
        found: by the `id` of a parameter, its gradient.
    """

    def __init__(self, parts: Sequence[Projection], dtype: torch.dtype, *, again: bool = False) -> None:
        self.parts, self.dtype, self.again = parts, dtype, again
        self.found: dict[int, Tensor] = {}
        self.drops = any(part.adapter is not None and part.adapter.drop is not None for part in parts)
        self._adapted = [(number, part.adapter) for number, part in enumerate(parts) if part.adapter is not None]
        self._copies: _Copies | None = None
        self._weights: dict[int, Tensor] = {}
        self._reduced: dict[int, Tensor] = {}
        self._dropped: dict[int, tuple[Tensor, Tensor]] = {}
        self._slopes: Tensor | None = None

    # -- forward --------------------------------------------------------------------------------------------------

    def reduce(self, x: Float[Tensor, "tokens inputs"]) -> None:
        """The products with the adapters' first matrices, of the input after dropout."""
        if not self._adapted:
            return
        copies = self._adapters()
        if not self.drops:
            together = x @ copies.first.t()
            self._reduced = {
                number: together[:, own] for (number, _), own in zip(self._adapted, copies.columns, strict=True)
            }
            return
        for (number, adapter), own in zip(self._adapted, copies.columns, strict=True):
            self._dropped[number] = leaf, kept = _dropped(x, adapter)
            self._reduced[number] = (x if kept is leaf else kept.detach()) @ copies.first[own].t()

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
        start = onto
        if part.bias is not None:
            bias = part.bias.to(self.dtype)
            start = bias if onto is None else torch.add(onto, bias, alpha=factor)
        if part.adapter is None:
            return x @ weight.t() if start is None else torch.addmm(start, x, weight.t(), alpha=factor)
        reduced, second = self._reduced[number], self._second(number)
        scale = factor * part.adapter.scale
        if start is None:
            out = _scaled(reduced, second.t(), scale)
        else:
            out = torch.addmm(start, reduced, second.t(), alpha=scale)
        return out.addmm_(x, weight.t(), alpha=factor)

    # -- backward -------------------------------------------------------------------------------------------------

    def input_gradient(self, grads: Sequence[Tensor]) -> Float[Tensor, "tokens inputs"]:
        """The gradient at the input, of those at the outputs, [tokens, outputs] in the dtype of the products."""
        found: Tensor | None = None
        if self._adapted:
            slopes, first = self._of_ranks(grads), self._adapters().first
            if not self.drops:
                found = slopes @ first
            else:
                for (number, _), own in zip(self._adapted, self._adapters().columns, strict=True):
                    leaf, kept = self._dropped[number]
                    back = slopes[:, own] @ first[own]
                    (part,) = (back,) if kept is leaf else torch.autograd.grad(kept, leaf, back)
                    found = part if found is None else found.add_(part)
        for number, grad in enumerate(grads):
            weight = self._weight(number)
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
        if not any(each.requires_grad for _, adapter in self._adapted for each in adapter[:2]):
            return
        copies, slopes = self._adapters(), self._of_ranks(grads)
        into: list[Tensor] = []
        if not self.drops and all(adapter.first.requires_grad for _, adapter in self._adapted):
            into += (slopes.t() @ x).split([own.stop - own.start for own in copies.columns])
        else:
            for (number, adapter), own in zip(self._adapted, copies.columns, strict=True):
                if adapter.first.requires_grad:
                    kept = x if number not in self._dropped else self._dropped[number][1].detach()
                    into.append(slopes[:, own].t() @ kept)
        targets = [adapter.first for _, adapter in self._adapted if adapter.first.requires_grad]
        for number, adapter in self._adapted:
            if adapter.second.requires_grad:
                into.append(_scaled(grads[number].t(), self._reduced[number], adapter.scale))
                targets.append(adapter.second)
        self.found |= {id(target): each for target, each in zip(targets, _as(targets, into), strict=True)}

    def _of_ranks(self, grads: Sequence[Tensor]) -> Float[Tensor, "tokens ranks"]:
        """The gradients at the products with the first matrices, side by side."""
        if self._slopes is None:
            columns = self._adapters().columns
            slopes = grads[0].new_empty(grads[0].shape[0], columns[-1].stop)
            for (number, adapter), own in zip(self._adapted, columns, strict=True):
                part = slopes[:, own]
                torch.addmm(part, grads[number], self._second(number), beta=0, alpha=adapter.scale, out=part)
            self._slopes = slopes
        return self._slopes

    # -- weights --------------------------------------------------------------------------------------------------

    def _weight(self, number: int) -> Tensor:
        """[outputs, inputs] in the dtype of the products."""
        if number in self._weights:
            return self._weights[number]
        part = self.parts[number]
        made = part.weight.detach().to(self.dtype) if part.dense is None else part.dense(self.dtype)
        if self.again:
            self._weights[number] = made
        return made

    def _second(self, number: int) -> Tensor:
        place = next(place for place, (each, _) in enumerate(self._adapted) if each == number)
        return self._adapters().second[place]

    def _adapters(self) -> _Copies:
        if self._copies is None:
            adapters = [adapter for _, adapter in self._adapted]
            stops = [0]
            for each in adapters:
                stops.append(stops[-1] + each.first.shape[0])
            first = [each.first.detach() for each in adapters]
            second = [each.second.detach() for each in adapters]
            if len(adapters) > 1 or first[0].dtype != self.dtype:
                first, second = _copied(first, second, self.dtype)
            self._copies = _Copies(first[0], second, [slice(*each) for each in pairwise(stops)])
        return self._copies


def _copied(first: Sequence[Tensor], second: Sequence[Tensor], dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """Copies in a dtype, side by side in memory and made at once; the first matrices as one."""
    sources = [*first, *second]
    flat = first[0].new_empty(sum(each.numel() for each in sources), dtype=dtype)
    copies = [
        part.view(each.shape)
        for part, each in zip(flat.split([each.numel() for each in sources]), sources, strict=True)
    ]
    copy_each(copies, sources)
    ranks, width = sum(each.shape[0] for each in first), first[0].shape[1]
    return [flat[: ranks * width].view(ranks, width)], copies[len(first) :]


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
