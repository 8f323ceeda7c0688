"""Attention across two sequences, and biases by distance, against attention written out: values and gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lowtide.ops import dropout
from lowtide.ops.attention import attention_grouped
from lowtide.ops.attention.attention_plan import AttentionPlan
from lowtide.ops.attention.varlen_attention import varlen_attention
from lowtide.ragged import Segment

HEADS, DIM = 4, 8


def laid(lengths: list[int], prefix: list[int] | None = None) -> tuple[Segment, ...]:
    """Segments of these lengths end to end."""
    stops = torch.tensor(lengths).cumsum(0).tolist()
    prefix = prefix or [-1] * len(lengths)
    return tuple(
        Segment(stop - length, stop, before, row, 0, 0)
        for row, (length, stop, before) in enumerate(zip(lengths, stops, prefix, strict=True))
    )


def positions(segments: tuple[Segment, ...]) -> Tensor:
    return torch.cat([torch.arange(part.length) for part in segments])


def tensors(tokens: int, heads: int) -> Tensor:
    return torch.randn(tokens, heads, DIM, dtype=torch.float64, requires_grad=True)


def written_out(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, causal: bool, scale: float) -> Tensor:
    """One segment."""
    repeat = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    if bias is not None:
        distance = torch.arange(key.shape[0])[None] - torch.arange(query.shape[0])[:, None]
        scores = scores + bias[:, distance + bias.shape[1] // 2]
    if causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[1:], dtype=torch.bool).tril(), float("-inf"))
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), value)


def compare(found: Tensor, expected: Tensor, inputs: list[Tensor]) -> None:
    torch.testing.assert_close(found, expected)
    slopes = torch.randn_like(expected)
    for own, other in zip(
        torch.autograd.grad(found, inputs, slopes), torch.autograd.grad(expected, inputs, slopes), strict=True
    ):
        torch.testing.assert_close(own, other)


ACROSS: dict[str, tuple[list[int], list[int], list[int]]] = {
    "one to one": ([5, 3, 7], [2, 4, 4], [0, 1, 2]),
    "alike": ([4, 4, 6, 4], [3, 3, 3, 3], [0, 1, 2, 3]),
    "a source for several targets": ([5, 3], [2, 4, 4, 2], [0, 0, 1, 1]),
}


@pytest.mark.parametrize("kv_heads", [HEADS, 2])
@pytest.mark.parametrize("name", ACROSS)
def test_targets_attend_to_their_sources(name: str, kv_heads: int):
    torch.manual_seed(0)
    of_sources, of_targets, prefix = ACROSS[name]
    sources, targets = laid(of_sources), laid(of_targets, prefix)
    plan = AttentionPlan(targets, positions(targets), others=sources)
    query = tensors(sum(of_targets), HEADS)
    key, value = tensors(sum(of_sources), kv_heads), tensors(sum(of_sources), kv_heads)
    found = varlen_attention(query, key, value, plan, causal=False)
    pieces = []
    for part in targets:
        own, other = slice(part.start, part.stop), sources[part.prefix]
        seen = slice(other.start, other.stop)
        pieces.append(written_out(query[own], key[seen], value[seen], None, False, DIM**-0.5))
    compare(found, torch.cat(pieces), [query, key, value])


@pytest.mark.parametrize("held", [1 << 23, 1])
@pytest.mark.parametrize("block", [1024, 3])
@pytest.mark.parametrize("causal", [True, False])
def test_biases_by_distance(causal: bool, block: int, held: int, monkeypatch: pytest.MonkeyPatch):
    torch.manual_seed(0)
    monkeypatch.setattr(attention_grouped, "QUERY_BLOCK", block)
    monkeypatch.setattr(dropout, "BLOCK", held)
    lengths = [5, 7, 1, 7]
    segments = laid(lengths)
    query, key, value = (tensors(sum(lengths), HEADS) for _ in range(3))
    bias = torch.randn(HEADS, 2 * max(lengths) - 1, dtype=torch.float64, requires_grad=True)
    plan = AttentionPlan(segments, positions(segments))
    found = varlen_attention(query, key, value, plan, causal=causal, bias=bias, scale=1.0)
    pieces = []
    for part in segments:
        own = slice(part.start, part.stop)
        pieces.append(written_out(query[own], key[own], value[own], bias, causal, 1.0))
    compare(found, torch.cat(pieces), [query, key, value, bias])


def test_dropout_is_the_same_in_backward():
    """A weight that is dropped in forward has no gradient: with values that are one, outputs are sums of weights."""
    torch.manual_seed(0)
    segments = laid([6, 6])
    query, key = tensors(12, HEADS), tensors(12, HEADS)
    value = torch.ones(12, HEADS, DIM, dtype=torch.float64, requires_grad=True)
    bias = torch.zeros(HEADS, 11, dtype=torch.float64)
    plan = AttentionPlan(segments, positions(segments))
    found = varlen_attention(query, key, value, plan, causal=False, bias=bias, dropout=0.5)
    (grad,) = torch.autograd.grad(found.sum(), [value])
    torch.testing.assert_close(grad.sum(), found.sum())
    assert found.std() > 0.1


@pytest.mark.parametrize("backend", ["flash2", "flash3", "varlen", "flex"])
def test_backends_that_know_no_biases_say_so(backend: str):
    segments = laid([4])
    query, key, value = (tensors(4, HEADS) for _ in range(3))
    plan = AttentionPlan(segments, positions(segments))
    with pytest.raises(ValueError, match=f"the attention backend '{backend}' needs"):
        varlen_attention(query, key, value, plan, bias=torch.zeros(HEADS, 7), backend=backend)
