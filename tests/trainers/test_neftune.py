"""NEFTune in training: the policy alone, on both paths, in no evaluation, and gone after training."""

import pytest
import torch
from peft import LoraConfig

from lowtide.engine.forward import causal_model
from lowtide.engine.layers.noise import ALPHA, set_noise
from tests.support.marks import slow_but
from tests.support.matrix.matrix import make, rows
from tests.support.matrix.matrix import watched as run


@pytest.mark.slow
@pytest.mark.parametrize("kind", slow_but(["DPO"], ["SFT", "DPO", "KTO", "ORPO", "Reward"]))
@pytest.mark.parametrize("padding_free", [True, False])
def test_noise_is_in_training_alone(kind, padding_free):
    options = {"max_steps": 2, "padding_free": padding_free}
    plain, noisy = make(kind, **options), make(kind, neftune_noise_alpha=5.0, **options)
    before = plain.evaluate(rows(kind)), noisy.evaluate(rows(kind))
    assert before[0]["eval_loss"] == before[1]["eval_loss"]
    found = run(noisy)
    assert found.losses != run(plain).losses
    assert all(torch.isfinite(torch.tensor(found.losses)))
    assert not vars(causal_model(noisy.model)).get(ALPHA)
    assert not noisy.model.get_input_embeddings()._forward_hooks
    again = [noisy.evaluate(rows(kind))["eval_loss"] for _ in range(2)]
    assert again[0] == again[1]


def test_a_reference_that_is_the_policy_without_adapters_has_no_noise():
    noisy = make("DPO", max_steps=1, peft_config=LoraConfig(r=2, target_modules="all-linear"))
    batch = next(iter(noisy.get_train_dataloader()))
    plain = noisy.reference(batch)
    set_noise(causal_model(noisy.model), 5.0)
    noisy.model.train()
    assert torch.equal(noisy.reference(batch), plain)


def test_two_passes_over_a_step_draw_the_same_noise():
    options = {"max_steps": 3, "neftune_noise_alpha": 5.0}
    assert run(make("SFT", optimizer_in_backward="two_pass", **options)).losses == pytest.approx(
        run(make("SFT", **options)).losses, rel=1e-5
    )
