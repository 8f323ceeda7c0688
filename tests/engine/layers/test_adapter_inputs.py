"""Adapters in float32 over a base in half precision: the bits of PEFT's own casts, and one copy of an input."""

import copy
from unittest import mock

import pytest
import torch

from lowtide.engine import forward
from lowtide.engine.forward import compute_in, install
from lowtide.ops.target import planning_for
from tests.support.models.tiny_models import assert_same, build, gradients, loss_of, separate, with_adapters


def adapted(*, own: bool, **options):
    torch.manual_seed(0)
    model = with_adapters(build(dtype=torch.bfloat16, num_hidden_layers=2), **options).train()
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.float()
    with mock.patch.object(
        forward, "install_adapter_inputs", forward.install_adapter_inputs if own else lambda _: None
    ):
        install(model)
    compute_in(model, torch.bfloat16)
    return model


def run(model) -> tuple[float, dict, int]:
    """Loss, gradients, and the bytes that autograd keeps beside weights."""
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage  # held, so that no other comes to lie there
        return tensor

    torch.manual_seed(1)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = loss_of(model, separate())
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    loss.backward()
    return loss.item(), gradients(model), sum(each.nbytes() for place, each in kept.items() if place not in weights)


@pytest.mark.parametrize("options", [{}, {"lora_dropout": 0.2}, {"use_dora": True}, {"use_rslora": True}], ids=str)
def test_bits_are_those_of_pefts_casts(options):
    (loss, found, kept), (wanted_loss, wanted, more) = (run(adapted(own=own, **options)) for own in (True, False))
    assert loss == wanted_loss
    assert_same(found, wanted)
    assert kept <= more


def test_one_copy_of_an_input_is_kept_for_all_that_read_it():
    """In each of two layers: of the attention's input in place of three copies, of the MLP's in place of two."""
    model = adapted(own=True)
    _, _, kept = run(model)
    _, _, more = run(adapted(own=False))
    copy_in_bfloat16 = separate().tokens * model.config.hidden_size * 2
    assert more - kept >= 2 * (2 + 1) * copy_in_bfloat16


def test_a_copy_of_the_model_takes_its_own_inputs():
    model = adapted(own=True)
    assert_same(run(copy.deepcopy(model))[1], run(model)[1])


def test_what_is_not_rounded_again_is_widened_as_ever():
    """Without autocast, and where a CPU's dropout would scale in the narrow dtype; a GPU's does not."""
    taken = {}
    for name, options in {"plain": {}, "dropped": {"lora_dropout": 0.5}}.items():
        model = adapted(own=True, **options)
        layer = next(module for module in model.modules() if hasattr(module, "lora_A"))
        x = torch.ones(2, 3, dtype=torch.bfloat16)
        with torch.autocast("cpu", torch.bfloat16):
            taken[name] = layer._cast_input_dtype(x, torch.float32).dtype
            with planning_for("cuda", (9, 0)):
                taken[f"{name} on a GPU"] = layer._cast_input_dtype(x, torch.float32).dtype
            taken[f"{name} evaluated"] = layer.eval()._cast_input_dtype(x, torch.float32).dtype
        taken[f"{name} alone"] = layer._cast_input_dtype(x, torch.float32).dtype
    narrow, wide = torch.bfloat16, torch.float32
    assert taken == {
        **{"plain": narrow, "plain on a GPU": narrow, "plain evaluated": narrow, "plain alone": wide},
        **{"dropped": wide, "dropped on a GPU": narrow, "dropped evaluated": narrow, "dropped alone": wide},
    }
