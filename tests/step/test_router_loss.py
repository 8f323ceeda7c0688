"""The load-balancing loss of a mixture of experts, against transformers' own of each forward."""

from __future__ import annotations

import pytest
import torch

from lowtide.engine.forward import install
from lowtide.methods.method import TokenObjective
from lowtide.objectives.sft import LOSSES
from lowtide.ragged import RaggedBatch
from lowtide.step.metrics import Totals
from lowtide.step.train_step import train_step
from lowtide.step_plan import Limits
from tests.support.models.architectures import build

ROWS = [[5, 6, 7, 8, 9, 3], [4, 8], [7, 3, 2, 9]]
COEFFICIENT = 0.25


def model():
    torch.manual_seed(0)
    return build("mixtral").train()


def test_it_is_the_mean_of_those_of_the_forwards_weighed_by_their_tokens():
    """In value and gradients, of micro-batches of one row."""
    theirs, tokens = model(), sum(map(len, ROWS))
    expected, balance = torch.zeros(()), torch.zeros(())
    for row in ROWS:
        found = theirs(input_ids=torch.tensor([row]), output_router_logits=True)
        logprobs = found.logits[0, :-1].log_softmax(-1).gather(1, torch.tensor(row)[1:, None])
        expected = expected - logprobs.sum() / (tokens - len(ROWS))
        balance = balance + found.aux_loss * len(row) / tokens
    (expected + COEFFICIENT * balance).backward()

    ours, totals = model(), Totals()
    install(ours)
    objective = TokenObjective(LOSSES["nll"], aux_coefficient=COEFFICIENT)
    loss = train_step(ours, RaggedBatch.from_segments(ROWS), objective, limits=Limits(rows=1), totals=totals)
    torch.testing.assert_close(loss, (expected + COEFFICIENT * balance).detach(), rtol=1e-5, atol=1e-6)
    assert totals.read(torch.device("cpu"))["aux_loss"] == pytest.approx(balance.item(), rel=1e-5)
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-6)
