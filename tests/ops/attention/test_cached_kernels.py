"""What stands around a decode step's attention, against plain torch in float64; the Triton kernels in Triton's
interpreter where it is installed."""

import logging
from importlib.util import find_spec

import pytest
import torch

from lowtide.ops.attention import cached_kernels
from lowtide.ops.attention.cached_attention import Part, merged
from lowtide.ops.attention.cached_kernels import Grouping, Kept, merge_rows, right_on, turn_and_keep
from lowtide.ops.layers.layer_kernels import rotate_
from lowtide.ops.target import planning_for
from tests.support.marks import NEEDS_TRITON
from tests.support.references.distances import far

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 8e-3}
TOKENS, HEADS, KV_HEADS, DIM, VALUE_DIM, GROUPED = 5, 6, 3, 12, 8, 33


@pytest.fixture(params=["plain", pytest.param("triton", marks=NEEDS_TRITON)], autouse=True)
def kernels(request, monkeypatch):
    if request.param == "triton":
        monkeypatch.setattr(cached_kernels, "serves", lambda x: True)
    return request.param


@pytest.fixture(params=TOLERANCE, ids=str)
def dtype(request, kernels):
    if kernels == "triton" and request.param == torch.float64:
        pytest.skip("the kernels compute in float32")
    return request.param


def grouping() -> Grouping:
    """Some places that nobody reads stand between others."""
    place = torch.randperm(GROUPED)[: TOKENS * HEADS]
    source = torch.zeros(GROUPED, dtype=torch.long)
    source[place] = torch.arange(TOKENS * HEADS)
    return Grouping(source, place)


@pytest.mark.parametrize("turned", [12, 4, None])
def test_new_keys_are_turned_and_kept_and_queries_grouped(dtype, turned):
    query, key, value = (torch.randn(TOKENS, n, d).to(dtype) for n, d in ((HEADS, DIM), (KV_HEADS, DIM), (KV_HEADS, 8)))
    rotary = None if turned is None else (torch.randn(TOKENS, turned).to(dtype), torch.randn(TOKENS, turned).to(dtype))
    kept = Kept(torch.randn(40, DIM).to(dtype), torch.randn(40, VALUE_DIM).to(dtype))
    places, order = torch.randperm(40)[: TOKENS * KV_HEADS], grouping()
    expected = Kept(*(each.double() for each in kept))
    wide, new = query.double(), key.double()
    if rotary is not None:
        rotate_(wide, new, *(each.double() for each in rotary))
    expected.keys[places], expected.values[places] = new.view(-1, DIM), value.double().view(-1, VALUE_DIM)

    own, grouped = turn_and_keep((query, key, value), rotary, kept, places, order)

    assert own.dtype == grouped.dtype == dtype
    assert far(own, wide) < TOLERANCE[dtype]
    assert torch.equal(grouped[order.place], own.reshape(-1, DIM))
    assert far(kept.keys, expected.keys) < TOLERANCE[dtype]
    assert torch.equal(kept.values.double(), expected.values)


def test_both_parts_of_the_keys_are_merged(dtype):
    order, rows = grouping(), TOKENS * HEADS
    out, others = torch.randn(rows, VALUE_DIM).to(dtype), torch.full((GROUPED, VALUE_DIM), torch.nan).to(dtype)
    others[order.place] = torch.randn(rows, VALUE_DIM).to(dtype)  # what nobody reads may be anything
    wide = torch.promote_types(dtype, torch.float32)
    lse, other_lse = 3 * torch.randn(rows, dtype=wide), 3 * torch.randn(GROUPED, dtype=wide)
    lse[0], lse[1] = -1e30, 1e30  # sees none of these keys, or of the others
    parts = [Part(out, lse), Part(others[order.place], other_lse[order.place])]
    expected = merged([Part(*(each.double() for each in part)) for part in parts], None)

    found = merge_rows(out, lse, (others, other_lse), order)

    assert found.dtype == dtype
    assert far(found, expected) < TOLERANCE[dtype]


def test_kernels_serve_a_gpu_on_which_they_are_right(monkeypatch: pytest.MonkeyPatch, caplog):
    monkeypatch.undo()
    number = torch.zeros(1)
    assert not cached_kernels.serves(number)
    with planning_for("cuda", (9, 0)):
        assert cached_kernels.serves(number)
        assert not cached_kernels.serves(number.double())
    right_on.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert right_on(torch.device("cpu")) is (find_spec("triton") is not None)  # in the interpreter
    assert ("since the kernel for it fails" in caplog.text) is (find_spec("triton") is None)
    right_on.cache_clear()
    monkeypatch.setattr(cached_kernels, "_merge_by_kernel", lambda out, *_: out)
    monkeypatch.setattr(cached_kernels, "_keep_by_kernel", cached_kernels._keep_by_torch)
    with caplog.at_level(logging.WARNING):
        assert not right_on(torch.device("cpu"))
    assert "since the kernel for it is wrong by" in caplog.text
    right_on.cache_clear()
