"""How long a step takes: the operations of a trace, each bound by what it computes or by what it moves.

The roofline model (Williams, Waterman and Patterson, 2009): an operation takes as long as its floating-point operations
at the device's rate, or its bytes at the bandwidth of its memory, whichever is longer. What is known beside that is in
the constants below, and some of it is assumed; the numbers are for comparing settings, and for an order of magnitude.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry, register_flop_formula

from lowtide.compat.torch import (
    GROUPED_PRODUCT,
    argument_names,
    changed_arguments,
    changes_arguments,
    packet_of,
    storage_id,
)
from lowtide.ops.layers.adapted_experts import BACKWARD, FORWARD
from lowtide.ops.layers.float8 import FORMAT
from lowtide.planner.devices import Device

PRODUCT_EFFICIENCY = 0.7
"""Share of a data sheet's rate that large matrix products reach (650 to 700 of 989 TFLOPS on an H100)."""
ATTENTION_EFFICIENCY = 0.5
"""Share that fused attention reaches: FlashAttention-2 up to 0.73 forward and 0.63 backward on an A100 (arXiv
2307.08691), 0.35 on an H100 (arXiv 2407.08608). Assumed for CPUs."""
BANDWIDTH_EFFICIENCY = 0.85
"""Share of a data sheet's bandwidth that streaming kernels reach; assumed."""
LINK_EFFICIENCY = 0.8
"""Share of a data sheet's rate that collectives reach between devices; assumed."""
KERNEL_SECONDS = {"cuda": 2e-6, "cpu": 0.0}
"""Before a kernel does anything, and after it; assumed."""
VIEW_SHARE = 0.3
"""Of what Python, autograd and the dispatcher take for an operation, what they take for a view, or for memory that is
only taken. With it one rate fits layers of transformers and PEFT and fused ones, with adapters and without, within a
tenth (CPU seconds of `bench.layer_cost --host`)."""

DTYPES = {getattr(torch, name): name for name in ("float32", "bfloat16", "float16")}
"""Those that devices have rates for; the others run at that of float32."""

EIGHT_BITS = 2
"""Products in 8 bits a second for each in 16 that data sheets promise (Ada, Hopper, Blackwell)."""

aten = torch.ops.aten


class Operation(NamedTuple):
    """What an operation costs; the same for all layers, so that a trace has few different ones."""

    flops: int
    bytes: int
    """Read and written."""
    dtype: torch.dtype
    """Of what it computes with."""
    attention: bool = False
    sent: int = 0
    """Bytes that it sends to ranks which wait for them."""
    view: bool = False
    """Whether it starts no kernel: the host alone has to do with it."""


VIEW = Operation(0, 0, torch.float32, view=True)


