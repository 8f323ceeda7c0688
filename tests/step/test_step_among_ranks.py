"""What a step does for the sake of other ranks, as one of them sees it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from lowtide.engine.forward import install
from lowtide.methods.method import TokenObjective
from lowtide.objectives.sft import LOSSES
from lowtide.ragged import RaggedBatch
from lowtide.step import evaluate
from lowtide.step.execute import Backward
from lowtide.step.metrics import Totals
from lowtide.step.models import Models
from lowtide.step.rank_sync import NotFinite, OutOfMemory
from lowtide.step.train_step import train_step
from lowtide.step_plan import Limits
from tests.support.models.tiny_models import build
from tests.support.runs.sabotage import out_of_memory

NLL = TokenObjective(LOSSES["nll"])


def model():
    made = build()
    install(made)
    return made.train()


def batch(*lengths: int) -> RaggedBatch:
    return RaggedBatch.from_segments([[(3 * n + length) % 20 + 1 for n in range(length)] for length in lengths])


class Exchange:
    """Notes what a step asks of it."""

    def __init__(self, fails: bool = False) -> None:
        self.seen: list[str] = []
        self.fails = fails

    def __call__(self) -> Callable[[], None]:
        self.seen.append("exchanged")
        if self.fails:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return lambda: self.seen.append("ended")

    @property
    def backward(self) -> Backward:
        return Backward(exchange=self, forgo=lambda: self.seen.append("forgone"), finite=True)


def test_gradients_are_exchanged_once_all_of_them_are_there():
    exchange = Exchange()
    train_step(Models(model()), batch(6, 9, 4), NLL, backward=exchange.backward, limits=Limits(rows=1))
    assert exchange.seen == ["exchanged", "ended"]


@pytest.mark.parametrize(("place", "number"), [("forward", 0), ("backward", 2)])
def test_nothing_is_exchanged_after_a_failure(place, number):
    exchange, made = Exchange(), model()
    with out_of_memory(made, place, number), pytest.raises(OutOfMemory, match=f"in {place} of micro-batch {number}"):
        train_step(Models(made), batch(6, 9, 4), NLL, backward=exchange.backward, limits=Limits(rows=1))
    assert exchange.seen == ["forgone"]


def test_an_exchange_that_fails_is_not_ended():
    exchange = Exchange(fails=True)
    with pytest.raises(OutOfMemory, match="in exchange"):
        train_step(Models(model()), batch(6, 9, 4), NLL, backward=exchange.backward)
    assert exchange.seen == ["exchanged", "forgone"]


def test_a_loss_that_is_no_number_is_not_exchanged():
    exchange, made = Exchange(), model()
    with torch.no_grad():
        next(made.parameters()).fill_(math.nan)
    with pytest.raises(NotFinite):
        train_step(Models(made), batch(6, 9), NLL, backward=exchange.backward)
    assert exchange.seen == ["forgone"]


@pytest.mark.parametrize("lengths", [(40, 5), (5, 4), (70, 40, 3)])
def test_forwards_that_are_of_all_ranks_give_the_same_numbers(lengths):
    """Of one rank; where a row is above the budget, ranks agree on its pieces first."""
    found = []
    for together in (False, True):
        made = model()
        loss = train_step(Models(made, together=together), batch(*lengths), NLL, limits=Limits(tokens=20))
        found.append((loss, [p.grad for p in made.parameters() if p.grad is not None]))
    torch.testing.assert_close(found[1], found[0], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("others", [0, 3])
def test_a_rank_without_rows_takes_part_in_the_forwards_of_others(others, monkeypatch):
    monkeypatch.setattr(evaluate, "worst_of_ranks", lambda own, device: max(own, others))
    made, forwards = model(), []
    made.model.register_forward_pre_hook(lambda *_: forwards.append(torch.is_grad_enabled()))
    idle, totals = replace(batch(6), stands_in=True), Totals()
    assert evaluate.evaluate_batch(Models(made, together=True), idle, NLL, totals, limits=Limits(tokens=20)) == []
    assert forwards == [False] * others
    assert evaluate.evaluate_batch(Models(made), idle, NLL, totals, limits=Limits(tokens=20)) == []
    assert len(forwards) == others, "each rank forwards by itself"
    assert totals == Totals()
