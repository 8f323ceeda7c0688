"""What the project takes from the inside of torch, and what it replaces there.

The sections: tensors and storages, autograd, dispatch modes, fake tensors, operations, modules and optimizers, sharded
models, the compiler, processes and devices.
"""

from __future__ import annotations

import contextlib
import copy
import datetime
import gc
import os
import socket
import sys
import types
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed
import torch.nn.functional as F
from torch import Tensor, UntypedStorage, library, nn
from torch._C._autograd import _get_sequence_nr
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor.placement_types import _StridedShard
from torch.optim import Optimizer
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    is_traceable_wrapper_subclass,
    is_traceable_wrapper_subclass_type,
)
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_unflatten
from torch.utils.checkpoint import _allowed_determinism_checks_to_fns

__all__ = [
    "FakeTensor",
    "FakeTensorMode",
    "TorchDispatchMode",
    "TreeSpec",
    "is_traceable_wrapper_subclass",
    "is_traceable_wrapper_subclass_type",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_unflatten",
]
"""Names that are imported from here as torch has them: the modules that they come from are private."""

# -- tensors and storages -----------------------------------------------------------------------------------------


def parts_of(tensor: Any) -> Iterator[Tensor]:
    """The tensors that hold the bytes of one."""
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        if isinstance(part := getattr(tensor, name), Tensor):  # a DTensor has its mesh among them
            yield from parts_of(part)


def sent_parts(tensor: Tensor) -> Iterator[Tensor]:
    """The tensors that hold the bytes of one, each of a dtype that ranks can send to one another: a quantized weight
    may be of several."""
    for part in parts_of(tensor):
        yield part.view(torch.uint8) if part.element_size() == 1 else part


def storage_id(storage: UntypedStorage) -> int:
    """Tells a storage from every other one alive, those of fake tensors and of the meta device included.

    `data_ptr` is 0 or an error for storages without memory, and `id` is that of one of several Python objects.
    """
    return storage._cdata


def version_of(tensor: Tensor) -> int:
    """How often a tensor was written to. Autograd compares it too, but not where hooks take saved tensors over."""
    return tensor._version


def base_of(tensor: Tensor) -> Tensor:
    """The tensor that a view is of; the tensor itself if it is none. A view of a parameter is no `Parameter`."""
    return tensor if tensor._base is None else tensor._base


# -- autograd -----------------------------------------------------------------------------------------------------

BACKWARD = "_engine_run_backward"
"""The function of torch that runs the engine: frames beyond it are those of whoever called `backward`."""


def has_gradient_hooks(tensor: Tensor) -> bool:
    """Whether a leaf has a hook on its gradient or after its accumulation.

    Hooks on its `AccumulateGrad` node, which DistributedDataParallel registers, cannot be seen from Python.
    """
    after: Any = tensor._post_accumulate_grad_hooks
    return has_tensor_hooks(tensor) or bool(after)


def has_tensor_hooks(tensor: Tensor) -> bool:
    """Whether a tensor has a hook on its gradient, which sees it before it is accumulated."""
    return bool(tensor._backward_hooks)


def has_module_hooks(module: nn.Module) -> bool:
    """Whether a call of a module, or its backward, calls hooks of somebody; there is no public way to ask."""
    part: Any = module
    return any((part._forward_hooks, part._forward_pre_hooks, part._backward_hooks, part._backward_pre_hooks))


def is_in_backward() -> bool:
    """Whether autograd's engine runs in this thread, so that what an operation saves is wanted at once."""
    return torch._C._current_graph_task_id() != -1


def compare_recomputed_by(of: Callable[[Tensor], Any]) -> None:
    """From here on checkpoints compare what forward and recomputation save by what `of` tells of each tensor, in place
    of its shape, dtype and device."""
    _allowed_determinism_checks_to_fns["default"] = of


def backward_number() -> int:
    """Tells the backward that runs in this thread from every other one, those that it starts itself included."""
    return torch._C._current_graph_task_id()


def next_sequence_number() -> int:
    """The number that the next autograd node of this thread gets."""
    return _get_sequence_nr()


