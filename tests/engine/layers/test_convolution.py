"""Short convolutions that know segments are a model's own: its family's module and classes stay as they were."""

import copy
import sys
from collections.abc import Mapping
from typing import Any

import torch

from lowtide.engine.forward import install, score
from lowtide.ragged import RaggedBatch
from tests.support.models.architectures import build

ROWS = [[5, 6, 7, 8, 9], [10, 11, 12, 13]]


def lfm2() -> Any:
    return build("lfm2")


def globals_of(model: Any) -> Mapping[str, Any]:
    return dict(vars(sys.modules[type(model).__module__]))


def test_nothing_outside_of_the_model_is_changed():
    model = lfm2()
    kind = type(next(module for module in model.modules() if type(module).__name__.endswith("ShortConv")))
    before, forward = globals_of(model), kind.forward
    install(model)
    install(model)
    assert globals_of(model) == before
    assert kind.forward is forward
    assert not any("forward" in vars(module) for module in lfm2().modules() if isinstance(module, kind))


def test_a_model_may_be_prepared_twice_and_copied():
    model, batch = lfm2(), RaggedBatch.from_segments(ROWS)
    install(model)
    once = score(model, batch).scored
    install(model)
    assert torch.equal(score(model, batch).scored, once)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(score(other, batch).scored, once)


def test_without_a_plan_it_is_the_models_own():
    model, tokens = lfm2(), torch.tensor([ROWS[0]])
    wanted = model(input_ids=tokens).logits
    install(model)
    torch.testing.assert_close(model(input_ids=tokens).logits, wanted)
