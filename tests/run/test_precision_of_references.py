"""The reference computes as the policy does: before the first step they are equal, whatever the precision."""

import math

import pytest
import torch

from tests.support.marks import slow_but
from tests.support.matrix.matrix import make, watched
from tests.support.matrix.matrix_models import build

WAYS = {
    "float32": {},
    "bfloat16 mixed": {"bf16": True},
    "compressed": {"optim": "adamw_compressed"},
    "padded": {"bf16": True, "padding_free": False},
}
HOW = {"resident": {}, "precomputed": {"precompute_ref_log_probs": True}}
FIRST = {"DPO": math.log(2), "KTO": 0.5, "BCO": None}
"""The loss of equal models; BCO's moves by its running mean."""


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", slow_but(["DPO"], FIRST))
def test_equal_models_have_no_rewards(kind: str, way: str, how: str):
    trainer = make(kind, **WAYS[way], **HOW[how], beta=1.0, max_steps=1)
    said = dict(trainer.report_lines())["reference"]
    assert ("before training" in said) == (how == "precomputed")
    trainer.train()  # unwatched: hooks on layers would keep them from being fused, but not what came before
    first = next(entry for entry in trainer.state.log_history if "rewards/chosen" in entry)
    # what is precomputed is cut as the step cuts it, and bfloat16 products depend on nothing else
    assert first["rewards/chosen"] == pytest.approx(0, abs=1e-6)
    assert first["rewards/rejected"] == pytest.approx(0, abs=1e-6)
    if FIRST[kind] is not None:
        assert trainer.run.losses[0] == pytest.approx(FIRST[kind], abs=1e-6)


@pytest.mark.parametrize("kind", ["SFT", "DPO"])
def test_an_evaluation_before_training_computes_as_one_after_a_step_that_changes_nothing(kind: str):
    trainer = make(kind, bf16=True, learning_rate=0.0, max_steps=1)
    rows = trainer.train_dataset
    before = trainer.evaluate(rows)["eval_loss"]
    trainer.train()
    assert trainer.evaluate(rows)["eval_loss"] == before


def test_the_forward_of_a_model_stays_its_own():
    trainer = make("SFT", bf16=True, max_steps=1)
    model = trainer.model
    forward = model.forward
    run = watched(trainer)
    assert run.dtypes == {torch.bfloat16}
    assert model.forward == forward


@pytest.mark.parametrize("optim", ["adamw_stochastic", "adamw_flash"])
def test_the_reference_of_a_bfloat16_model_is_a_copy(optim: str):
    trainer = make("DPO", model=build("DPO", 64).to(torch.bfloat16), optim=optim, learning_rate=0.1, max_steps=1)
    policy, reference = trainer.model, trainer.reference.model
    before = [p.detach().clone() for p in reference.parameters()]
    trainer.train()
    assert any(not torch.equal(p, each) for p, each in zip(policy.parameters(), before, strict=True))
    assert all(torch.equal(p, each) for p, each in zip(reference.parameters(), before, strict=True))