def backward_sequence_number() -> int | None:
    """The number of the node whose backward runs in this thread; None outside of one."""
    node = torch._C._current_autograd_node()
    return None if node is None else node._sequence_nr()


def seeing_changes_in_place() -> contextlib.AbstractContextManager:
    """Inside a dispatch mode: what is detached shares its version counter, so that a change in place shows later.

    A mode runs beneath the key that keeps these counters.
    """
    return torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False)


# -- dispatch modes -----------------------------------------------------------------------------------------------


class LayerMode(TorchDispatchMode):
    """A mode that sees the operations of a layer, around compiled graphs and higher-order operators too.

    Without the two, torch refuses to compile beneath a mode, and refuses flex attention within one.
    """

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True


class PlainMode(TorchDispatchMode):
    """A mode whose handler is not wrapped to hide it from the compiler, which costs more than most of its calls."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def without_modes() -> contextlib.AbstractContextManager:
    """While it lasts, tensors have values and no mode sees them, even inside of a trace."""
    return _disable_current_modes()


# -- fake tensors -------------------------------------------------------------------------------------------------

UNTRACEABLE = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
    NotImplementedError,
)
"""How an operation says that it has no shape without values."""


def place_of(tensor: Tensor) -> torch.device:
    """Where a tensor lies. `device` of a fake one is a call through every mode; this is not."""
    return tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device


DEVICE = torch.ops.prim.device.default
"""How torch asks a fake tensor where it lies: more often than all that it computes."""


def asks_for_place(func: Any, args: Any) -> bool:
    """Whether an operation is that question, outside of a kernel, which would ask for the meta device."""
    return func is DEVICE and isinstance(args[0], FakeTensor) and not args[0].fake_mode.in_kernel_invocation


def without_dispatch() -> contextlib.AbstractContextManager:
    """Operations in it are seen by no mode and no subclass of tensors; torch has no public name for that."""
    return torch._C._DisableTorchDispatch()


def fake_of(meta: Tensor, device: torch.device, attributes: Mapping[str, Any]) -> FakeTensor:
    """What `FakeTensor` makes of a tensor of the meta device, without what its constructor asks each time.

    Args:
        device: where the tensor is said to lie.
        attributes: those of an earlier one of the same mode and device.
    """
    of_device: dict[str, Any] = {"dispatch_device": True, "device_for_backend_keys": device}
    made: Any = Tensor._make_subclass(FakeTensor, meta, False, **of_device)
    torch._C._set_warn_deprecated_on_mutable_data_ptr(made)  # for the address, which is 0
    vars(made).update(attributes)
    return made


@contextlib.contextmanager
def copied_without_memory() -> Iterator[None]:
    """While it lasts, `copy.deepcopy` of a fake tensor makes a fake one.

    torch's own asks for its address and copies what it takes to be there, and so writes into memory that is another's:
    a second trace with a copied reference crashed.
    """
    with patch.object(FakeTensor, "__deepcopy__", _copied, create=True):
        yield


def _copied(tensor: FakeTensor, memo: dict) -> Tensor:
    clone = tensor.detach().clone()
    memo[id(tensor)] = nn.Parameter(clone, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else clone
    return memo[id(tensor)]


@contextlib.contextmanager
def models_stay() -> Iterator[None]:
    """While it lasts, `Module.to` moves nothing: fake tensors all lie on a CPU, whatever the device of the run."""
    with patch.object(nn.Module, "to", lambda module, *args, **kwargs: module):
        yield


# -- operations ---------------------------------------------------------------------------------------------------

aten: Any = torch.ops.aten
NUMBER_READ = aten._local_scalar_dense.default
"""A number that is read off a tensor (`item`)."""
GROUPED_PRODUCT = aten._grouped_mm.default
"""Products of groups of tokens with their experts' weights; torch's table of floating-point operations lacks it."""
scaled_product = aten._scaled_mm
"""The product of factors in 8 bits with scales of rows; that under a public name is not in torch's table of
floating-point operations."""
FLASH_ATTENTION = aten._scaled_dot_product_flash_attention
EFFICIENT_ATTENTION = aten._scaled_dot_product_efficient_attention
OPEN_ATTENTION = aten._scaled_dot_product_attention_math
"""The kernels among which `scaled_dot_product_attention` chooses on CUDA. From CPU tensors it would choose others."""
FUSED_ATTENTION = frozenset(
    f"aten::_scaled_dot_product_{name}"
    for name in (
        *("flash_attention", "efficient_attention", "cudnn_attention"),
        *("flash_attention_for_cpu", "fused_attention_overrideable"),
    )
)
"""What `scaled_dot_product_attention` becomes: the names of its fused kernels, whose results are dear to make again."""
VARLEN_ATTENTION = "torch_attn::_varlen_attn"
"""The name of the operation of `torch.nn.attention.varlen`, whose results are dear too."""


def cpu_flash(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """[rows, heads, queries, dim] and [rows, heads, queries]: a CPU's flash attention with the log-sum-exp of its
    scores, which `scaled_dot_product_attention` does not return. A `mask` in the queries' dtype is added to scores."""
    return aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, causal, attn_mask=mask, scale=scale)


