"""Kernels of fla and causal-conv1d compute what the operations here do, or are not used."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lowtide.ops.attention.attention_plan import AttentionPlan
from lowtide.ops.installed_kernels import observed_kernels
from lowtide.ops.recurrence.convolution import causal_convolution
from lowtide.ops.recurrence.linear_recurrence import LinearRecurrence
from tests.support.references import installed_kernels
from tests.support.references.installed_kernels import on_a_gpu, put_in_place  # noqa: F401
from tests.support.references.recurrences import LENGTHS, PREFIXES, gradients, plan_of

KERNELS = {"delta": "chunk_gated_delta_rule", "channels": "chunk_kda", "plain": "chunk_simple_gla"}
TOKENS = sum(LENGTHS)

pytestmark = pytest.mark.usefixtures("on_a_gpu")


def inputs(kind: str, dtype: torch.dtype = torch.bfloat16) -> list[Tensor | None]:
    draws = torch.Generator().manual_seed(0)
    heads = 4 if kind == "channels" else 2

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draws)

    given = [drawn(TOKENS, heads, 3), drawn(TOKENS, heads, 3) / 2, drawn(TOKENS, 4, 5)]
    given = [each.to(dtype) for each in given]
    decay = -drawn(*((TOKENS, 4, 3) if kind == "channels" else (TOKENS, 4))).exp()
    beta = None if kind == "plain" else drawn(TOKENS, 4).sigmoid().to(dtype)
    every = [*given, decay, beta, drawn(len(LENGTHS), 4, 3, 5)]
    return [each if each is None else each.requires_grad_() for each in every]


def computed(given: list[Any], plan: AttentionPlan) -> list[Tensor]:
    """Values, states and gradients."""
    out, states = LinearRecurrence(*given[:5]).over(plan, 4, given[5], final=True)
    assert states is not None
    return [out, states, *gradients(out, states, given)]


def apart(found: list[Tensor], expected: list[Tensor]) -> float:
    pairs = zip((each.detach().float() for each in found), (each.detach().float() for each in expected), strict=True)
    return max(float((one - other).norm() / other.norm()) for one, other in pairs)


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("kind", KERNELS)
def test_recurrences_by_kernels_are_the_operations(kind: str, prefix: str, monkeypatch: pytest.MonkeyPatch):
    given = inputs(kind)
    expected = computed(given, plan_of(PREFIXES[prefix]))
    put_in_place(monkeypatch)
    monkeypatch.setattr("lowtide.ops.installed_kernels._found", {})
    with observed_kernels() as asked:
        found = computed(given, plan_of(PREFIXES[prefix]))
    assert {kernel.name: reason for kernel, reason in asked.items()} == {KERNELS[kind]: None}
    assert 0 < apart(found, expected) < 1e-2


def test_rows_without_prefixes_are_given_to_the_kernel_at_once_and_as_they_lie(monkeypatch: pytest.MonkeyPatch):
    calls: list[dict[str, Any]] = []

    def counted(**given: Any) -> Any:
        calls.append(given)
        return installed_kernels.chunk_gated_delta_rule(**given)

    put_in_place(monkeypatch, chunk_gated_delta_rule=counted)
    recurrence = LinearRecurrence(*inputs("delta")[:5])  # type: ignore[arg-type]
    recurrence.over(plan_of(PREFIXES["apart"]), 4)
    last = calls[-1]
    assert last["initial_state"] is None
    assert not last["output_final_state"]
    assert last["cu_seqlens"].tolist() == [0, 5, 6, 14, 17, 29, 33, 35, 36]
    assert last["v"].data_ptr() == recurrence.value.data_ptr()
    calls.clear()
    recurrence.over(plan_of(PREFIXES["cut"]), 4)
    assert [len(each["cu_seqlens"]) - 1 for each in calls] == [4, 2, 2, 2, 1]


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("taps", [2, 4])
def test_convolutions_by_the_kernel_are_the_operations(prefix: str, taps: int, monkeypatch: pytest.MonkeyPatch):
    draws = torch.Generator().manual_seed(0)
    x = torch.randn(TOKENS, 8, generator=draws).bfloat16().requires_grad_()
    weight = torch.randn(8, taps, generator=draws).requires_grad_()

    def all_of(plan: AttentionPlan) -> list[Tensor]:
        out = causal_convolution(x, weight, plan)
        return [out, *torch.autograd.grad(out.float().square().sum(), (x, weight))]

    expected = all_of(plan_of(PREFIXES[prefix]))
    put_in_place(monkeypatch)
    monkeypatch.setattr("lowtide.ops.installed_kernels._found", {})
    found = all_of(plan_of(PREFIXES[prefix]))
    assert found[0].dtype == torch.bfloat16
    assert expected[0].dtype == torch.float32
    assert apart(found, expected) < 1e-2


def wrong_at_boundaries(**given: Any) -> Any:
    """As of one that takes all tokens for one sequence."""
    starts = given["cu_seqlens"]
    initial = given["initial_state"]
    given |= {"cu_seqlens": starts[[0, -1]], "initial_state": None if initial is None else initial[:1]}
    out, state = installed_kernels.chunk_gated_delta_rule(**given)
    return out, state if state is None else state.expand(len(starts) - 1, *state.shape[1:])


def wrong_gradient(**given: Any) -> Any:
    return installed_kernels.chunk_gated_delta_rule(**given | {"g": given["g"].detach().requires_grad_()})


def failing(**_: Any) -> Any:
    raise RuntimeError("PTX was compiled for another card\nand more")


@pytest.mark.parametrize(
    ("instead", "why"),
    [
        (wrong_at_boundaries, "computes something else here"),
        (wrong_gradient, "fails here with RuntimeError: The differentiated Tensor at index 3"),
        (failing, "fails here with RuntimeError: PTX was compiled for another card"),
    ],
)
def test_a_kernel_that_computes_something_else_is_refused_aloud(
    instead: Callable[..., Any], why: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    given, plan = inputs("delta"), plan_of(PREFIXES["cut"])
    expected = computed(given, plan)
    put_in_place(monkeypatch, chunk_gated_delta_rule=instead)
    monkeypatch.setattr("lowtide.ops.installed_kernels._found", {})
    with caplog.at_level(logging.WARNING), observed_kernels() as asked:
        found = computed(given, plan)
        computed(given, plan)
    assert all(torch.equal(*each) for each in zip(found, expected, strict=True))
    ((kernel, reason),) = asked.items()
    assert reason is not None
    assert reason.startswith(why)
    assert caplog.messages == [f"{kernel} {reason}. It is not used: torch computes in its place"]


def test_what_is_missing_and_what_computes_in_32_bits_is_told(monkeypatch: pytest.MonkeyPatch):
    plan = plan_of(PREFIXES["apart"])
    with observed_kernels() as asked:
        computed(inputs("delta"), plan)
    assert {str(kernel): reason for kernel, reason in asked.items()} == {
        "chunk_gated_delta_rule of flash-linear-attention": "is not installed"
    }
    put_in_place(monkeypatch)
    with observed_kernels() as asked:
        computed(inputs("delta", torch.float32), plan)
    assert [*asked.values()] == ["takes 16 bits, where these layers compute in float32"]
