"""Attention of the pieces of a long row, one after the other, against dense attention of the whole row."""

from __future__ import annotations

import pytest
import torch

from lowtide.ops.attention.attention_blocks import CpuFlash, Merged, Widened, WrittenOut, block_kernel
from lowtide.ops.attention.attention_blocks import Part as Pairs
from lowtide.ops.attention.attention_plan import AttentionPlan, Rules
from lowtide.ops.attention.chained_attention import chained_attention
from lowtide.ops.attention.piece_keys import PieceKeys
from lowtide.step.cut import Part
from lowtide.step_plan import plan_pieces
from tests.support.references.dense_attention import VARIANTS, dense, ragged

ROWS = {
    "one segment": ([37], [-1]),
    "prompt and completions": ([23, 21, 5, 4], [-1, 0, 0, 0]),
    "packed": ([19, 3, 4, 30], [-1, -1, -1, -1]),
}
TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-5}


def whole_row(lengths: list[int], prefix: list[int]):
    """Segments of these lengths in one row."""
    batch = ragged(lengths, prefix)
    return type(batch).from_segments([[1] * n for n in lengths], prefix=prefix, row=[0] * len(lengths))


class Layer:
    """The keys of one layer: computed anew in each pass, as a model does."""

    def __init__(self, row: Part, tensors: list[torch.Tensor], asked: dict) -> None:
        self.row, self.tensors, self.asked = row, tensors, asked
        self.places = [self._places(number) for number in range(len(row.pieces))]

    def _places(self, number: int) -> torch.Tensor:
        """The tokens of a piece in the row, found by the numbers that tokens carry."""
        return self.row.pieces[number].batch.token_ids

    def run(self, number: int, keys: PieceKeys | None) -> torch.Tensor:
        query, key, value = (each[self.places[number]] for each in self.tensors)
        batch = self.row.pieces[number].batch
        if keys is None:
            from lowtide.ops.attention.varlen_attention import varlen_attention

            return varlen_attention(query, key, value, AttentionPlan.build(batch), **self.asked)
        keys.meet("layer", key)
        plan = AttentionPlan(batch.segments, batch.position_ids, piece=keys)
        return chained_attention("layer", query, key, value, plan, **self.asked)


def numbered(row):
    """The row, each of whose tokens is its own place."""
    from dataclasses import replace

    return replace(row, token_ids=torch.arange(row.tokens))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("shape", ROWS)
def test_values_and_gradients_equal_dense_attention(shape, variant, dtype):
    batch = whole_row(*ROWS[shape])
    torch.manual_seed(0)
    tensors = [torch.randn(batch.tokens, heads, 8, dtype=dtype) for heads in (4, 2, 2)]
    asked = {**VARIANTS[variant]}
    wanted = [asked["sinks"].to(dtype)] if "sinks" in asked else []
    ours, theirs = ([t.clone().requires_grad_() for t in [*tensors, *wanted]] for _ in range(2))
    weights = torch.randn(batch.tokens, 4, 8, dtype=dtype)

    def named(sinks: list[torch.Tensor]) -> dict:
        return asked | ({"sinks": sinks[0]} if sinks else {})

    expected = dense(*theirs[:3], batch, **named(theirs[3:]))
    (expected * weights).sum().backward()

    row = Part.of(numbered(batch), plan_pieces(batch.segments, range(len(batch.segments)), 9))
    assert len(row.pieces) > 3
    layer, pieces = Layer(row, ours[:3], named(ours[3:])), row.keys(PieceKeys(1).place)
    for number, keys in enumerate(pieces):
        with torch.no_grad():
            if keys is None:
                continue
            with keys.recording():
                layer.run(number, keys)
    out = torch.empty_like(expected)
    for number in reversed(range(len(pieces))):
        found = layer.run(number, pieces[number])
        (found * weights[layer.places[number]]).sum().backward()
        out[layer.places[number]] = found.detach()
    bound = TOLERANCE[dtype]
    assert (out - expected).norm() <= bound * expected.norm()
    for mine, reference in zip(ours, theirs, strict=True):
        assert (mine.grad - reference.grad).norm() <= bound * reference.grad.norm()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("scale", [1.0, 0.3])
@pytest.mark.parametrize("width", [8, 5])
def test_kernels_agree_on_a_block(causal, scale, width):
    torch.manual_seed(0)
    keys = 40 if causal else 25
    shapes = (40, 6, 8), (keys, 2, 8), (keys, 2, width)
    query, key, value = (torch.randn(*shape, dtype=torch.float64) for shape in shapes)
    grad, rules = torch.randn(40, 6, width, dtype=torch.float64), Rules(scale)
    fast = block_kernel(query, value, rules)
    assert type(fast) is (CpuFlash if width == 8 else Widened)
    found = []
    for kernel in (fast, WrittenOut()):
        part = kernel.forward(query, key, value, rules, causal=causal)
        merged = Merged(Pairs(part.out.clone(), part.lse.clone()))
        merged.add_sinks(torch.ones(6, dtype=torch.float64))  # a softmax over more than the block
        more = Pairs(merged.out, merged.lse)
        found.append((*part, *kernel.backward(grad, query, key, value, more, rules, causal=causal)))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


def test_written_scores_go_in_blocks_of_queries(monkeypatch):
    torch.manual_seed(0)
    query, key, value = (torch.randn(30, heads, 8, dtype=torch.float64) for heads in (4, 2, 2))
    grad, rules, kernel = torch.randn_like(query), Rules(0.5, softcap=2.0), WrittenOut()

    def everything():
        part = kernel.forward(query, key, value, rules, causal=True)
        return (*part, *kernel.backward(grad, query, key, value, part, rules, causal=True))

    whole = everything()
    monkeypatch.setattr("lowtide.ops.attention.attention_blocks.ENTRIES", 4 * 30 * 7)
    for ours, theirs in zip(everything(), whole, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


def test_gradients_left_in_bfloat16_are_added_up_in_float32():
    first = PieceKeys(4, keeps=True)
    with first.recording():
        first.keep("layer", [torch.zeros(4, 1, dtype=torch.bfloat16)])
    for _ in range(64):
        first.leave("layer", [torch.full((4, 1), 1.0 + 2**-7, dtype=torch.bfloat16)])
    (total,) = first.take("layer") or []
    assert total.dtype == torch.float32
    assert total.flatten().tolist() == [64 * (1.0 + 2**-7)] * 4


def test_what_is_not_computed_in_pieces_is_refused():
    plan = AttentionPlan.build(whole_row([5], [-1]))
    plan.piece = PieceKeys(5, row_tokens=10)
    tensors = [torch.zeros(5, heads, 8) for heads in (4, 2, 2)]
    for asked, said in (({"dropout": 0.1}, "attention dropout"), ({"causal": False}, "tokens also see")):
        with pytest.raises(ValueError, match=said):
            chained_attention("layer", *tensors, plan, **asked)
