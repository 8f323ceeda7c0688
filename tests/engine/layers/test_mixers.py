"""Layers that know segments are a model's own: its family's module and classes stay as they were."""

import copy
import sys
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from lowtide.engine.forward import install, score
from lowtide.engine.layers.mixers import chunks_of, mixers, observed_mixers
from lowtide.ragged import RaggedBatch
from tests.support.models.architectures import build

ROWS = [[5, 6, 7, 8, 9], [10, 11, 12, 13]]
NAMES = ("lfm2", "bamba", "mamba", "qwen3_5")


def globals_of(model: Any) -> Mapping[str, Any]:
    return dict(vars(sys.modules[type(model).__module__]))


@pytest.mark.parametrize("name", NAMES)
def test_nothing_outside_of_the_model_is_changed(name: str):
    model = build(name)
    (kind,) = {type(module) for module in mixers(model)}
    before, forward = globals_of(model), kind.forward
    install(model)
    install(model)
    score(model, RaggedBatch.from_segments(ROWS))
    assert globals_of(model) == before
    assert kind.forward is forward
    assert not any("forward" in vars(module) for module in build(name).modules() if isinstance(module, kind))


@pytest.mark.parametrize("name", NAMES)
def test_a_model_may_be_prepared_twice_and_copied(name: str):
    model, batch = build(name), RaggedBatch.from_segments(ROWS)
    install(model)
    once = score(model, batch).scored
    install(model)
    assert torch.equal(score(model, batch).scored, once)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(score(other, batch).scored, once)


@pytest.mark.parametrize("name", NAMES)
def test_without_a_plan_it_is_the_models_own(name: str):
    model, tokens = build(name), torch.tensor([ROWS[0]])
    wanted = model(input_ids=tokens).logits
    install(model)
    torch.testing.assert_close(model(input_ids=tokens).logits, wanted)


@pytest.mark.parametrize("name", NAMES)
def test_all_of_its_layers_run_by_the_plan(name: str):
    model = build(name)
    install(model)
    with observed_mixers() as ran:
        score(model, RaggedBatch.from_segments(ROWS))
    assert ran == set(mixers(model))
    assert ran


@pytest.mark.parametrize("name", NAMES[1:])
def test_the_length_of_chunks_changes_no_number(name: str):
    """Of rows longer than a chunk of real runs."""
    model = build(name)
    install(model)
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(3, 101, (length,), generator=generator).tolist() for length in (70, 130, 64)]
    batch = RaggedBatch.from_segments(rows)
    wanted = score(model, batch).scored
    with chunks_of(8):
        torch.testing.assert_close(score(model, batch).scored, wanted, atol=5e-5, rtol=0)
