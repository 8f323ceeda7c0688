"""Recurrences over segments against a loop over tokens in float64: values, final states and gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lowtide.ops.attention.attention_plan import AttentionPlan
from lowtide.ops.recurrence import chunked
from lowtide.ops.recurrence.chunked import linear_recurrence
from lowtide.ops.recurrence.layout import RecurrenceLayout
from lowtide.ragged import RaggedBatch
from tests.support.references.recurrences import LENGTHS, PREFIXES, gradients, plan_of

KEY_HEADS, HEADS, KEYS, VALUES = 2, 4, 3, 5
KINDS = ("delta", "plain", "channels")


def inputs(kind: str) -> list[Tensor | None]:
    generator = torch.Generator().manual_seed(0)
    heads = HEADS if kind == "channels" else KEY_HEADS

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    tokens = sum(LENGTHS)
    query, key, value = draw(tokens, heads, KEYS), draw(tokens, heads, KEYS) / 2, draw(tokens, HEADS, VALUES)
    decay = -draw(*((tokens, HEADS, KEYS) if kind == "channels" else (tokens, HEADS))).exp()
    beta = None if kind == "plain" else draw(tokens, HEADS).sigmoid()
    initial = draw(len(LENGTHS), HEADS, KEYS, VALUES)
    given = [query, key, value, decay, beta, initial]
    return [each if each is None else each.requires_grad_() for each in given]


def by_loop(plan: AttentionPlan, query, key, value, log_decay, beta, initial) -> tuple[Tensor, Tensor]:
    """The definition, token by token."""
    shared = HEADS // key.shape[1]
    query, key = query.repeat_interleave(shared, 1), key.repeat_interleave(shared, 1)
    outs: list[Tensor] = []
    states: dict[tuple[int, int], Tensor] = {}
    for number, part in enumerate(plan.segments):
        before = part.after(plan.segments)
        state = states[part.prefix, before] if before else initial[number]
        for token in range(part.start, part.stop):
            decay = log_decay[token].exp()
            state = state * (decay[..., None] if decay.ndim == 2 else decay[:, None, None])
            new = value[token]
            if beta is not None:
                new = beta[token][:, None] * (new - torch.einsum("hk,hkv->hv", key[token], state))
            state = state + key[token][:, :, None] * new[:, None, :]
            outs.append(torch.einsum("hk,hkv->hv", query[token], state))
            states[number, token - part.start + 1] = state
    finals = torch.stack([states[number, part.length] for number, part in enumerate(plan.segments)])
    return torch.stack(outs), finals


@pytest.mark.parametrize("chunk", [1, 4, 64])
@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("kind", KINDS)
def test_values_states_and_gradients_are_those_of_the_loop(kind: str, prefix: str, chunk: int):
    plan, given = plan_of(PREFIXES[prefix]), inputs(kind)
    wanted = by_loop(plan, *given)
    layout = RecurrenceLayout.of(plan, chunk)

    out, finals = linear_recurrence(*given[:5], layout, given[5], final=True)

    assert finals is not None
    torch.testing.assert_close(out, wanted[0], atol=1e-11, rtol=0)
    torch.testing.assert_close(finals, wanted[1], atol=1e-11, rtol=0)
    for got, right in zip(gradients(out, finals, given), gradients(*wanted, given), strict=True):
        torch.testing.assert_close(got, right, atol=1e-10, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_without_initial_states_they_are_zero(kind: str):
    plan, given = plan_of(PREFIXES["cut"]), inputs(kind)
    layout = RecurrenceLayout.of(plan, 4)
    out, finals = linear_recurrence(*given[:5], layout)
    zeros = linear_recurrence(*given[:5], layout, torch.zeros_like(given[5]))[0]
    assert finals is None
    torch.testing.assert_close(out, zeros, atol=1e-12, rtol=0)


def test_one_segment_of_whole_chunks_is_not_moved():
    plan = AttentionPlan.build(RaggedBatch.from_segments([list(range(8))]))
    assert RecurrenceLayout.of(plan, 4).gather is None
    assert RecurrenceLayout.of(plan, 3).gather is not None


@pytest.mark.parametrize("kind", KINDS)
def test_a_segments_values_are_the_same_beside_any_other(kind: str):
    plan, given = plan_of(PREFIXES["apart"]), inputs(kind)
    own = slice(plan.segments[4].start, plan.segments[4].stop)
    layout = RecurrenceLayout.of(plan, 4)
    once = linear_recurrence(*given[:5], layout)[0][own]
    others = [each if each is None else each.detach().clone() for each in given]
    for each in others[:4]:
        each[: own.start] = each[: own.start].flip(0) * 3
    assert torch.equal(linear_recurrence(*others[:5], layout)[0][own], once)


@pytest.mark.parametrize("kind", KINDS)
def test_strong_decays_neither_overflow_nor_vanish(kind: str):
    """A factor of exp(-60) a token: exp(-total) of a chunk of 64 would not be finite, even in float64."""
    plan, given = plan_of(PREFIXES["cut"]), inputs(kind)
    given[3] = torch.full_like(given[3], -60.0).requires_grad_()
    wanted = by_loop(plan, *given)
    found = linear_recurrence(*given[:5], RecurrenceLayout.of(plan, chunked.CHUNK), given[5], final=True)
    torch.testing.assert_close(found, wanted, atol=1e-11, rtol=0)
    for got in gradients(*found, given):
        assert got.isfinite().all()


def test_sums_are_in_float32_and_autocast_changes_nothing():
    plan, given = plan_of(PREFIXES["cut"]), inputs("delta")
    halves = [each if each is None else each.detach().bfloat16() for each in given]
    layout = RecurrenceLayout.of(plan, 4)
    with torch.autocast("cpu", torch.bfloat16):
        out = linear_recurrence(*halves[:5], layout)[0]
    wide = linear_recurrence(*[each if each is None else each.float() for each in halves[:5]], layout)[0]
    assert out.dtype == torch.float32
    assert torch.equal(out, wide)
