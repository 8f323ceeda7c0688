"""Liger's kernels are put into a model and taken out without a trace. A stand-in patches as liger-kernel 0.8 does."""

import inspect
import sys
from types import MethodType, ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.models.llama import modeling_llama as llama

from lowtide.memory import table
from lowtide.memory.activations.checkpointing import POLICIES, set_checkpointing
from lowtide.memory.activations.offloading import ActivationOffload
from lowtide.memory.kernels import liger
from lowtide.memory.kernels.liger import liger_kernels
from lowtide.memory.table import TECHNIQUES, ActiveTechniques
from lowtide.memory.technique import Site
from tests.support.models.tiny_models import assert_same, build, gradients, loss_of, prepared, separate, with_adapters

modeling_llama: Any = llama


class FusedNorm(torch.nn.Module):
    calls = 0

    def forward(self: Any, hidden):
        FusedNorm.calls += 1
        wide = hidden.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (self.offset + self.weight) * normed.to(hidden.dtype)


class FusedGate(torch.autograd.Function):
    """Writes its gradients over what it has saved, as Liger's does."""

    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        return torch.nn.functional.silu(gate) * up

    @staticmethod
    def backward(ctx: Any, *grads):
        gate, up = ctx.saved_tensors
        with torch.enable_grad():
            inputs = [each.detach().clone().requires_grad_() for each in (gate, up)]
            found = torch.autograd.grad(torch.nn.functional.silu(inputs[0]) * inputs[1], inputs, grads)
        return tuple(saved.detach().copy_(each) for saved, each in zip((gate, up), found, strict=True))


class FusedMLP(torch.nn.Module):
    def forward(self: Any, x):
        return self.down_proj(FusedGate.apply(self.gate_proj(x), self.up_proj(x)))