def cpu_flash_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    found: tuple[Tensor, Tensor],
    causal: bool,
    scale: float,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value; `found`, what `cpu_flash` returns, may be that of a softmax over more keys
    than these."""
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, query, key, value, *found, 0.0, causal, attn_mask=mask, scale=scale
    )


def cuda_flash(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """[queries, heads, dim] and [heads, queries]: what `varlen_attn` computes of one segment.

    Its public form returns the log-sum-exp too, and has no way to backward from a softmax over more keys. Torch
    2.11's takes keys that heads share unasked.
    """
    segment, forward = _one_segment(query, key, value), torch.ops.torch_attn._varlen_attn
    shares = (True,) if "enable_gqa" in argument_names(forward.default) else ()
    out, lse, _ = forward(*segment, causal, scale, _sight(causal), *shares)
    return out, lse


def cuda_flash_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value; `out` and `lse` may be those of a softmax over more keys than these."""
    query, key, value, *bounds = _one_segment(query, key, value)
    unused = torch.zeros(2, dtype=torch.uint64, device=query.device)
    return torch.ops.torch_attn._varlen_attn_backward(
        grad, query, key, value, out, lse, *bounds, causal, unused, scale, _sight(causal)
    )


def cuda_flash_of_used(
    query: Tensor, key: Tensor, value: Tensor, starts: tuple[Tensor, Tensor], longest: tuple[int, int], used: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """[queries, heads, dim] and [heads, queries]: what `varlen_attn` computes of segments that see the first of their
    keys alone, without a mask. Torch 2.11's public form cannot be told how many these are.

    Args:
        starts: of the segments' queries, and of their keys, in int32; likewise `longest`.
        used: [segments], how many keys each sees, in int32.
    """
    out, lse, *_ = aten._flash_attention_forward(
        query, key, value, *starts, *longest, 0.0, False, False, scale=scale, seqused_k=used
    )
    return out, lse


def _one_segment(query: Tensor, key: Tensor, value: Tensor) -> tuple[Any, ...]:
    """The tensors, contiguous, with where their one segment starts and ends, and how long it is."""
    import torch.nn.attention.varlen  # registers the operations

    bounds = (torch.tensor([0, len(each)], dtype=torch.int32, device=each.device) for each in (query, key))
    return (*(each.contiguous() for each in (query, key, value)), *bounds, len(query), len(key))


def _sight(causal: bool) -> list[int]:
    """(keys before, keys after) as these operations have it; -1 for all."""
    return [-1, 0 if causal else -1]


def copy_each(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copies tensors into others, whose dtypes may differ, by one launch on a GPU. It is torch's own for optimizers."""
    torch.ops.aten._foreach_copy_(list(targets), list(sources))


def lays_out_weights() -> bool:
    """Whether this build of torch has products by weights that oneDNN lays out, which inductor has of frozen models."""
    known = all(hasattr(torch.ops.mkldnn, name) for name in ("_linear_pointwise", "_reorder_linear_weight"))
    return known and torch.backends.mkldnn.is_available()


def laid_out_weight(weight: Tensor, rows: int) -> Tensor:
    """A copy of the weight of a linear layer as oneDNN multiplies it by so many rows, opaque to other operations."""
    return torch.ops.mkldnn._reorder_linear_weight(weight, rows)


def laid_out_product(x: Tensor, weight: Tensor, bias: Tensor | None, onto: Tensor | None) -> Tensor:
    """`x W' + bias + onto`, of a weight that is laid out."""
    if onto is None:
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return torch.ops.mkldnn._linear_pointwise.binary(x, onto, weight, bias, "add")


def argument_names(func: Any) -> list[str]:
    """Those of an operation, those by position first."""
    return [each.name for each in func._schema.arguments]


def changes_arguments(func: Any) -> bool:
    """Whether an operation writes to one of its arguments."""
    return func._schema.is_mutable


def changed_arguments(func: Any, args: Any) -> list[Any]:
    """Those of the arguments by position that an operation writes to."""
    return [
        value
        for value, argument in zip(args, func._schema.arguments, strict=False)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


def packet_of(func: Any) -> Any:
    """All overloads of an operation, by which torch's table of floating-point operations is kept."""
    return func._overloadpacket


def run_python_kernel(func: Any, *args: Any, **kwargs: Any) -> Any:
    """An operation by its kernel for CPUs, whatever the tensors, so that modes see what it does inside."""
    return func._op_dk(torch._C.DispatchKey.CPU, *args, **kwargs)


def own_kernels(namespace: str) -> Any:
    """A context with a library, whose kernels take the place of torch's for as long as it lasts.

    torch's public class for this keeps its kernels until it is collected.
    """
    return library._scoped_library(namespace, "IMPL")


def beneath_autocast() -> Any:
    """While it lasts, operations on a CPU are not cast: for a kernel that has cast its arguments itself."""
    keys: Any = torch._C
    return keys._ExcludeDispatchKeyGuard(keys.DispatchKeySet(keys.DispatchKey.AutocastCPU))


@contextlib.contextmanager
def grouped_products_by(shape_of: Callable[..., Tensor]) -> Iterator[None]:
    """While it lasts, a function makes the results of grouped products without values.

    torch describes them in bfloat16 alone, and a CPU computes them in any dtype.
    """
    with own_kernels("aten") as kernels:
        kernels.impl("_grouped_mm", shape_of, "Meta", allow_override=True)
        yield


@contextlib.contextmanager
def attention_by(function: Callable[..., Tensor]) -> Iterator[None]:
    """While it lasts, a function stands for `scaled_dot_product_attention`, which would choose a CPU's kernels."""
    with patch.object(F, "scaled_dot_product_attention", function):
        yield


# -- modules and optimizers ---------------------------------------------------------------------------------------

CHOICE = "_default_to_fused_or_foreach"
"""The name under which the modules of `torch.optim` know the function that chooses an implementation."""


def saved_buffers(module: nn.Module) -> dict[str, Tensor]:
    """A module's own buffers that are saved with it, as its `state_dict` has them, without copies or hooks."""
    unsaved = module._non_persistent_buffers_set
    return {name: each for name, each in module.named_buffers(recurse=False) if name not in unsaved}


def with_parameters(module: nn.Module, parameters: Mapping[str, nn.Parameter]) -> nn.Module:
    """A copy of a module that shares all with it but its own parameters, for which these take the place.

    `copy.copy` alone shares the dictionary of parameters, so that both would change.
    """
    twin = copy.copy(module)
    twin._parameters = {**module._parameters, **parameters}
    return twin


def leave_in_place(module: nn.Module) -> None:
    """Has `to`, `cuda`, `half` and their like pass a module by, with all that is in it.

    `Module.to` of a model calls this method of each part; the Trainer, accelerate and evaluation all call it.
    """
    module._apply = lambda *_args, **_kwargs: module  # type: ignore[method-assign]


def children_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """The dictionary in which a module keeps its children, to be put back as it was after others have patched it."""
    return module._modules


def parameters_in(module: Any) -> Iterable[nn.Parameter | None]:
    """The parameters that are a module's own, not its children's; none where there is no module."""
    return () if module is None else module._parameters.values()


def modules_of(model: nn.Module) -> Iterator[nn.Module]:
    """The modules of a model, each once and in the order of `Module.modules`, whose nested generators take ten times as
    long: a model with adapters has thousands, and a step asks for them more than once."""
    seen: set[int] = set()
    left: list[nn.Module | None] = [model]
    while left:
        module = left.pop()
        if module is None or id(module) in seen:
            continue
        seen.add(id(module))
        yield module
        if children := children_of(module):
            left.extend(reversed(children.values()))


def parameters_of(model: nn.Module) -> Iterator[nn.Parameter]:
    """The parameters of a model, each once and in the order of `Module.parameters`, as fast as `modules_of`."""
    seen: set[int] = set()
    for module in modules_of(model):
        for parameter in parameters_in(module):
            if parameter is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                yield parameter


@contextlib.contextmanager
def dropping_gradients_fast(model: nn.Module) -> Iterator[None]:
    """Has `model.zero_grad`, which others call after each step, drop gradients by `parameters_of`."""

    def zero_grad(self: nn.Module, set_to_none: bool = True) -> None:
        if not set_to_none:
            type(self).zero_grad(self, set_to_none)
            return
        for parameter in parameters_of(self):
            parameter.grad = None

    if "zero_grad" in vars(model):
        yield
        return
    model.zero_grad = types.MethodType(zero_grad, model)  # type: ignore[method-assign]
    try:
        yield
    finally:
        vars(model).pop("zero_grad", None)


def has_step_hooks(optimizer: Optimizer) -> bool:
    """Whether somebody is called before or after each step of an optimizer."""
    return bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)


def drop_step_hooks(optimizer: Optimizer) -> None:
    """Gives a shallow copy of an optimizer hooks of its own: none."""
    optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = OrderedDict(), OrderedDict()


def mark_stepped(optimizer: Any) -> None:
    """Tells torch's schedulers that an optimizer was stepped, by a step that is not its own."""
    optimizer._opt_called = True


@contextlib.contextmanager
def foreach_by_default() -> Iterator[None]:
    """While it lasts, optimizers prefer their `foreach` form, as they do for parameters on CUDA."""
    modules = [each for name, each in sys.modules.items() if name.startswith("torch.optim.") and hasattr(each, CHOICE)]
    with contextlib.ExitStack() as stack:
        for module in modules:
            stack.enter_context(patch.object(module, CHOICE, _foreach_or_fused))
        yield


def _foreach_or_fused(params: object, differentiable: bool, use_fused: bool = False) -> tuple[bool, bool]:
    """(fused, foreach)"""
    return use_fused, not use_fused


# -- sharded models -----------------------------------------------------------------------------------------------


class _Alone:
    """Stands for a collective of `fully_shard`: takes the memory that it takes, and asks no other rank."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, **more: Any) -> None:
        """Repeats what is here up to the size of what would come back, or keeps the first part of it."""
        source, target = input_tensor.flatten(), output_tensor.view(-1)
        for start in range(0, target.numel(), source.numel()):
            piece = target[start : start + source.numel()]
            piece.copy_(source[: piece.numel()])


@contextlib.contextmanager
def parameters_replaced(module: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """While it lasts, a module has these tensors, which need not be leaves, in place of parameters of its own."""
    own = dict(module._parameters)
    module._parameters.update(tensors)  # type: ignore[arg-type]
    try:
        yield
    finally:
        module._parameters.update(own)


def strided_shard(dimension: int, parts: int) -> Any:
    """How a tensor is cut of which each of so many parts along a dimension is cut alike; there is no public name."""
    return _StridedShard(dimension, split_factor=parts)


def fully_sharded_modules(model: nn.Module) -> list[FSDPModule]:
    """The modules of a model to which `fully_shard` was applied."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


@contextlib.contextmanager
def without_exchange(model: nn.Module) -> Iterator[None]:
    """While it lasts, a model that `fully_shard` has cut runs on this rank alone, with numbers that mean nothing."""
    groups = [group for module in fully_sharded_modules(model) for group in _groups_of(module)]
    before = [(group._all_gather_comm, group._reduce_scatter_comm) for group in groups]
    for group in groups:
        group._all_gather_comm = group._reduce_scatter_comm = _Alone()
    try:
        yield
    finally:
        for group, (gather, scatter) in zip(groups, before, strict=True):
            group._all_gather_comm, group._reduce_scatter_comm = gather, scatter


def gathered_weights(model: nn.Module) -> Iterator[Tensor]:
    """The memory that the weights of a model that `fully_shard` has cut are gathered into, where it is known: from the
    first forward on."""
    for module in fully_sharded_modules(model):
        for group in _groups_of(module):
            yield from (p._unsharded_param for p in group.fsdp_params if hasattr(p, "_unsharded_param"))


def subclassed(kind: type, tensor: Tensor, requires_grad: bool) -> Any:
    """A tensor as one of a subclass, which shares its memory."""
    return Tensor._make_subclass(kind, tensor, requires_grad)


def parameters_of_unit(module: FSDPModule) -> list[Tensor]:
    """The shards of what is gathered together with a module."""
    return [p.sharded_param for group in _groups_of(module) for p in group.fsdp_params]


def unread_in_backward(module: nn.Module, unread: bool) -> None:
    """Whether the weights of a module are not gathered for backward, where it is a unit of `fully_shard`."""
    if isinstance(module, FSDPModule):
        module.set_unshard_in_backward(not unread)


@contextlib.contextmanager
def gathered(model: nn.Module, part: nn.Module) -> Iterator[None]:
    """While it lasts, the weights of a part of a model are whole; all ranks enter together."""
    sharded: list[Any] = fully_sharded_modules(model)
    around = [module for module in sharded if any(each is part for each in module.modules())]
    for module in around[-1:]:  # the nearest: the modules come from the outermost inwards
        module.unshard()
    try:
        yield
    finally:
        for module in around[-1:]:
            module.reshard()


def let_go(model: nn.Module) -> None:
    """Leaves each rank its shards alone, as the parameters of the modules, whatever a forward has gathered."""
    for module in fully_sharded_modules(model):
        module.reshard()


@contextlib.contextmanager
def staying_gathered(modules: Sequence[FSDPModule]) -> Iterator[None]:
    """While it lasts, the weights of these modules are whole, and their forwards leave them so."""
    before = [[group._reshard_after_forward for group in _groups_of(module)] for module in modules]
    for module in modules:
        module.set_reshard_after_forward(False, recurse=False)
        module.unshard()
    try:
        yield
    finally:
        for module, values in zip(modules, before, strict=True):
            if any(values):
                module.set_reshard_after_forward(True, recurse=False)
            module.reshard()


def reset_fully_sharded(model: nn.Module) -> None:
    """Lets a model that `fully_shard` has cut run again after a forward or backward that ended half way.

    Before torch 2.13 there was no public way.
    """
    modules = fully_sharded_modules(model)
    if not modules:
        return
    root: Any = modules[0]
    if hasattr(root, "reset_iter_state"):
        root.reset_iter_state()
        return
    state = root._get_fsdp_state()
    state._comm_ctx.all_gather_state = state._comm_ctx.reduce_scatter_state = None
    state._comm_ctx.post_forward_order.clear()
    state._state_ctx.iter_forward_root, state._state_ctx.post_backward_final_callback_queued = None, False
    for each in state._state_ctx.all_states:
        each._training_state = type(each._training_state).IDLE
        for group in _groups_of_state(each):
            group._all_gather_result = group._post_reduce_event = group._all_reduce_state = None
            group._reshard_after_forward_event = group._partial_reduce_output = None
            group._post_forward_indices.clear()
            group._training_state = type(group._training_state).IDLE
            group._to_sharded()


def _groups_of(module: Any) -> list[Any]:
    """What `fully_shard` keeps of the parameters of a module."""
    return _groups_of_state(module._get_fsdp_state())


def _groups_of_state(state: Any) -> list[Any]:
    """torch 2.13 has several of a module, for meshes of their own; 2.11 has one."""
    one = getattr(state, "_fsdp_param_group", None)
    return [one] if one is not None else list(getattr(state, "_fsdp_param_groups", ()))


# -- the compiler -------------------------------------------------------------------------------------------------


def compiler_options(options: dict[str, Any]) -> contextlib.AbstractContextManager:
    """While it lasts, the compiler has these options of `torch._dynamo.config`."""
    return torch._dynamo.config.patch(options)


PARTITIONED = ("inductor", "aot_eager")
"""Backends of the compiler that choose what a graph keeps for backward, and so can follow a budget."""


def compile_modes() -> list[str]:
    """The modes of inductor, which `torch.compile` looks at only once it is called."""
    from torch._inductor import list_mode_options

    return list(list_mode_options())


def activation_budget(share: float) -> contextlib.AbstractContextManager:
    """While it lasts, graphs that are compiled keep at most a share of what they would for backward, and compute the
    rest again. torch has the setting in a private module, and no argument of `torch.compile` for it."""
    import torch._functorch.config

    return torch._functorch.config.patch(activation_memory_budget=share)


def watch_compilations(begins: Callable[[Any], None], ends: Callable[[Any], None]) -> Callable[[], None]:
    """Has functions called as each compilation begins and ends; gives what ends the watch."""
    from torch._dynamo.callback import callback_handler

    callback_handler.register_start_callback(begins)
    callback_handler.register_end_callback(ends)

    def remove() -> None:
        callback_handler.remove_start_callback(begins)
        callback_handler.remove_end_callback(ends)

    return remove


def is_left_out_of_graphs(function: Callable[..., Any]) -> bool:
    """Whether `torch.compiler.disable` made a function, which would wrap it a second time."""
    return bool(getattr(function, "_torchdynamo_disable", False))


# -- processes and devices ----------------------------------------------------------------------------------------


def default_store() -> Any:
    """The store of the default process group, which answers after a collective has failed."""
    return torch.distributed.distributed_c10d._get_default_store()


def hang_up(store: Any) -> None:
    """Ends this process's connections to other ranks, but for those of the store.

    gloo ends them when its process group goes, which whoever holds the group keeps from going, as FSDP does, and its
    `abort` and `shutdown` leave them open: ranks that wait would then wait until this process ends, and the store with
    it. Connections that Python made are somebody else's. Where the system does not list them, nothing is done.
    """
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    kept = getattr(store, "port", None)
    own = {each.fileno() for each in gc.get_objects() if issubclass(type(each), socket.socket)}
    for descriptor in map(int, os.listdir(OPEN_FILES) if os.path.isdir(OPEN_FILES) else ()):
        if descriptor in own:
            continue
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
            internet = connection.family in (socket.AF_INET, socket.AF_INET6)
            if internet and kept not in (connection.getsockname()[1], connection.getpeername()[1]):
                connection.shutdown(socket.SHUT_RDWR)


OPEN_FILES = "/proc/self/fd"


def set_timeout_of_new_groups(timeout: datetime.timedelta) -> None:
    """How long ranks of process groups wait for each other that are made from now on, by device meshes too, which take
    no timeout: torch's default is that of the backend, whatever the first group was given."""
    c10d: Any = torch.distributed.distributed_c10d
    c10d.default_pg_timeout = timeout
    if c10d.default_pg_nccl_timeout is not None:  # else torch has no NCCL
        c10d.default_pg_nccl_timeout = timeout


def cpu_has_bf16() -> bool:
    """Whether this CPU has bfloat16 instructions, so that computing in it pays."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def record_cuda_history(max_entries: int) -> None:
    """Has torch's caching allocator note each block, with the lines of Python that asked for it."""
    torch.cuda.memory._record_memory_history(
        "all", context="alloc", stacks="python", max_entries=max_entries, clear_history=True
    )


def end_cuda_history() -> None:
    """Ends the notes."""
    torch.cuda.memory._record_memory_history(enabled=None)


def cuda_history(device: int) -> list[dict[str, Any]]:
    """The entries of a device, in the order of time; their format is that of `torch.cuda.memory._snapshot`."""
    snapshot: Any = torch.cuda.memory._snapshot()
    return snapshot["device_traces"][device]
