"""What operations give for tensors without memory, kept by what they were given: a trace asks the same again and again.

All that such a tensor has is its form: shape, strides, dtype, and whose storage it is in. torch finds the form of a
result each time anew, at ten times the cost of looking it up: a trace of some layers has thousands of operations, of
which hundreds differ. Kept is what torch found, for operations of aten and of attention, and only where the form of a
result follows from the forms of the arguments; whatever else comes is torch's to answer.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from lowtide.compat.torch import FakeTensor, FakeTensorMode, fake_of, storage_id, without_dispatch

MOST = 50_000
"""Results that are kept, of all traces of a process; then they are found anew."""
PLAIN = frozenset(
    (int, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
)  # of an argument that is its own description
FOLLOWING = ("aten", "torch_attn", "lowtide")
"""Of whose operations the forms of results follow from those of arguments."""
KNOWN: dict[Any, Any] = {}
"""By operation and the forms of its arguments, how to make what it gives, of all traces of a process."""


class _NotKept(Exception):
    """A form that does not follow from forms alone."""


class _Made(NamedTuple):
    """A tensor in a storage of its own."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class _Viewed(NamedTuple):
    """A tensor in the storage of the first argument."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    offset: int


class _Given(NamedTuple):
    """One of the arguments."""

    number: int
    """Among those that are tensors."""


class KnownResults:
    """Runs operations on tensors without memory, as calling them does.

    Args:
        fake: the mode that answers what is not known, which has to be entered.
    """

    def __init__(self, fake: FakeTensorMode) -> None:
        self.fake = fake
        self._attributes: dict[torch.device, dict[str, Any]] = {}

    def __call__(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What an operation gives."""
        tensors: list[FakeTensor] = []
        try:
            key = self._key(func, args, kwargs, tensors)
        except _NotKept:
            return func(*args, **kwargs)
        known = KNOWN.get(key, KNOWN)
        if known is KNOWN:
            return self._found(func, args, kwargs, key, tensors)
        if known is _NotKept:
            return func(*args, **kwargs)
        kind, results = known
        if kind is None:
            return self._result(results[0], tensors)
        return kind(self._result(each, tensors) for each in results)

    def _key(self, func: Any, args: Any, kwargs: Any, tensors: list[FakeTensor]) -> Any:
        """What a result follows from; the tensors among the arguments are added to a list.

        Raises:
            _NotKept: it may follow from more.
        """
        if func.namespace not in FOLLOWING or torch.is_inference_mode_enabled():
            raise _NotKept
        key: list[Any] = [func, torch.get_default_dtype()]
        self._describe(args, key, tensors)
        for name, value in kwargs.items():
            key.append(name)
            self._describe((value,), key, tensors)
        return tuple(key)

    def _describe(self, values: Iterable[Any], key: list[Any], tensors: list[FakeTensor]) -> None:
        for value in values:
            kind = type(value)
            if kind is FakeTensor:
                if value.constant is not None or value.layout is not torch.strided or value.fake_mode is not self.fake:
                    raise _NotKept
                tensors.append(value)
                key += (value.shape, value.stride(), value.dtype, value.storage_offset(), value.fake_device)
            elif kind in PLAIN:
                key.append(value)
            elif kind is bool or kind is float:  # equal to a whole number, but no index
                key += (kind, value)
            elif kind is Tensor and not key[0].is_view:  # a table with values, of which a result has none
                key += (kind, value.shape, value.stride(), value.dtype, value.device)
            elif kind is torch.Generator:
                key.append(kind)
            elif kind is list or kind is tuple:
                key += (kind, len(value))
                self._describe(value, key, tensors)
            else:
                raise _NotKept

    def _found(self, func: Any, args: Any, kwargs: Any, key: Any, tensors: list[FakeTensor]) -> Any:
        """What torch says, which is kept if it says the same each time."""
        storages = [storage_id(tensor.untyped_storage()) for tensor in tensors]
        out = func(*args, **kwargs)
        if len(KNOWN) >= MOST:
            KNOWN.clear()
        try:
            kind = type(out) if type(out) in (list, tuple) else None
            results = [self._form(each, tensors, storages) for each in (out if kind else (out,))]
            made = [storage_id(each.untyped_storage()) for each in (out if kind else ()) if isinstance(each, Tensor)]
            changed = (
                self._key(func, args, kwargs, []) != key
                or [storage_id(tensor.untyped_storage()) for tensor in tensors] != storages
            )
            shared = len(set(made)) < len(made) and any(isinstance(each, _Made) for each in results)
            KNOWN[key] = _NotKept if changed or shared else (kind, results)
        except _NotKept:
            KNOWN[key] = _NotKept
        return out

    def _form(self, out: Any, tensors: list[FakeTensor], storages: list[int]) -> Any:
        """How to make a result again.

        Raises:
            _NotKept: that is not known.
        """
        if out is None:
            return None
        if type(out) is not FakeTensor or out.constant is not None or out.layout is not torch.strided:
            raise _NotKept
        for number, tensor in enumerate(tensors):
            if out is tensor:
                return _Given(number)
        size, stride, storage = tuple(out.shape), out.stride(), out.untyped_storage()
        if storage_id(storage) in storages:
            if storage_id(storage) != storages[0]:
                raise _NotKept
            return _Viewed(size, stride, out.dtype, int(out.storage_offset()))
        reach = 0 if 0 in size else 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
        if out.storage_offset() or storage.nbytes() != reach * out.itemsize:
            raise _NotKept
        return _Made(size, stride, out.dtype, out.fake_device)

    def _result(self, form: Any, tensors: list[FakeTensor]) -> Any:
        if form is None:
            return None
        if type(form) is _Given:
            return tensors[form.number]
        if type(form) is _Made:
            with without_dispatch():
                meta = torch.empty_strided(form.size, form.stride, dtype=form.dtype, device="meta")
            return self._faked(meta, form.device)
        first = tensors[0]
        with without_dispatch():
            meta = torch.empty_strided((0,), (1,), dtype=form.dtype, device="meta")
            meta.set_(cast(Any, first.untyped_storage()), form.offset, form.size, form.stride)
        return self._faked(meta, first.fake_device)

    def _faked(self, meta: Tensor, device: torch.device) -> FakeTensor:
        """What `FakeTensor` makes of a tensor of the meta device, with the attributes that it gave to one before."""
        attributes = self._attributes.get(device)
        if attributes is None:
            first = FakeTensor(self.fake, meta, device)
            self._attributes[device] = dict(vars(first))
            return first
        return fake_of(meta, device, attributes)
