"""A loss that is no number stops the run, and names the module that it came from, in every trainer."""

import pytest
import torch
from exactness.matrix import TECHNIQUES, TRAINERS, make, with_it

CULPRIT = "model.layers.1.mlp.down_proj"
WAYS = {
    "plain": {},
    "padded": {"padding_free": False},
    "in backward": with_it(TECHNIQUES["optimizer in backward"]),
    "in two passes": with_it(TECHNIQUES["optimizer in backward, two passes"]),
    "in micro-batches": {"tokens_per_microbatch": 64},
    "tiled": {"mlp_tile_tokens": 8},
}


@pytest.mark.parametrize("kind", TRAINERS)
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


def test_a_loss_scale_below_one_stops_the_run():
    """Gradients that overflow in float16 however small the loss is scaled."""
    run = make("SFT")
    run.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=0.5)
    with pytest.raises(ValueError, match=r"gradients overflow at a loss scale below 1.*bfloat16 or float32"):
        run.train()
