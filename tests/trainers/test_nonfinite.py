"""A loss that is no number stops the run, and names the module that it came from, in every trainer."""

import pytest
import torch

from tests.support.marks import slow_but
from tests.support.matrix.matrix import TECHNIQUES, make, with_it
from tests.support.matrix.matrix_models import DECODERS, TRAINERS

CULPRIT = "model.layers.1.mlp.down_proj"
WAYS = {
    "plain": {},
    "padded": {"padding_free": False},
    "in backward": with_it(TECHNIQUES["optimizer in backward"]),
    "in two passes": with_it(TECHNIQUES["optimizer in backward, two passes"]),
    "in micro-batches": {"tokens_per_microbatch": 64},
    "tiled": {"mlp_tile_tokens": 8},
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", DECODERS)
@pytest.mark.parametrize("way", WAYS)
def test_the_first_module_that_gave_a_nan_is_named(kind: str, way: str):
    run = make(kind, **WAYS[way])
    run.model.get_submodule(CULPRIT).weight.data[3, 3] = torch.nan
    others = [name for name, p in run.model.named_parameters() if torch.isfinite(p).all()]
    with pytest.raises(
        ValueError, match=rf"step 1: the loss is nan.*weights of {CULPRIT}.weight are not finite"
    ) as stop:
        run.train()
    assert way == "tiled" or f"first module with a non-finite output is {CULPRIT}" in str(stop.value)
    still = [name for name, p in run.model.named_parameters() if torch.isfinite(p).all()]
    assert still == others


@pytest.mark.parametrize("kind", slow_but(TRAINERS, DECODERS))
@pytest.mark.parametrize("clipped", [{}, {"max_grad_norm": 0.0}], ids=["clipped", "not clipped"])
def test_a_gradient_that_is_no_number_is_named_and_not_stepped_along(kind: str, clipped: dict):
    run = make(kind, **clipped)
    spoilt = run.model.get_submodule(CULPRIT).weight
    before = {name: p.detach().clone() for name, p in run.model.named_parameters()}
    spoilt.register_hook(lambda gradient: gradient.index_fill(0, torch.tensor([3]), torch.nan))
    with pytest.raises(
        ValueError, match=rf"step 1: the loss is finite, the gradient of {CULPRIT}.weight is not. Lower"
    ):
        run.train()
    assert all(torch.equal(p, before[name]) for name, p in run.model.named_parameters())


def test_a_policy_that_cannot_write_says_so():
    """Its weights are not finite, which says nothing about the generator."""
    rewards = {"reward_funcs": lambda completions, **_: [0.0] * len(completions)}
    run = make("GRPO", arguments=rewards)
    run.model.get_submodule(CULPRIT).weight.data[3, 3] = torch.nan
    with pytest.raises(FloatingPointError, match=r"logits of request .* are not finite"):
        run.train()


def test_in_two_passes_nothing_is_stepped_along_a_norm_that_is_no_number():
    run = make("SFT", **WAYS["in two passes"])
    before = {name: p.detach().clone() for name, p in run.model.named_parameters()}
    run.model.get_submodule(CULPRIT).weight.register_hook(lambda gradient: gradient * torch.inf)
    with pytest.raises(ValueError, match="step 1: the loss is finite, the norm of all gradients is not"):
        run.train()
    assert all(torch.equal(p, before[name]) for name, p in run.model.named_parameters())


def test_a_loss_scale_below_one_stops_the_run():
    """Gradients that overflow in float16 however small the loss is scaled."""
    run = make("SFT")
    run.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=0.5)
    with pytest.raises(ValueError, match=r"gradients overflow at a loss scale below 1.*bfloat16 or float32"):
        run.train()
