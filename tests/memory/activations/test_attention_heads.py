"""Attention over groups of heads gives the values and gradients of all heads at once, and holds less."""

import copy

import pytest
import torch
from torch import nn

from lowtide.engine.forward import causal_model, install
from lowtide.engine.probe import probe
from lowtide.memory.activations.attention_heads import FAMILIES, install_attention_heads
from lowtide.memory.activations.checkpointing import set_checkpointing
from lowtide.memory.activations.tiled_mlp import install_tiled_mlp
from lowtide.ragged import RaggedBatch
from lowtide.rollout.generators.support import why_not
from tests.support.marks import slow_but
from tests.support.memory.live_bytes import LivingBytes
from tests.support.models import architectures
from tests.support.models.tiny_models import (
    assert_close,
    build,
    gradients,
    loss_of,
    prepared,
    separate,
    shared,
    tokens,
    with_adapters,
)

BIASES = {"attention_bias": True}
NAMES = {name for name, (model_type, _) in architectures.RAGGED.items() if model_type in FAMILIES}
"""Of the table of architectures."""
ROUNDED = {"gemma", "gemma2", "gemma3", "gpt_oss"}
"""Families whose norms, or scores, are in float32 whatever the weights are in."""


def family(name):
    model = architectures.build(name).double()
    if hasattr(model.config, "num_experts_per_tok"):
        model.set_experts_implementation("eager")
    return prepared(model)


def run(model, batch):
    loss = loss_of(model, batch)
    loss.backward()
    return loss.detach(), gradients(model)


def check(model, batch, tolerance, chunks=2):
    loss, wanted = run(model, batch)
    assert install_attention_heads(model, chunks) == causal_model(model).config.num_hidden_layers
    grouped, got = run(model, batch)
    torch.testing.assert_close(grouped, loss, rtol=tolerance, atol=0)
    assert_close(got, wanted, tolerance)


def test_every_family_is_tested():
    tested = {architectures.RAGGED[name][0] for name in NAMES}
    assert tested == FAMILIES


@pytest.mark.parametrize("name", slow_but(["llama", "qwen2", "qwen3", "mistral", "gpt_oss", "cohere"], sorted(NAMES)))
def test_values_and_gradients_equal_those_of_all_heads(name):
    model = family(name)
    check(model, shared(), 1e-5 if name in ROUNDED else 1e-10)