@dataclass
class OperationCosts:
    """The operations of a trace. Called for each, as it was dispatched; fake tensors will do.

    Attributes:
        by_layer: how often each was seen, by the layer of the model that it was seen in; None outside of layers.
        layer: the one that runs now, set by whoever runs the code.
        layer_of: the layer that a tensor is of. It tells where an operation outside of layers belongs: an optimizer
            steps the weights of all of them.
        host_bytes: bytes that go to or come from host memory meanwhile (offloading); whoever moves them adds them.
        times: how many operations one stands for, set by whoever runs a part of them.
    """

    by_layer: dict[int | None, Counter[Operation]] = field(default_factory=lambda: defaultdict(Counter))
    layer: int | None = None
    layer_of: Callable[[Tensor], int | None] = lambda _tensor: None
    host_bytes: float = 0.0
    times: int = 1

    def __call__(self, func: Any, args: Sequence[Any], out: Any, kwargs: Any = None) -> None:
        """Counts an operation.

        Args:
            func: the operation, `torch.ops.aten.mm.default` say.
            args: what it was called with; keywords in `kwargs`.
            out: what it returned.
        """
        if func.namespace == "prim":
            return  # where a tensor is, which a trace alone asks
        cost = cost_of(func, args, out, kwargs or {}) or VIEW
        shares = [(self.layer, 1.0)] if self.layer is not None else self._shares(args)
        for layer, share in shares:
            part = cost._replace(flops=round(cost.flops * share), bytes=round(cost.bytes * share))
            self.by_layer[layer][part] += self.times

    def sends(self, size: int) -> None:
        """Counts bytes that the device sends to ranks which wait for them."""
        self.by_layer[self.layer][Operation(0, 0, torch.float32, sent=size)] += 1

    def _shares(self, args: Sequence[Any]) -> list[tuple[int | None, float]]:
        """By how much an operation is each layer's; one on lists of tensors is of several."""
        sizes: Counter[int | None] = Counter()
        for tensor in next((arg for arg in args if isinstance(arg, list | tuple) and arg), args[:1]):
            if isinstance(tensor, Tensor):
                sizes[self.layer_of(tensor)] += _size(tensor)
        total = sum(sizes.values())
        return [(layer, size / total) for layer, size in sizes.items()] if total else [(None, 1.0)]

    @property
    def dispatched(self) -> Counter[Operation]:
        """All that the host asks for, views too."""
        return sum(self.by_layer.values(), Counter())

    @property
    def operations(self) -> Counter[Operation]:
        """Those that start a kernel."""
        return Counter({each: count for each, count in self.dispatched.items() if not each.view})

    def unrolled(self, layers: int) -> OperationCosts:
        """The costs of a model with so many layers of the kind of the one in the middle."""
        seen = sorted(layer for layer in self.by_layer if layer is not None)
        whole = self.dispatched
        if seen and layers > len(seen):
            for cost, count in self.by_layer[seen[len(seen) // 2]].items():
                whole[cost] += count * (layers - len(seen))
        return OperationCosts({None: whole}, host_bytes=self.host_bytes)

    @property
    def sent_bytes(self) -> int:
        """All that is sent to ranks which wait for it."""
        return sum(each.sent * count for each, count in self.operations.items())

    @property
    def flops(self) -> float:
        """All floating-point operations."""
        return sum(each.flops * count for each, count in self.operations.items())

    def seconds(self, device: Device) -> float:
        """How long they take on a device, with transfers to the host beside the computation. What other ranks wait for
        is sent on top."""
        rates = device.rates
        product, bandwidth = (1.0, 1.0) if rates.measured else (PRODUCT_EFFICIENCY, BANDWIDTH_EFFICIENCY)
        found = self.dispatched
        views = sum(count for each, count in found.items() if each.view)
        started = sum(found.values()) - views
        busy = 0.0
        for each, count in found.items():
            share = ATTENTION_EFFICIENCY if each.attention else product
            rate = _rate(rates.flops, each.dtype) * share
            busy += count * max(each.flops / rate, each.bytes / (rates.memory_bandwidth * bandwidth))
        busy += started * KERNEL_SECONDS[device.kind]
        dispatched = (started + VIEW_SHARE * views) * rates.dispatch
        computed = busy + dispatched if device.kind == "cpu" else max(busy, dispatched)
        waited = self.sent_bytes / (rates.interconnect * (1.0 if rates.measured else LINK_EFFICIENCY))
        return max(computed + waited, self.host_bytes / rates.host_link)


def _rate(flops: Mapping[str, float], dtype: torch.dtype) -> float:
    """Floating-point operations a second of products in a dtype."""
    if dtype == FORMAT:
        return EIGHT_BITS * flops["bfloat16"]
    return flops.get(DTYPES.get(dtype, ""), flops["float32"])


# -- one operation ------------------------------------------------------------------------------------------------


def cost_of(func: Any, args: Sequence[Any], out: Any, kwargs: dict[str, Any]) -> Operation | None:
    """What one operation costs; None where nothing is computed or moved: views, and memory that is only taken."""
    if not computes(func, args, out, kwargs):
        return None
    name = func.name().partition(".")[0]
    inputs, outputs = _inputs(args, kwargs), list(_tensors((out,)))
    formula = ATTENTION.get(name)
    flops = formula(*args, **kwargs) if formula else _flops(func, args, out, kwargs)
    moved = _sparse_bytes(name, args, outputs) if name in SPARSE else _bytes(func, args, inputs, outputs)
    computes_with = next((each.dtype for each in inputs if each.dtype.is_floating_point), torch.float32)
    return Operation(flops, moved, computes_with, formula is not None)


def computes(func: Any, args: Sequence[Any], out: Any, kwargs: dict[str, Any]) -> bool:
    """Whether an operation starts a kernel: it is no view, no question about a tensor, and more than taking memory."""
    if func.name().partition(".")[0] in FREE or (func.is_view and _is_view(args, out)):
        return False
    known = {storage_id(tensor.untyped_storage()) for tensor in _inputs(args, kwargs)}
    return changes_arguments(func) or any(storage_id(each.untyped_storage()) not in known for each in _tensors((out,)))


def _inputs(args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    return [*_tensors(args), *_tensors(value for key, value in kwargs.items() if key != "out")]


def _is_view(args: Sequence[Any], out: Any) -> bool:
    first = args[0] if args else None
    if not (isinstance(first, Tensor) and isinstance(out, Tensor)):
        return False
    return storage_id(first.untyped_storage()) == storage_id(out.untyped_storage())


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _size(tensor: Tensor) -> int:
    """Bytes of a tensor; what is expanded is read once."""
    return min(tensor.numel() * tensor.itemsize, tensor.untyped_storage().nbytes())


def _bytes(func: Any, args: Sequence[Any], inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> int:
    """What is read and written."""
    written = outputs
    if not outputs:  # such as an optimizer's step, which changes its arguments and returns nothing
        written = list(_tensors(changed_arguments(func, args)))
    return sum(map(_size, inputs)) + sum(map(_size, written))


def _flops(func: Any, args: Sequence[Any], out: Any, kwargs: dict[str, Any]) -> int:
    if func is GROUPED_PRODUCT:
        return _grouped_product(*args[:2])
    formula = flop_registry.get(IN_PLACE.get(packet_of(func), packet_of(func)))
    if formula is None:
        return 0
    if kwargs or not all(isinstance(each, Tensor) for each in args):
        return int(formula(*args, **kwargs, out_val=out))
    key = (func, *(each.shape for each in args), out.shape if isinstance(out, Tensor) else None)
    if key not in _known_flops:
        _known_flops[key] = int(formula(*args, out_val=out))
    return _known_flops[key]


_known_flops: dict[Any, int] = {}
"""By an operation and the shapes of the tensors that are its arguments and its result."""


def _grouped_product(one: Tensor, other: Tensor) -> int:
    """Groups that lie end to end share the rows of a factor between them."""
    each = 2 * one.shape[-2] * one.shape[-1] * other.shape[-1]
    return each * one.shape[0] if one.dim() == other.dim() == 3 else each


@register_flop_formula(FORWARD)
def _adapted_experts(
    x: torch.Size, stack: Sequence[torch.Size], pairs: Sequence[torch.Size], *_: Any, **__: Any
) -> int:
    return 2 * pairs[0][0] * sum(each[1:].numel() for each in stack)


@register_flop_formula(BACKWARD)
def _adapted_experts_backward(grad: torch.Size, x: torch.Size, low: torch.Size, *given: Any, **_: Any) -> int:
    """The weights get no gradient, and their input and factors do."""
    (weight, first, second), (tokens, _) = given[:2]
    return 2 * tokens[0] * (weight[1:].numel() + 2 * first[1:].numel() + 2 * second[1:].numel())


IN_PLACE = {aten.addmm_: aten.addmm, aten.baddbmm_: aten.baddbmm}
"""Products that torch's table of formulas knows by another name."""
FREE = frozenset(
    f"aten::{name}" for name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach")
)
SPARSE = frozenset(
    f"aten::{name}"
    for name in (
        "embedding", "index_select", "index", "gather", "index_add_", "index_add", "index_put_", "_index_put_impl_",
        "index_copy_", "scatter_add_", "scatter_", "scatter", "embedding_dense_backward",
    )
)  # fmt: skip
"""Operations that touch a few rows of a large tensor."""


def _sparse_bytes(name: str, args: Sequence[Any], outputs: Sequence[Tensor]) -> int:
    """What is picked is read and written; what is put somewhere is read, and its place read and written."""
    if name == "aten::embedding_dense_backward":
        return _size(args[0]) + 2 * _size(outputs[0])  # dense, as its name says
    if name.endswith("_") or name == "aten::index_add":
        return 3 * max((_size(each) for each in _tensors(args[1:])), default=0)
    return 2 * sum(map(_size, outputs))


# -- attention: of all pairs of a query and a key, a causal kernel computes half, since it skips the blocks ahead ----

BACKWARD = 5, 2
"""The products of a backward, in place of those of a forward."""


def _dense_attention(name: str) -> Callable[..., int]:
    """For one of the kernels of `scaled_dot_product_attention`, by name, whose tensors are [n, heads, queries, dim].
    One that is not causal computes all pairs, those that a mask hides too."""
    names = argument_names(getattr(aten, name).default)
    first, causal = names.index("query"), names.index("is_causal")
    products, of = BACKWARD if name.endswith("_backward") else (1, 1)

    def flops(*args: Any, **kwargs: Any) -> int:
        query, key, value = args[first : first + 3]
        n, heads, queries, dim = query.shape
        skips = args[causal] if len(args) > causal else kwargs.get("is_causal", False)
        half = n * heads * queries * key.shape[2] * (dim + value.shape[3])
        return half * (1 if skips else 2) * products // of

    return flops


def _ragged_attention(query: Tensor, key: Tensor, value: Tensor, keys: int) -> int:
    """[tokens, heads, dim], as if each token's segment were among the longest, whose length is known."""
    return query.shape[0] * query.shape[1] * keys * (query.shape[2] + value.shape[2])


def _varlen(*args: Any, window: Sequence[int] | None = None, **_: Any) -> int:
    """Arguments as `torch.nn.attention.varlen`'s operation takes them: query, key, value, the starts of queries and of
    keys, the longest of each, whether it is causal, scale, window."""
    query, key, value, keys = *args[:3], args[6]
    window = args[9] if len(args) > 9 else window
    return _ragged_attention(query, key, value, _seen(keys, window))


def _used_keys(query: Tensor, key: Tensor, value: Tensor, starts: Tensor, *_: Any, **_options: Any) -> int:
    """Of stacks of one head (`ops.attention.cached_flash`), as if all of their keys were used."""
    return 2 * _ragged_attention(query, key, value, key.shape[0] // (starts.shape[0] - 1))


def _varlen_backward(*args: Any, window: Sequence[int] | None = None, **_: Any) -> int:
    """The gradient of the output before the arguments of `_varlen`, output and log-sum-exp behind the value."""
    query, key, value, keys = *args[1:4], args[9]
    window = args[13] if len(args) > 13 else window
    products, of = BACKWARD
    return _ragged_attention(query, key, value, _seen(keys, window)) * products // of


def _seen(keys: int, window: Sequence[int] | None) -> int:
    """Keys of which half are seen on average: twice as many as there are, where all are seen."""
    if window and window[0] < 0 and window[1] < 0:
        return 2 * keys
    return keys if not window or window[0] < 0 else min(keys, 2 * (window[0] + 1))


def _flex_backward(_grad: Tensor, query: Tensor, key: Tensor, value: Tensor, _out: Tensor, _lse: Tensor,
                   keys: int) -> int:  # fmt: skip
    products, of = BACKWARD
    return _ragged_attention(query, key, value, keys) * products // of


ATTENTION: dict[str, Callable[..., int]] = {
    "torch_attn::_varlen_attn": _varlen,
    "torch_attn::_varlen_attn_backward": _varlen_backward,
    "aten::_flash_attention_forward": _used_keys,
    "lowtide::flex_attention": _ragged_attention,
    "lowtide::flex_attention_backward": _flex_backward,
} | {
    f"aten::_scaled_dot_product_{kind}{way}": _dense_attention(f"_scaled_dot_product_{kind}{way}")
    for kind in ("flash_attention", "efficient_attention", "flash_attention_for_cpu")
    for way in ("", "_backward")
}
"""Floating-point operations of fused attention, by the operation's name."""
