"""A copy of a model's weights to write by: while completions are written, plain linear layers stand in for its own,
and experts with dense stacks for experts.

A decode step reads every weight for a few rows, so that whatever is done to a weight before its product costs more than
the product: a master in float32 is cast to 16 bits, a quantized weight is made dense, an adapter adds two products and
a sum. Done once, before the first token, each of these leaves one plain product with a dense weight in the dtype of
products. A weight that is float32 on a CPU has a copy that is laid out for few rows (`ops.few_rows`). The copy is made
as writing begins and is gone when it ends, before the update.

Casts and dense weights change no product. A merged adapter changes rounding: in float32 as another order of a sum does,
in 16 bits by more than a young adapter adds to a weight. vLLM and verl (`lora.merge`) write by such weights.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lowtide.compat.peft import PlainLora, has_adapters, is_trained_beside, plain_lora, stack_loras
from lowtide.compat.torch import children_of, has_module_hooks
from lowtide.compat.transformers import has_stacks, run_in_groups, stack_names
from lowtide.engine.forward import COMPUTED_IN, causal_model, embedding_weight, model_beside
from lowtide.engine.layers.experts import experts_by
from lowtide.engine.layers.linear import install_linear, is_as_torch_has_it
from lowtide.engine.weights.quantized import (
    dense_twin,
    dense_weight,
    is_quantized,
    multiplied_weight,
    product_dtype,
)
from lowtide.ops import few_rows
from lowtide.ops.layers import float8
from lowtide.ops.layers.stacks import added, stored_stacks


class StandIn(NamedTuple):
    """A layer of a copy: a linear one, or experts."""

    owner: nn.Module
    """The module that it is a child of."""
    weights: Sequence[Tensor]
    """Those of the copy alone."""


@dataclass(frozen=True)
class GenerationCopy:
    """Which weights of a model are copied to write by.

    Args:
        merges: adapters are merged in 16 bits too; otherwise where products are in float32 or float64 alone.
    """

    merges: bool = False

    def bytes_of(self, model: nn.Module, part: nn.Module | None = None) -> int:
        """What the copy of a model, or of a part of it, takes; 0 where there is nothing to copy."""
        return sum(place.bytes for place in self._places(model, part))

    @contextlib.contextmanager
    def standing_in(self, model: nn.Module) -> Iterator[list[StandIn]]:
        """While it lasts, a model runs by the copy, without gradients.

        Args:
            model: prepared by `engine.forward.install`, wrapped or not, with whole weights on its device. Adapters
                that are off stay off.
        """
        with contextlib.ExitStack() as undo:
            yield [StandIn(place.owner, undo.enter_context(place.taken())) for place in list(self._places(model))]

    def _places(self, model: nn.Module, part: nn.Module | None = None) -> Iterator[_Place | _LaidOut]:
        inner: Any = causal_model(model)
        computed_in, stored = vars(inner).get(COMPUTED_IN), embedding_weight(model).dtype
        frozen = {p.dtype for p in inner.parameters() if p.is_floating_point() and not p.requires_grad}
        head, beside = inner.get_output_embeddings(), model_beside(inner)
        products = _Products(self.merges, computed_in, stored, frozen <= {stored}, head, beside)
        laid_out: set[Tensor] = set()  # of layers that share one
        for place in products.places(inner if part is None else part):
            if isinstance(place, _LaidOut):
                if place.weight in laid_out:
                    continue
                laid_out.add(place.weight)
            yield place


class _Place(NamedTuple):
    """A module in whose place another may stand: a plain linear layer, or experts by other stacks."""

    owner: nn.Module
    name: str
    bytes: int
    """Of the weights that the module which stands there has of its own."""
    make: Callable[[], nn.Module]
    weights: Sequence[str] = ("weight",)
    """Their names."""

    @contextlib.contextmanager
    def taken(self) -> Iterator[Sequence[Tensor]]:
        """While it lasts the other stands there, whose own weights are given."""
        children = children_of(self.owner)
        before = children[self.name]
        with torch.no_grad():
            layer = self.make().train(self.owner.training)
        weights = [getattr(layer, name) for name in self.weights]
        children[self.name] = layer
        try:
            yield weights
        finally:
            children[self.name] = before
            for weight in weights:
                weight.data = weight.data.new_empty(0)  # a fused layer remembers the weights that it last ran by


class _LaidOut(NamedTuple):
    """A linear layer whose weight has another layout beside."""

    owner: nn.Module
    weight: Tensor

    @property
    def bytes(self) -> int:
        """Of the layout."""
        return _size(self.weight.shape, self.weight.dtype)

    @contextlib.contextmanager
    def taken(self) -> Iterator[Sequence[Tensor]]:
        """While it lasts, products of few rows are taken by the layout, which is given."""
        with few_rows.beside(self.weight) as laid_out:
            yield [laid_out]


class _Products(NamedTuple):
    """How a model takes its products, by which it is told where a plain layer gives the same."""

    merges: bool
    computed_in: torch.dtype | None
    """What autocast takes them in."""
    stored: torch.dtype
    """Of the embedding."""
    alike: bool
    """Whether all frozen weights that are not quantized have this dtype, and so what passes from layer to layer."""
    head: nn.Module | None
    beside: nn.Module | None
    """A model that is trained with it, and does not write."""

    def places(self, owner: nn.Module) -> Iterator[_Place | _LaidOut]:
        for name, child in owner.named_children():
            if child is self.beside or is_trained_beside(child):
                continue  # the latter is a whole head or embedding, or some rows of it
            if has_stacks(experts := _inmost(child)):
                yield from self._of_experts(owner, name, child, experts)
            elif has_adapters(child):
                yield from self._of_adapted(owner, name, child)
            elif isinstance(child, nn.Linear):
                yield from self._of_linear(owner, name, child)
            else:
                yield from self.places(child)

    def _of_adapted(self, owner: nn.Module, name: str, layer: Any) -> Iterator[_Place | _LaidOut]:
        """Of a layer with adapters: itself with what is merged into it, or what it is made of."""
        base, lora = layer.base_layer, plain_lora(layer)
        if not isinstance(base, nn.Linear) or isinstance(lora, str) or any(map(has_module_hooks, (layer, base))):
            return
        if lora is None:
            if layer.disable_adapters or not layer.active_adapters:
                yield from self._of_linear(layer, "base_layer", base, is_head=layer is self.head)
            return
        dtype = self._dtype_of(base)
        if self._is_known(base) and (self.merges or dtype.itemsize >= 4):
            is_head = layer is self.head
            yield _Place(owner, name, _bytes(base, dtype), lambda: self._merged(base, lora, dtype, is_head=is_head))
            return
        yield from self._of_linear(layer, "base_layer", base, is_head=layer is self.head)
        for matrices in (layer.lora_A, layer.lora_B):
            for adapter in layer.active_adapters:
                if adapter in matrices:
                    yield from self._of_linear(matrices, adapter, matrices[adapter])

    def _of_experts(self, owner: nn.Module, name: str, layer: nn.Module, experts: nn.Module) -> Iterator[_Place]:
        """Of routed experts: the stacks that are quantized, dense, and with adapters merged where they may be."""
        stored, loras = stored_stacks(experts), stack_loras(layer)
        if loras is None or has_module_hooks(experts) or (stored and not self.alike and self.computed_in is None):
            return
        plain: dict[str, Tensor] = {each: getattr(experts, each) for each in stack_names(experts) if each not in stored}
        dtypes = dict.fromkeys(stored, self.computed_in or self.stored) | {n: w.dtype for n, w in plain.items()}
        wide = all((self.computed_in or dtype).itemsize >= 4 for dtype in dtypes.values())
        merged = loras if run_in_groups(experts) and (self.merges or wide) else {}
        names = [*stored, *(each for each in plain if each in merged)]
        if not names:
            return

        def stack(each: str) -> Tensor:
            dtype = dtypes[each]
            if each not in merged:
                return stored[each].dense(dtype)
            dense = plain[each] if each in plain else stored[each].dense(torch.promote_types(dtype, torch.float32))
            return added(dense, *merged[each], dtype)

        if loras and not merged:  # adapters stay around them
            owner, name = _around(layer, experts), "base_layer"
        size = sum(_size((stored | plain)[each].shape, dtypes[each]) for each in names)
        yield _Place(owner, name, size, lambda: experts_by(experts, {each: stack(each) for each in names}), names)

    def _of_linear(
        self, owner: nn.Module, name: str, layer: nn.Linear, is_head: bool = False
    ) -> Iterator[_Place | _LaidOut]:
        if not self._is_known(layer):
            return
        dtype = self._dtype_of(layer)
        if dtype == layer.weight.dtype and not is_quantized(layer.weight):
            if few_rows.is_laid_out_for(layer.weight):
                yield _LaidOut(owner, layer.weight)
            return
        is_head = is_head or layer is self.head
        yield _Place(owner, name, _bytes(layer, dtype), lambda: self._copied(layer, dtype, is_head=is_head))

    def _dtype_of(self, layer: nn.Linear) -> torch.dtype:
        """In which a layer takes its product."""
        if is_quantized(layer.weight):
            return product_dtype(layer, self.computed_in, self.stored)
        if self.computed_in is None or layer.weight.dtype == torch.float64:  # which autocast leaves alone
            return layer.weight.dtype
        return self.computed_in

    def _is_known(self, layer: nn.Linear) -> bool:
        """Whether a layer computes what a plain one would by its dense weight."""
        if has_module_hooks(layer):
            return False
        if not is_quantized(layer.weight):
            return is_as_torch_has_it(layer)
        if float8.stored(layer) is not None and float8.multiplies_on(layer.weight):
            return False  # codes are multiplied as they are
        return self.alike or self.computed_in is not None or getattr(layer, "compute_dtype", None) is not None

    def _copied(self, layer: nn.Linear, dtype: torch.dtype, *, is_head: bool) -> nn.Linear:
        quantized = is_quantized(layer.weight)
        weight = multiplied_weight(layer, dtype) if quantized else layer.weight.detach().to(dtype)
        return _stand_in(layer, weight, is_head=is_head)

    def _merged(self, layer: nn.Linear, lora: PlainLora, dtype: torch.dtype, *, is_head: bool) -> nn.Linear:
        wide = torch.promote_types(dtype, torch.float32)
        weight = dense_weight(layer, wide) if is_quantized(layer.weight) else layer.weight.to(wide)
        merged = torch.addmm(weight, lora.second.to(wide), lora.first.to(wide), alpha=lora.scale)
        return _stand_in(layer, merged.to(dtype), is_head=is_head)


def _inmost(module: Any) -> nn.Module:
    """A module without the adapters around it, which of experts stand each inside the next."""
    return module.get_base_layer() if has_adapters(module) else module


def _around(layer: nn.Module, inside: nn.Module) -> nn.Module:
    """The innermost of the layers around a module."""
    return next(each for each in layer.modules() if children_of(each).get("base_layer") is inside)


def _size(shape: torch.Size, dtype: torch.dtype) -> int:
    return shape.numel() * dtype.itemsize


def _bytes(layer: nn.Linear, dtype: torch.dtype) -> int:
    return _size(torch.Size((layer.out_features, layer.in_features)), dtype)


def _stand_in(layer: nn.Linear, weight: Tensor, *, is_head: bool) -> nn.Linear:
    """A layer that computes with another weight what one does with its own."""
    if is_quantized(layer.weight):
        return dense_twin(layer, weight)
    made = nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")
    made.weight = nn.Parameter(weight, requires_grad=False)
    # a head adds its bias to logits, past autocast
    bias = layer.bias if layer.bias is None or is_head else layer.bias.to(weight.dtype)
    made.register_parameter("bias", None if bias is None else nn.Parameter(bias.detach(), requires_grad=False))
    install_linear(made)
    return made
