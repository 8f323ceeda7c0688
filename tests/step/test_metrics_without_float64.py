"""Metrics on a device that has no float64 (Apple's GPUs): the same numbers as on a CPU, added up on the host.

The device is a stand-in: tensors that say they are on `mps`, keep their values in host memory, and refuse float64.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from lowtide.methods.bco import RunningMean
from lowtide.methods.kto import baseline
from lowtide.objectives.outcome import Outcome, mean_of
from lowtide.ragged import RaggedBatch
from lowtide.step.metrics import Totals

MPS = torch.device("mps")
VALUES = torch.tensor([1e8, 1.0, 1.0, 1.0, -1e8, 0.5])
"""Whose sum is 3.5, and another in float32."""


class OnApple(Tensor):
    """A tensor of a device without float64; its values are `held` on the host."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> OnApple:
        if held.dtype == torch.float64:
            raise TypeError("Cannot convert a MPS Tensor to float64 dtype")
        made = Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype, device=MPS)  # type: ignore[attr-defined]
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        to = kwargs.pop("device", MPS)
        out = func(*tree_map(lambda each: each.held if isinstance(each, OnApple) else each, args), **kwargs)
        if torch.device(to).type != "mps" or not isinstance(out, Tensor):
            return out
        return cls(out)


def test_the_stand_in_refuses_float64_as_the_device_does():
    with pytest.raises(TypeError, match="MPS"):
        OnApple(VALUES).double()
    assert OnApple(VALUES).sum().device == MPS


def totals(values: Tensor) -> Totals:
    found, numbers = Totals(), values.unbind()
    for number in numbers:
        found.add(total=number)
    found.add_mean("mean", numbers[1] + numbers[5], 2)
    found.take_outcome(Outcome(numbers[0], {"of rows": mean_of(values)}, {"low": numbers[4]}, {"high": numbers[0]}))
    return found


def test_metrics_are_those_of_a_cpu():
    found = totals(OnApple(VALUES)).read(MPS)
    assert found == totals(VALUES).read(torch.device("cpu"))
    assert found["total"] == 3.5


def test_baselines_and_running_means_are_those_of_a_cpu():
    batch = RaggedBatch.from_segments([[5, 6], [7, 8], [9, 10]], prefix=[-1, 0, 0], row=[0, 0, 0])

    def kl(values: Tensor) -> float:
        return baseline(batch, lambda part: values, lambda part: 0 * values)[1]["kl"]

    assert kl(OnApple(VALUES)) == kl(VALUES)
    here, there = RunningMean(), RunningMean()
    here.take_in(VALUES)
    there.take_in(OnApple(VALUES))
    assert here == there
