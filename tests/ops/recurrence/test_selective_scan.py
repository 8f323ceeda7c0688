"""Selective scans over segments against a loop over tokens in float64: values, final states and gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lowtide.ops.attention.attention_plan import AttentionPlan
from lowtide.ops.recurrence.layout import RecurrenceLayout
from lowtide.ops.recurrence.selective_scan import CHUNK_OF_SCAN, SelectiveScan
from tests.support.references.recurrences import LENGTHS, PREFIXES, gradients, plan_of

CHANNELS, WIDTH = 5, 3


def inputs() -> list[Tensor]:
    """x, dt, A, B, C and initial states."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    tokens = sum(LENGTHS)
    given = [draw(tokens, CHANNELS), draw(tokens, CHANNELS).exp(), -draw(CHANNELS, WIDTH).exp()]
    given += [draw(tokens, WIDTH), draw(tokens, WIDTH), draw(len(LENGTHS), CHANNELS, WIDTH)]
    return [each.requires_grad_() for each in given]


def by_loop(plan: AttentionPlan, x, dt, A, B, C, initial) -> tuple[Tensor, Tensor]:
    """The definition, token by token."""
    outs: list[Tensor] = []
    states: dict[tuple[int, int], Tensor] = {}
    for number, part in enumerate(plan.segments):
        before = part.after(plan.segments)
        state = states[part.prefix, before] if before else initial[number]
        for t in range(part.start, part.stop):
            state = state * (dt[t, :, None] * A).exp() + (dt[t] * x[t])[:, None] * B[t]
            outs.append(state @ C[t])
            states[number, t - part.start + 1] = state
    finals = torch.stack([states[number, part.length] for number, part in enumerate(plan.segments)])
    return torch.stack(outs), finals


@pytest.mark.parametrize("chunk", [1, 4, CHUNK_OF_SCAN])
@pytest.mark.parametrize("prefix", PREFIXES)
def test_values_states_and_gradients_are_those_of_the_loop(prefix: str, chunk: int):
    plan, given = plan_of(PREFIXES[prefix]), inputs()
    wanted = by_loop(plan, *given)

    out, finals = SelectiveScan(*given[:5]).over(plan, chunk, given[5], final=True)

    assert finals is not None
    torch.testing.assert_close(out, wanted[0], atol=1e-11, rtol=0)
    torch.testing.assert_close(finals, wanted[1], atol=1e-11, rtol=0)
    for got, right in zip(gradients(out, finals, given), gradients(*wanted, given), strict=True):
        torch.testing.assert_close(got, right, atol=1e-10, rtol=0)


def test_without_initial_states_they_are_zero():
    given, plan = inputs(), plan_of(PREFIXES["cut"])
    out, finals = SelectiveScan(*given[:5]).over(plan, 4)
    zeros = SelectiveScan(*given[:5]).over(plan, 4, torch.zeros_like(given[5]))[0]
    assert finals is None
    torch.testing.assert_close(out, zeros, atol=0, rtol=0)


def test_a_segments_values_are_the_same_beside_any_other():
    plan, given = plan_of(PREFIXES["apart"]), [each.detach() for each in inputs()]
    own = slice(plan.segments[4].start, plan.segments[4].stop)
    once = SelectiveScan(*given[:5]).over(plan, 4)[0][own]
    for number in (0, 1, 3, 4):
        given[number] = torch.cat([given[number][: own.start].flip(0) * 3, given[number][own.start :]])
    assert torch.equal(SelectiveScan(*given[:5]).over(plan, 4)[0][own], once)


def test_a_step_is_a_segment_of_one_token():
    x, dt, A, B, C, initial = (each.detach() for each in inputs())
    plan = plan_of(PREFIXES["apart"])
    first = torch.tensor([part.start for part in plan.segments])
    out, state = SelectiveScan(x[first], dt[first], A, B[first], C[first]).step(initial)
    wanted, _ = by_loop(plan, x, dt, A, B, C, initial)
    torch.testing.assert_close(out, wanted[first], atol=1e-12, rtol=0)
    whole = SelectiveScan(x, dt, A, B, C).over(plan, 4, initial, final=True)[1]
    assert whole is not None
    torch.testing.assert_close(state[[1, 7]], whole[[1, 7]], atol=1e-12, rtol=0)  # they have one token


def test_only_inputs_and_the_states_between_chunks_are_kept_for_backward():
    """The states of all tokens are `width` times the inputs."""
    plan, given = plan_of(PREFIXES["apart"]), inputs()
    seen: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        SelectiveScan(*given[:5]).over(plan, 4)
    chunks = sum(RecurrenceLayout.of(plan, 4).counts)
    of_inputs = chunks * 4 * (2 * CHANNELS + 2 * WIDTH) + CHANNELS * WIDTH
    assert sum(seen.values()) <= 8 * (of_inputs + chunks * CHANNELS * WIDTH + chunks * 4)


def test_sums_are_in_float32_and_autocast_changes_nothing():
    given, plan = [each.detach().bfloat16() for each in inputs()], plan_of(PREFIXES["cut"])
    with torch.autocast("cpu", torch.bfloat16):
        out = SelectiveScan(*given[:5]).over(plan, 4)[0]
    assert out.dtype == torch.float32
    assert torch.equal(out, SelectiveScan(*[each.float() for each in given[:5]]).over(plan, 4)[0])
