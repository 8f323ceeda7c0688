"""Steps that are recorded and replayed: the same tokens, and none is recorded that a graph would get wrong."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from lowtide.rollout.generators import replays
from lowtide.rollout.generators.decoding import AT_ONCE, Decoder, Pace
from lowtide.rollout.generators.generator import Request, Sampling
from lowtide.rollout.generators.ragged import RaggedGenerator
from tests.support.runs.generating import prompt, token_ids, writer, written_logprobs

PACE = Pace(steps=8, fewest=16, until_half=True, graphs=True)
FEW = [Request(prompt(9), 3)]
MANY = [Request(prompt(9), 6, seed=3), Request(prompt(12), 5, seed=4)]
"""Enough that rows leave, and steps are recorded again."""
CASES = {
    "greedy": (FEW, {"temperature": 0.0}),
    "cut": (MANY, {"top_k": 30, "min_p": 0.02, "repetition_penalty": 0.7}),
}


def traced(call: partial[None], _device: torch.device) -> Callable[[], None]:
    """What repeats the operations of a call on its addresses, as a CUDA graph does. Tracing makes the call, which
    recording does not: so what it changed is put back."""
    decoder: Any = call.func.__self__  # type: ignore[attr-defined]
    state = [each for each in (decoder._numbers, decoder._out, decoder._used) if each is not None]
    before = [each.clone() for each in state]
    graph = make_fx(call)()
    for each, was in zip(state, before, strict=True):
        each.copy_(was)
    return graph


def written(pace: Pace, requests: list[Request], **changes: Any) -> tuple[list[list[list[int]]], torch.Tensor]:
    sampling = Sampling(18, stop_ids=(3, 4, 5), **changes)
    found = RaggedGenerator(pace=pace).generate(writer(), requests, sampling)
    return token_ids(found), written_logprobs(found)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_recorded_steps_write_the_same_tokens(case: str, monkeypatch: pytest.MonkeyPatch):
    requests, changes = CASES[case]
    wanted, logprobs = written(AT_ONCE, requests, **changes)
    replayed: list[int] = []

    def record(call: partial[None], device: torch.device) -> Callable[[], None]:
        graph = traced(call, device)
        return lambda: (replayed.append(1), graph())[1]

    monkeypatch.setattr(replays, "recorded", record)

    got, of_got = written(PACE, requests, **changes)

    assert got == wanted
    torch.testing.assert_close(of_got, logprobs, atol=1e-6, rtol=0)
    assert len(replayed) >= 8


def test_without_memory_for_a_graph_steps_are_made_one_by_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def no_memory(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(replays, "recorded", no_memory)
    with caplog.at_level(logging.WARNING):
        assert written(PACE, FEW)[0] == written(AT_ONCE, FEW)[0]
    assert [record.message for record in caplog.records if "without CUDA graphs" in record.message] == [
        "generation runs without CUDA graphs, since a step cannot be recorded: CUDA out of memory"
    ]


class Wrong:
    """Steps that a graph would get wrong, by what is wrong with them."""

    def __init__(self) -> None:
        self.kept: list[torch.Tensor] = []
        self.count = 0

    def reads(self, decoder: Decoder) -> None:
        decoder._numbers.sum().item()

    def keeps(self, decoder: Decoder) -> None:
        self.kept.append(decoder._numbers + 1)

    def moves(self, decoder: Decoder) -> None:
        decoder._out = decoder._out.clone()

    def counts(self, decoder: Decoder) -> None:
        self.count += 1
        decoder._numbers.add_(self.count).sub_(self.count)

    def picks(self, decoder: Decoder) -> None:
        decoder._numbers[decoder._numbers > 0].sum()


WRONG = {
    "reads": "the host reads the device",
    "keeps": "memory outlives the step",
    "moves": "memory outlives the step",
    "counts": "it does not run alike twice",
    "picks": "a size depends on data",
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_step_that_a_graph_would_get_wrong_is_not_recorded(
    wrong: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    inner, also = Decoder.step, getattr(Wrong(), wrong)
    monkeypatch.setattr(Decoder, "step", lambda self, whole=False: (inner(self, whole), also(self))[0])
    monkeypatch.setattr(replays, "recorded", lambda *_: pytest.fail("it was recorded"))
    with caplog.at_level(logging.WARNING):
        found = RaggedGenerator(pace=PACE).generate(writer(), [Request(prompt(5), 2)], Sampling(5))
    assert [len(each.token_ids) for each in found[0]] == [5, 5]
    assert f"a step cannot be recorded: {WRONG[wrong]}" in caplog.text