def fused_rotary(q, k, cos, sin, position_ids=None, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return tuple(x * cos + modeling_llama.rotate_half(x) * sin for x in (q, k))


def patch_llama(
    rope=True, cross_entropy=False, fused_linear_cross_entropy=True, rms_norm=True, swiglu=True, model: Any = None
):
    assert not cross_entropy
    modeling_llama.apply_rotary_pos_emb = fused_rotary
    modeling_llama.LlamaRMSNorm, modeling_llama.LlamaMLP = FusedNorm, FusedMLP
    modeling_llama.LlamaAttention.added = True  # as for some families
    if fused_linear_cross_entropy:
        model.forward = MethodType(lambda self: None, model)

    def patch(norm) -> None:
        norm.offset = 0.0
        norm.in_place = True
        norm.__dict__["forward"] = FusedNorm.forward.__get__(norm, type(norm))

    patch(model.model.norm)
    for layer in model.model.layers:
        patch(layer.input_layernorm)
        patch(layer.post_attention_layernorm)
        layer.mlp.__dict__["forward"] = FusedMLP.forward.__get__(layer.mlp, type(layer.mlp))


def patch_with_a_loss(model=None, rms_norm=True):
    patch_llama(model=model)


@pytest.fixture
def package(monkeypatch):
    """The stand-in, on a machine that could run it."""
    names = ("liger_kernel", "liger_kernel.transformers", "liger_kernel.transformers.monkey_patch")
    modules: list[Any] = [ModuleType(name) for name in names]
    for name, module in zip(names, modules, strict=True):
        monkeypatch.setitem(sys.modules, name, module)
    root, transformers, patches = modules
    root.transformers, transformers.monkey_patch = transformers, patches
    patches.MODEL_TYPE_TO_APPLY_LIGER_FN = {"llama": patch_llama}

    def apply(model, **kwargs):
        patch = patches.MODEL_TYPE_TO_APPLY_LIGER_FN[model.config.model_type]
        patch(model=model, **{k: v for k, v in kwargs.items() if k in inspect.signature(patch).parameters})

    patches._apply_liger_kernel_to_instance = apply
    monkeypatch.setattr(liger, "find_spec", lambda name: object())
    monkeypatch.setattr(liger, "is_on_cuda", lambda model: True)
    return patches


def everything(model) -> list[dict]:
    owners = [*model.modules(), modeling_llama, modeling_llama.LlamaAttention, modeling_llama.LlamaForCausalLM]
    return [dict(vars(owner)) for owner in owners]


def run(model) -> tuple[torch.Tensor, dict]:
    loss = loss_of(model, separate())
    loss.backward()
    return loss.detach(), gradients(model)


@pytest.mark.parametrize("make", [build, lambda: with_adapters(build())], ids=["plain", "adapters"])
def test_kernels_are_used_and_taken_out_without_a_trace(package, make):
    model: Any = make()
    prepared(model.get_base_model() if hasattr(model, "get_base_model") else model)
    wanted_loss, wanted = run(model)
    before, calls = everything(model), FusedNorm.calls
    kernels = liger_kernels(model)
    assert kernels.applied == ("rope", "rms_norm", "swiglu")
    assert kernels.reason == "Liger kernels: rope, rms_norm, swiglu"
    loss, got = run(model)  # through the fused head, which is still there
    assert FusedNorm.calls - calls == 2 * 2 + 1
    assert modeling_llama.apply_rotary_pos_emb is fused_rotary
    torch.testing.assert_close(loss, wanted_loss)
    for name, value in wanted.items():
        torch.testing.assert_close(got[name], value, rtol=1e-3, atol=1e-5)
    kernels.undo()
    after = everything(model)
    for now, then in zip(after, before, strict=True):
        assert now.keys() == then.keys()
        assert all(now[name] is value for name, value in then.items())
    assert torch.equal(run(model)[0], wanted_loss)


def test_a_patch_that_takes_the_forward_is_undone(package):
    model = prepared(build())
    package.MODEL_TYPE_TO_APPLY_LIGER_FN["llama"] = patch_with_a_loss
    before = everything(model)
    with pytest.raises(RuntimeError, match="replaced the forward of LlamaForCausalLM"):
        liger_kernels(model)
    assert all(now.keys() == then.keys() for now, then in zip(everything(model), before, strict=True))
    assert modeling_llama.LlamaMLP is not FusedMLP


def test_why_there_are_none(package, monkeypatch):
    package.MODEL_TYPE_TO_APPLY_LIGER_FN.pop("llama")
    assert "none for model type llama" in liger_kernels(build()).reason
    assert "this is a Linear" in liger_kernels(torch.nn.Linear(2, 2)).reason
    package.MODEL_TYPE_TO_APPLY_LIGER_FN["llama"] = patch_llama
    monkeypatch.setattr(liger, "is_on_cuda", lambda model: False)
    found = liger_kernels(build())
    assert found.reason == "no Liger kernels: the model is not on a CUDA device"
    assert found.applied == ()
    found.undo()
    monkeypatch.setattr(liger, "find_spec", lambda name: None)
    assert "pip install liger-kernel" in liger_kernels(build()).reason


def site(model, policy: str = "full") -> Site:
    """On a GPU, if it is to be believed."""
    options = SimpleNamespace(use_liger_kernel=True, torch_compile=False, mlp_tile_tokens=None)
    vars(options).update(gradient_checkpointing=True, checkpointing_policy=policy)
    return Site(options, model, torch.device("cuda"))


def alone(where: Site) -> ActiveTechniques:
    """The one technique."""
    return ActiveTechniques(where, [TECHNIQUES["liger kernels"]])


def test_a_model_type_without_kernels_is_refused_before_training(package, monkeypatch):
    monkeypatch.setattr(table, "find_spec", lambda name: object())
    alone(site(build())).prepare()
    with pytest.raises(ValueError, match=r"liger kernels \(use_liger_kernel=True\).*none for model type gpt_neox"):
        alone(site(build("gpt_neox"))).prepare()
    monkeypatch.setattr(liger, "is_on_cuda", lambda model: False)
    with pytest.raises(ValueError, match="the model is not on a CUDA device"):
        alone(site(build())).begin()
    monkeypatch.setattr(table, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'lowtide\[liger\]'"):
        alone(site(build("gpt_neox"))).prepare()


def test_products_that_a_kernel_would_write_over_are_not_kept(package, monkeypatch):
    monkeypatch.setattr(table, "find_spec", lambda name: object())
    alone(site(build(), "attention")).prepare()
    with pytest.raises(ValueError, match="'matmul' keeps: take 'attention'"):
        alone(site(build(), "matmul")).prepare()


@pytest.mark.parametrize("policy", [None, *POLICIES])
def test_offloaded_activations_come_back_to_the_kernels(package, policy):
    model: Any = prepared(build())
    if policy is not None:
        model.gradient_checkpointing_enable()
        set_checkpointing(model, policy)
    kernels = liger_kernels(model)
    wanted = run(model)
    offload = ActivationOffload(model, torch.device("cpu"), min_bytes=1)
    with offload.around():
        loss, got = run(model)
    kernels.undo()
    assert torch.equal(loss, wanted[0])
    assert_same(got, wanted[1])
    assert offload.peak_offloaded_bytes > 0