@pytest.mark.parametrize("batch", [separate, shared])
@pytest.mark.parametrize("kwargs", [None, {"use_reentrant": False}, {"use_reentrant": True}], ids=str)
def test_biases_checkpoints_and_padding(batch, kwargs):
    model = prepared(build(dtype=torch.float64, num_attention_heads=8, num_key_value_heads=4, **BIASES))
    if kwargs is not None:
        model.gradient_checkpointing_enable(kwargs)
    check(model, batch(), 1e-12, chunks=4)
    padded = build(dtype=torch.float64)
    install(padded, padding_free=False)
    ids = torch.arange(1, 43).view(3, 14)
    wanted = padded(input_ids=ids).logits
    install_attention_heads(padded, 2)
    torch.testing.assert_close(padded(input_ids=ids).logits, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("policy", ["full", "attention", "matmul"])
def test_policies_of_checkpointing(policy):
    model = prepared(build(dtype=torch.float64))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    set_checkpointing(model, policy)
    check(model, shared(), 1e-12)


@pytest.mark.parametrize("bias", ["none", "lora_only"])
def test_adapters_on_the_projections(bias):
    model = with_adapters(build(dtype=torch.float64, **BIASES), bias=bias).double()
    install(model)
    whole = copy.deepcopy(model)
    check(model, shared(), 1e-12)
    with model.disable_adapter(), whole.disable_adapter(), torch.no_grad():
        torch.testing.assert_close(loss_of(model, shared()), loss_of(whole, shared()), rtol=1e-12, atol=0)


def test_beside_tiles_and_with_other_numbers_of_groups():
    model = prepared(build(dtype=torch.float64, num_attention_heads=8, num_key_value_heads=4))
    loss, wanted = run(model, shared())
    install_tiled_mlp(model, 5)
    for chunks in (1, 4, 2):
        install_attention_heads(model, chunks)
        grouped, got = run(model, shared())
        torch.testing.assert_close(grouped, loss, rtol=1e-12, atol=0)
        assert_close(got, wanted, 1e-12)


def test_copies():
    model = prepared(build(dtype=torch.float64))
    with torch.no_grad():
        wanted = loss_of(model, shared())
        install_attention_heads(model, 2)
        copied = copy.deepcopy(model)
        nn.init.zeros_(model.model.layers[0].self_attn.o_proj.weight)
        torch.testing.assert_close(loss_of(copied, shared()), wanted, rtol=1e-12, atol=0)


def test_frozen_weights_get_no_gradient():
    model = prepared(build(dtype=torch.float64))
    for name in ("q_proj", "o_proj"):
        model.model.layers[0].self_attn.get_submodule(name).requires_grad_(False)
    check(model, separate(), 1e-12)
    model.requires_grad_(False)
    model.model.layers[1].mlp.requires_grad_(True)
    check(model, separate(), 1e-12)


def test_mixed_precision_is_as_near_to_float32_as_all_heads():
    model = prepared(build(num_attention_heads=8, num_key_value_heads=4, hidden_size=64))
    _, wanted = run(model, shared())
    errors = []
    for chunks in (None, 4):
        if chunks is not None:
            install_attention_heads(model, chunks)
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            loss = loss_of(model, shared())
        loss.backward()
        got = gradients(model)
        assert all(grad.dtype == torch.float32 for grad in got.values())
        errors.append(max(float((got[n] - w).norm() / w.norm()) for n, w in wanted.items()))
    assert 0 < errors[1] < 1.2 * errors[0]


def test_hooks_on_parameters_see_the_whole_gradient_once():
    model = prepared(build())
    install_attention_heads(model, 2)
    weight, seen = model.model.layers[0].self_attn.k_proj.weight, []
    weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    loss_of(model, separate()).backward()
    assert len(seen) == 1
    assert torch.equal(seen[0], weight.grad)


def test_a_step_holds_fewer_bytes():
    """One layer without its MLP, so that attention alone is seen."""

    def most(chunks):
        sizes = {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 32}
        model = prepared(build(num_hidden_layers=1, intermediate_size=8, **sizes))
        if chunks > 1:
            install_attention_heads(model, chunks)
        with LivingBytes() as living, living.during("layers"):
            loss_of(model, RaggedBatch.from_segments([tokens(300)])).backward()
        return living.peaks["layers"]

    whole, halves, eighths = most(1), most(2), most(8)
    assert eighths < halves < whole
    assert eighths < 0.7 * whole


def test_generation_keeps_the_keys_of_all_heads():
    model = prepared(build())
    assert probe(model).isolated
    whole = copy.deepcopy(model)
    install_attention_heads(model, 2)
    assert why_not(model) is None
    ids = torch.arange(1, 15)[None]
    with torch.no_grad():
        cached = model.generate(ids, max_new_tokens=4, do_sample=False)
        assert torch.equal(whole.generate(ids, max_new_tokens=4, do_sample=False), cached)


@pytest.mark.parametrize(
    ("make", "chunks", "message"),
    [
        (lambda: build("phi3", num_key_value_heads=4), 2, "attention of model type phi3 is not known"),
        (lambda: build("gpt2", n_embd=32, n_head=4), 2, "attention of model type gpt2 is not known"),
        (lambda: build("olmo2"), 2, "attention of model type olmo2 is not known"),
        (build, 3, r"its 2 heads of keys do not divide by 3. Set attention_head_chunks to one of \[1, 2\]"),
        (lambda: with_adapters(build(), lora_dropout=0.1), 2, "drops at random.* Set lora_dropout"),
        (lambda: build(attention_dropout=0.1), 2, "drops attention weights at random"),
        (lambda: with_adapters(build(), use_dora=True), 2, "it has q_proj.lora_magnitude_vector"),
    ],
)
def test_what_cannot_be_cut_is_refused(make, chunks, message):
    with pytest.raises(ValueError, match=message):
        install_attention_heads(make(), chunks)
