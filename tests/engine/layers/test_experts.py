"""Adapters of experts beside their weights, against PEFT's, which adds them to the whole stack."""

import copy
from typing import Any
from unittest import mock

import pytest
import torch
from peft import LoraConfig, PeftModel
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM

from lowtide.engine import forward
from lowtide.engine.adapters import adapters_off
from lowtide.engine.forward import install
from lowtide.engine.layers.experts import install_experts
from lowtide.engine.weights.merging import save_merged
from tests.support.models.adapted_models import STACKS, adapted_experts
from tests.support.models.causal_families import tiny_causal
from tests.support.models.tiny_models import assert_close, checkpointed, gradients, loss_of, shared


def outermost(model: nn.Module) -> Any:
    return next(module for module in model.modules() if hasattr(module, "parameter_name"))


def given(model: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of one layer's experts: tokens, and indices and weights of the two experts that see each."""
    generator = torch.Generator().manual_seed(1)
    experts: Any = outermost(model).get_base_layer()
    stack = experts.down_proj
    x = torch.randn(21, stack.shape[2 if experts.is_transposed else 1], generator=generator).to(stack.dtype)
    chance = torch.rand(21, len(stack), generator=generator)
    chance[:, 1] = 0  # an expert that no token sees
    weights, chosen = chance.topk(2)
    return x, chosen, weights.to(x.dtype)


@torch.no_grad()
def run_without_gradients(model: Any) -> torch.Tensor:
    return outermost(model)(*given(model))


def run(model: Any) -> dict[str, torch.Tensor]:
    """The output of one layer's experts, and the gradients of their input and adapters."""
    layer, (x, chosen, weights) = outermost(model), given(model)
    model.zero_grad()
    out = layer(x.requires_grad_(), chosen, weights)
    out.float().square().sum().backward()
    assert x.grad is not None
    found = {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}
    return {**found, "x": x.grad, "out": out.detach()}


@pytest.mark.parametrize("rank", [3, 8])
@pytest.mark.parametrize("kind", STACKS)
def test_outputs_and_gradients_are_pefts(kind, rank):
    theirs = adapted_experts(kind, rank)
    ours = copy.deepcopy(theirs)
    install_experts(ours)
    found = run(ours)
    assert len(found) == 2 + 2 * 2
    assert_close(found, run(theirs), 2e-6)


@pytest.mark.parametrize("stack", STACKS["gpt_oss"])
def test_one_of_the_weights_may_be_adapted_alone(stack):
    theirs = adapted_experts("gpt_oss", stacks=[stack])
    ours = copy.deepcopy(theirs)
    install_experts(ours)
    assert_close(run(ours), run(theirs), 2e-6)


def test_in_bfloat16_it_is_nearer_to_float32_than_the_rounded_sum_of_weights():
    exact, theirs = adapted_experts("qwen3_moe"), adapted_experts("qwen3_moe", dtype=torch.bfloat16)
    for parameter, rounded in zip(exact.parameters(), theirs.parameters(), strict=True):
        parameter.data = rounded.data.float()
    ours = copy.deepcopy(theirs)
    install_experts(ours)
    wanted = run_without_gradients(exact)
    far = {
        kind: float((run_without_gradients(model) - wanted).norm())
        for kind, model in (("ours", ours), ("theirs", theirs))
    }
    assert far["ours"] <= 1.1 * far["theirs"]


@pytest.mark.parametrize("kind", STACKS)
def test_with_mixed_precision_it_is_near_to_float32(kind):
    theirs = adapted_experts(kind)
    ours = copy.deepcopy(theirs)
    install_experts(ours)
    with torch.autocast("cpu", torch.bfloat16):
        found = run(ours)
    assert_close(found, run(theirs), 2e-2)


class Largest(TorchDispatchMode):
    """The most numbers of a result that is not one of its arguments' memory."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for each in tree_leaves(out):
            if isinstance(each, torch.Tensor) and each.untyped_storage().data_ptr() not in given:
                self.numbers = max(self.numbers, each.numel())
        return out


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_nothing_of_the_size_of_the_weights_is_made(kind):
    model = adapted_experts(kind, rank=1)
    experts: Any = outermost(model).get_base_layer()
    least = 21 * 2 * max(experts.gate_up_proj.shape[1:])  # the tokens' own
    for name in ("gate_up_proj", "down_proj"):
        stack = getattr(experts, name)
        setattr(experts, name, nn.Parameter(stack.detach().clone(), requires_grad=False))
    with Largest() as largest:
        run(model)
    assert largest.numbers >= experts.gate_up_proj.numel()
    install_experts(model)
    with Largest() as largest:
        run(model)
    assert largest.numbers <= least


@pytest.mark.parametrize("policy", ["full", "matmul"])
def test_a_whole_model_has_the_loss_and_gradients_of_pefts(policy):
    """Beside shared prefixes, and computed again in backward."""
    theirs = adapted_experts("qwen3_moe")
    ours = copy.deepcopy(theirs)
    with mock.patch.object(forward, "install_experts"):
        install(theirs)
    install(ours)
    wanted_loss = loss_of(theirs, shared())
    loss = loss_of(checkpointed(ours, policy), shared())
    wanted_loss.backward()
    loss.backward()
    torch.testing.assert_close(loss, wanted_loss, rtol=1e-5, atol=0)
    wanted = gradients(theirs)
    assert any("experts" in name for name in wanted)
    assert_close(gradients(ours), wanted, 1e-5)


def test_pefts_own_way_is_left_where_it_is_needed():
    """Adapters that are off or merged, several at once, and experts that are computed one by one."""
    model = adapted_experts("qwen3_moe")
    install_experts(model)
    wanted = run_without_gradients(model)
    with adapters_off(model):
        base = run_without_gradients(model)
    assert (base - wanted).norm() > 0.1 * wanted.norm()
    config = LoraConfig(r=2, target_modules=["q_proj"], target_parameters=STACKS["qwen3_moe"])
    model.add_adapter("other", config)  # its second factor is 0
    model.base_model.set_adapter(["default", "other"])
    torch.testing.assert_close(run_without_gradients(model), wanted)
    model.base_model.set_adapter("other")
    torch.testing.assert_close(run_without_gradients(model), base)
    model.base_model.set_adapter("default")
    model.get_base_model().set_experts_implementation("eager")
    torch.testing.assert_close(run_without_gradients(model), wanted)
    model.get_base_model().set_experts_implementation("grouped_mm")
    model.merge_adapter()
    torch.testing.assert_close(run_without_gradients(model), wanted)


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_adapters_are_saved_as_peft_reads_and_merges_them(kind, tmp_path):
    model, tokens = adapted_experts(kind), torch.tensor([[5, 6, 7, 8, 9]])
    install(model)
    model.save_pretrained(tmp_path / "adapter")
    save_merged(model, tmp_path / "merged")
    wanted = model.eval()(input_ids=tokens).logits

    base: Any = tiny_causal(kind)  # as the other was, without lowtide
    theirs = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    torch.testing.assert_close(theirs(input_ids=tokens).logits, wanted, rtol=0, atol=1e-4)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    torch.testing.assert_close(merged(input_ids=tokens).logits, wanted, rtol=0, atol=1e-4)
    assert (base.get_input_embeddings().weight - merged.get_input_embeddings().weight).norm() == 0
    with theirs.disable_adapter():
        assert (theirs(input_ids=tokens).logits - wanted).norm() > 0.1
