"""How transformers takes weights out of safetensors files.

It maps the files of a model, keeps them mapped until the last weight is there, and says nothing of a weight that has
been converted. A page of a mapped file counts as resident from its first use on, so that a model whose weights are cast
or quantized as they are loaded takes its files beside it. So the two functions that read a weight are replaced while a
model loads: they pass on what can go.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, cast
from unittest.mock import patch

from torch import Tensor, nn
from transformers import core_model_loading
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter, WeightTransform


@contextlib.contextmanager
def telling_what_was_read(done: Callable[[Tensor], None]) -> Iterator[None]:
    """While it lasts, passes on the tensors that lie in a file, each once a copy of it is there: when it was cast or
    moved, or else when the weight is made for which it was read. What becomes a weight as it is is passed on too."""
    as_they_are, last = dict[int, Tensor](), list[Tensor]()
    materialize = WeightTransform.materialize_tensors

    def read(tensor: Any, device: Any = None, dtype: Any = None) -> Tensor:
        stored = tensor[...]
        found = stored if device is None and dtype is None else stored.to(device=device, dtype=dtype)
        if found is stored:
            as_they_are[id(stored)] = stored
        else:
            done(stored)
        return found

    def made(transform: WeightTransform) -> dict[str, list[Tensor]]:
        pass_on()
        found = materialize(transform)
        last.extend(
            each for tensors in found.values() for each in tensors if as_they_are.pop(id(each), None) is not None
        )
        return found

    def pass_on() -> None:
        while last:
            done(last.pop())

    with (
        patch.object(core_model_loading, "_materialize_copy", read),
        patch.object(WeightTransform, "materialize_tensors", made),
    ):
        yield
    pass_on()


def joined_as_loaded(model: nn.Module) -> Callable[[str], bool]:
    """Whether a parameter, by its name, is made of several of a file's tensors as a model is loaded."""
    endings = tuple(
        ending
        for each in get_model_conversion_mapping(cast(Any, model))
        if isinstance(each, WeightConverter)
        and any(isinstance(step, Concatenate | MergeModulelist) for step in each.operations)
        for ending in each.target_patterns
    )
    return lambda name: name.replace(".base_layer", "").endswith(endings)
