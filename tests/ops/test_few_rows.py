"""Products of few rows by weights that are laid out for them: as by the weights themselves, and only for so long."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import linear

from lowtide.ops import few_rows
from tests.support.references.distances import far

pytestmark = pytest.mark.skipif(not few_rows._lays_out(), reason="torch has no such products on this machine")


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("rows", [(2,), (64,), (2, 3)])
@pytest.mark.parametrize("shape", [(512, 128), (129, 513)])
@pytest.mark.parametrize(("biased", "added"), [(False, False), (True, False), (False, True), (True, True)])
def test_a_product_is_near_to_float64_and_changes_nothing_that_it_takes(rows, shape, biased: bool, added: bool):
    outputs, inputs = shape
    x, weight = drawn(*rows, inputs), drawn(*shape)
    bias, onto = drawn(outputs) if biased else None, drawn(*rows, outputs) if added else None

    def plain(dtype: torch.dtype) -> torch.Tensor:
        cast = [None if each is None else each.to(dtype) for each in (x, weight, bias, onto)]
        out = linear(*cast[:3])
        return out if cast[3] is None else out + cast[3]

    kept = [None if each is None else each.clone() for each in (x, weight, bias, onto)]
    with few_rows.beside(weight):
        out = few_rows.product(x, weight, bias, onto)
        assert out is not None
    exact = plain(torch.float64)
    assert far(out, exact) <= 3 * far(plain(torch.float32), exact)
    assert all(each is None or torch.equal(each, now) for each, now in zip(kept, (x, weight, bias, onto), strict=True))


@pytest.mark.parametrize(("rows", "by_layout"), [(1, False), (2, True), (64, True), (65, False)])
def test_one_row_and_many_are_multiplied_by_the_weight_as_it_lies(rows: int, by_layout: bool):
    weight = drawn(300, 300)
    with few_rows.beside(weight):
        assert (few_rows.product(drawn(rows, 300), weight) is not None) == by_layout
        assert few_rows.product(drawn(rows, 300).double(), weight) is None


def test_a_layout_is_gone_with_what_it_was_made_for():
    weight = torch.nn.Parameter(drawn(300, 300))
    with pytest.raises(RuntimeError), few_rows.beside(weight):
        raise RuntimeError
    assert few_rows.product(drawn(8, 300), weight) is None
    assert vars(weight) == {}


@pytest.mark.parametrize("weight", [drawn(191, 256), drawn(300, 300).bfloat16(), drawn(300, 300, 2)])
def test_small_weights_and_those_of_other_kinds_stay_as_they_are(weight: torch.Tensor):
    assert few_rows.is_laid_out_for(drawn(192, 256))
    assert not few_rows.is_laid_out_for(weight)
