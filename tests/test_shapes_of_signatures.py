"""The shapes and dtypes that signatures promise are checked at each call that a test makes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch
from beartype.roar import BeartypeCallHintViolation
from jaxtyping import Float, Int, TypeCheckError
from torch import Tensor

from lowtide.ops.dropout import written_attention
from tests.support.shapes import checked


@checked
def added(x: Float[Tensor, "rows width"], y: Float[Tensor, " width"] | None = None) -> Float[Tensor, "rows width"]:
    return x[:, :2] if y is None else x + y


@checked
def cut(x: Float[Tensor, " rows"], offsets: Int[Tensor, " rows+1"]) -> int:
    return len(offsets)


@checked
def numbers(x: Float[Tensor, "rows width"]) -> Iterator[int]:
    yield from range(len(x))


@checked
@dataclasses.dataclass
class Scored:
    values: Float[Tensor, " scores"]
    places: Int[Tensor, " scores"]


def test_arguments_agree_with_each_other_and_with_what_is_returned():
    assert added(torch.ones(3, 2), torch.ones(2)).shape == (3, 2)
    assert added(torch.ones(3, 2)).shape == (3, 2)
    with pytest.raises(BeartypeCallHintViolation) as found:
        added(torch.ones(3, 2), torch.ones(3))
    assert "width=2" in found.value.__notes__[0]
    with pytest.raises(BeartypeCallHintViolation):
        added(torch.ones(3, 4))  # returns two of its four columns


def test_dtypes_count():
    with pytest.raises(BeartypeCallHintViolation):
        added(torch.ones(3, 2, dtype=torch.int64))


def test_an_axis_may_be_computed_from_an_earlier_one():
    assert cut(torch.ones(3), torch.ones(4, dtype=torch.int64)) == 4
    with pytest.raises(BeartypeCallHintViolation):
        cut(torch.ones(3), torch.ones(3, dtype=torch.int64))


def test_a_generator_is_checked_when_it_is_called():
    assert [*numbers(torch.ones(2, 3))] == [0, 1]
    with pytest.raises(TypeCheckError):
        numbers(torch.ones(2))


def test_fields_agree():
    Scored(torch.ones(2), torch.ones(2, dtype=torch.int64))
    with pytest.raises(BeartypeCallHintViolation):
        Scored(torch.ones(2), torch.ones(3, dtype=torch.int64))


def test_a_function_without_arrays_is_left_as_it_is():
    def length(rows: list[int]) -> int:
        return len(rows)

    assert checked(length) is length


@pytest.mark.unchecked_shapes
def test_a_test_may_pass_wrong_ones():
    assert added(torch.ones(3, 2), torch.ones(1)).shape == (3, 2)


def test_functions_of_lowtide_are_checked():
    heads = torch.ones(1, 2, 3, 4)
    with pytest.raises(BeartypeCallHintViolation):
        written_attention(heads, heads, heads, torch.ones(3, 3), scale=1.0, rate=0.0)
