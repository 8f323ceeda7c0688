"""The value function of a language model: a layer of its own, its bias too, on the hidden states of scored tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lowtide.engine.heads.head import Scores
from lowtide.engine.heads.token_value import TokenValue, WithValues
from lowtide.ragged import RaggedBatch
from lowtide.step.models import Models
from tests.support.models.preference_models import build


@pytest.mark.parametrize("head", [WithValues, TokenValue])
def test_values_are_the_layers_on_hidden_states(head):
    model: Any = build()
    head.attach(model)
    model.double()
    assert model.value_head.weight.abs().max() > 0
    assert not model.value_head.bias.any()
    model.value_head.bias.data.fill_(0.7)
    model.value_head.weight.data.normal_(std=0.5)
    batch = RaggedBatch.from_segments([[5, 6, 7, 8], [9, 10, 11]])
    found: Any = Models(model).forward(batch, Scores(batch.score_index, batch.score_target, head=head))
    rows = [[5, 6, 7], [9, 10]]
    expected = [model.value_head(model.model(input_ids=torch.tensor([row])).last_hidden_state[0])[:, 0] for row in rows]
    torch.testing.assert_close(found.stats["values"], torch.cat(expected))


def test_a_classifier_begins_the_value_head_without_its_bias():
    model: Any = build()
    WithValues.attach(model)
    model.value_head.bias.data.fill_(3.0)
    other = nn.Module()
    other.score = nn.Linear(model.config.hidden_size, 1, bias=False)
    WithValues.begin_from(model, other)
    assert torch.equal(model.value_head.weight, other.score.weight.to(model.value_head.weight))
    assert not model.value_head.bias.any()
    kept = model.value_head
    WithValues.attach(model)
    assert model.value_head is kept
