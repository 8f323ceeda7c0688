"""Layers as one function: values and gradients are those of transformers' and PEFT's own modules."""

from __future__ import annotations

import contextlib
import copy
import logging
from itertools import chain
from typing import Any

import pytest
import torch
from torch import nn

from lowtide import SFTConfig
from lowtide.compat.transformers import checkpointed_layers
from lowtide.engine.forward import causal_model, score
from lowtide.memory.activations.checkpointing import set_checkpointing
from lowtide.memory.kernels import fused_layers
from lowtide.memory.kernels.fused_layers import fuse_layers, why_not_fused
from lowtide.memory.kernels.layer_parts import adapted_inside
from lowtide.memory.table import TECHNIQUES
from lowtide.memory.technique import Site
from lowtide.methods.method import TokenObjective
from lowtide.objectives.sft import LOSSES
from lowtide.ops.logits.linear_logprobs import Want
from lowtide.ops.target import planning_for
from lowtide.rollout.generators.generator import Request, Sampling
from lowtide.rollout.generators.ragged import RaggedGenerator
from lowtide.step.metrics import Totals
from lowtide.step.train_step import train_step
from lowtide.step_plan import Limits
from tests.support.marks import slow_but
from tests.support.models.fused_families import DENSE, FAMILIES, HYBRIDS, MIXTURES, WAYS, adapted, family, run
from tests.support.models.tiny_models import (
    RaggedBatch,
    assert_close,
    assert_same,
    build,
    checkpointed,
    gradients,
    loss_of,
    prepared,
    separate,
    shared,
    tokens,
    with_adapters,
)

CASES = [
    (kind, way)
    for kind in (*FAMILIES, *MIXTURES, *HYBRIDS)
    for way in WAYS
    if "dropout" not in way
    or kind in (*FAMILIES, *DENSE, "gpt_oss")  # PEFT's adapters of the others' experts drop nothing
]
FAST = [
    ("mixtral", "LoRA"),
    ("qwen3_5", "LoRA"),
    ("lfm2", "full"),
    *((kind, way) for kind in ("llama", "gemma2", "olmo2") for way in WAYS),
]

KEEPING = [
    ("llama", "LoRA"),
    ("qwen3", "full"),
    ("mixtral", "LoRA"),
    ("gemma2", "LoRA with dropout"),
    ("olmo2", "full"),
    ("gpt_oss", "full"),
    ("bamba", "LoRA with dropout"),
    ("qwen3_5", "full"),
]
"""Families whose layers differ in what attention is given, and in what mixes tokens."""
DELTA_RULE = ("qwen3_5", "qwen3_5_moe")
"""Of their gradients, those of transformers' layers in float32 are 4e-6 from those in float64 themselves."""


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(("kind", "way"), slow_but(FAST, CASES))
def test_a_step_is_that_of_the_layers_as_they_were(kind, way, checkpointing):
    plain, fused = (prepared(adapted(family(kind), way)) for _ in range(2))
    if checkpointing:
        checkpointed(plain)
        checkpointed(fused)
    undo = fuse_layers(fused)
    for batch in (separate(), shared()):
        wanted_loss, wanted = run(plain, batch)
        loss, got = run(fused, batch)
        torch.testing.assert_close(loss, wanted_loss)
        assert_close(got, wanted, 1e-5 if kind in DELTA_RULE else 5e-6)
    undo()
    assert_same(run(fused, separate())[1], run(plain, separate())[1])


@pytest.mark.parametrize("kind", slow_but(["qwen3_5", "lfm2"], HYBRIDS))
def test_all_layers_of_hybrids_are_fused(kind, caplog):
    model = prepared(adapted(family(kind), "LoRA"))
    with caplog.at_level(logging.WARNING):
        fuse_layers(model)
    assert "not fused" not in caplog.text


@pytest.mark.parametrize("checkpointing", [False, True])
def test_routers_of_mixtures_balance_their_load(checkpointing):
    plain, fused = (prepared(family("qwen3_moe")) for _ in range(2))
    if checkpointing:
        checkpointed(plain)
        checkpointed(fused)
    fuse_layers(fused)
    found = []
    for model in (plain, fused):
        scores = score(model, separate(), aux_loss=True)
        (scores.aux_loss - scores.scored.mean()).backward()
        found.append((scores.aux_loss.detach(), gradients(model)))
    torch.testing.assert_close(found[1][0], found[0][0])
    assert_close(found[1][1], found[0][1], 5e-6)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kind", slow_but(["llama", "mistral", "qwen3_5"], ["llama", "mistral", "qwen3_5", "bamba"]))
def test_rows_in_pieces(kind, checkpointing):
    batch = RaggedBatch.from_segments([tokens(53, 1), tokens(7, 2), tokens(38, 3)])
    found = []
    for limits, fuses in ((Limits(), False), (Limits(tokens=16), True)):
        model = prepared(with_adapters(family(kind)).double())
        if checkpointing:
            checkpointed(model)
        if fuses:
            fuse_layers(model)
        objective = TokenObjective(LOSSES["nll"], want=Want())
        loss = train_step(model, batch, objective, limits=limits, totals=Totals())
        found.append((loss, gradients(model)))
    torch.testing.assert_close(found[1][0], found[0][0])
    assert_close(found[1][1], found[0][1], 5e-6)


@pytest.mark.parametrize("policy", ["attention", "matmul"])
@pytest.mark.parametrize(("kind", "way"), slow_but(KEEPING[:3], KEEPING))
def test_what_a_policy_keeps_is_not_computed_again(kind, way, policy, monkeypatch):
    found, calls = [], 0
    attend = fused_layers._Call.__call__

    def counted(self, *heads):
        nonlocal calls
        calls += 1
        return attend(self, *heads)

    monkeypatch.setattr(fused_layers._Call, "__call__", counted)
    for kept in ("full", policy):
        model = prepared(adapted(family(kind), way))
        checkpointed(model)
        fuse_layers(model)
        set_checkpointing(model, kept)
        calls, layers = 0, len(checkpointed_layers(model))
        for batch in (separate(), shared()):
            found.append(run(model, batch))
    for (wanted_loss, wanted), (loss, got) in zip(found[:2], found[2:], strict=True):
        assert loss == wanted_loss
        assert_same(got, wanted)
    passes = 2 if kind == "gemma2" else 1  # its scores are written out by a CPU, and not kept
    assert kind in (*MIXTURES, *HYBRIDS) or calls == 2 * layers * passes  # of two batches


def test_most_of_what_a_layer_keeps_is_computed_again():
    kept = {}
    for name in ("as it was", "fused", "fused, checkpointed", "fused, checkpointed but for attention"):
        model = prepared(with_adapters(build()))
        if "check" in name:
            checkpointed(model, "attention" if "but" in name else "full")
        if "fused" in name:
            fuse_layers(model)
        sizes: dict[int, int] = {}

        def keep(tensor, sizes=sizes):
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss_of(model, separate())
        kept[name] = sum(sizes.values())
    assert kept["fused"] < 0.8 * kept["as it was"]
    assert kept["fused, checkpointed"] < 0.5 * kept["fused"]
    assert kept["fused, checkpointed"] <= kept["fused, checkpointed but for attention"] < 0.6 * kept["fused"]


@pytest.mark.parametrize("way", ["full", "LoRA"])
def test_errors_in_bfloat16_are_no_larger_than_those_of_the_layers_as_they_were(way):
    exact = adapted(build(), way).double()
    batch, errors = RaggedBatch.from_segments([tokens(40, 1), tokens(70, 2)]), {}
    wanted = run(prepared(exact), batch)[1]
    for fuses in (False, True):
        model = prepared(adapted(build(), way).bfloat16())
        if fuses:
            fuse_layers(model)
        got = run(model, batch)[1]
        squares = sum(float((got[name].double() - each).square().sum()) for name, each in wanted.items())
        errors[fuses] = squares / sum(float(each.square().sum()) for each in wanted.values())
    assert errors[True] < 1.1 * errors[False]


@pytest.mark.parametrize("checkpointing", [False, True])
def test_products_in_bfloat16_of_weights_in_float32(checkpointing):
    found = []
    for fuses in (False, True):
        model = prepared(with_adapters(build()))
        if checkpointing:
            checkpointed(model)
        if fuses:
            fuse_layers(model, torch.bfloat16)
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            loss = loss_of(model, separate())
        loss.backward()
        found.append(gradients(model))
    assert {each.dtype for each in found[1].values()} == {torch.float32}
    assert_close(found[1], found[0], 0.15)


def test_what_mixes_tokens_has_its_backward_outside_of_autocast():
    model, seen = prepared(adapted(family("qwen3_5"), "LoRA")), []
    checkpointed(model)
    fuse_layers(model, torch.bfloat16)

    def look(module, given, out):
        if out.requires_grad:
            out.register_hook(lambda grad: seen.append(torch.is_autocast_enabled("cpu")))

    causal_model(model).model.layers[0].linear_attn.register_forward_hook(look)
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        loss = loss_of(model, separate())
    loss.backward()
    assert seen == [False]


@pytest.mark.parametrize("kind", slow_but(["qwen3_5"], DENSE))
def test_adapters_in_what_mixes_tokens_are_in_the_products(kind, monkeypatch):
    model, called = prepared(adapted(family(kind), "LoRA")), []
    linear = fused_layers.adapted_linear
    fuse_layers(model)
    monkeypatch.setattr(fused_layers, "adapted_linear", lambda *given: called.append(1) or linear(*given))
    loss_of(model, separate())
    inside = [each for layer in checkpointed_layers(model) for each in adapted_inside(layer)]
    assert len(called) == len(inside) > 0


def test_weights_in_4_bits_are_dequantized():
    pytest.importorskip("bitsandbytes")
    from bitsandbytes.nn import Linear4bit

    model = build(hidden_size=64, intermediate_size=128, head_dim=16)
    for layer in checkpointed_layers(model):
        for owner in (layer.self_attn, layer.mlp):
            for name, each in list(owner.named_children()):
                if isinstance(each, nn.Linear):
                    made = Linear4bit(
                        each.in_features, each.out_features, bias=False, compute_dtype=torch.float32, quant_type="nf4"
                    )
                    made.load_state_dict(each.state_dict())
                    setattr(owner, name, made.to("cpu"))
    plain = prepared(with_adapters(model))
    fused = copy.deepcopy(plain)
    undo = fuse_layers(fused)
    wanted_loss, wanted = run(plain, separate())
    loss, got = run(fused, separate())
    torch.testing.assert_close(loss, wanted_loss)
    assert_close(got, wanted, 5e-6)
    undo()


def test_adapters_switched_off_or_merged_are_left_out():
    plain, fused = (prepared(with_adapters(build())) for _ in range(2))
    fuse_layers(fused)
    found = []
    for model in (plain, fused):
        with torch.no_grad(), model.disable_adapter():
            found.append(loss_of(model, separate()))
        model.base_model.merge_adapter()
        with torch.no_grad():
            found.append(loss_of(model, separate()))
        model.base_model.unmerge_adapter()
    torch.testing.assert_close(found[:2], found[2:])
    assert not torch.allclose(found[0], found[1])


def test_calls_of_others_go_to_the_layers_as_they_were(monkeypatch):
    model = prepared(build())
    fuse_layers(model)
    monkeypatch.setattr(fused_layers, "decoder_layer", pytest.fail)
    model.eval()
    ids = torch.tensor([tokens(5)])
    model(input_ids=ids, output_attentions=False, use_cache=False)
    model.generate(ids, max_new_tokens=2, do_sample=False)


@pytest.mark.parametrize("kind", slow_but(["llama", "mixtral"], [*FAMILIES, *MIXTURES, *HYBRIDS]))
def test_completions_are_those_of_the_layers_as_they_were(kind):
    plain, fused = (prepared(adapted(family(kind), "LoRA")) for _ in range(2))
    fuse_layers(fused)
    requests = [Request(tokens(7, 1), 3, seed=5), Request(tokens(4, 2), 2)]
    for sampling in (Sampling(9, temperature=0), Sampling(9)):
        wanted, found = ([*RaggedGenerator().generate(each, requests, sampling)] for each in (plain, fused))
        for one, other in zip(chain(*found), chain(*wanted), strict=True):
            assert one.token_ids == other.token_ids
            torch.testing.assert_close(one.plain_logprobs, other.plain_logprobs, atol=1e-5, rtol=1e-5)


def test_one_layer_that_computes_something_else_runs_as_it_was(caplog):
    plain, fused = prepared(build(num_hidden_layers=2)), prepared(build(num_hidden_layers=2))
    for model in (plain, fused):
        model.model.layers[1].self_attn.use_rope = False  # which its class knows nothing of
    with caplog.at_level(logging.WARNING):
        fuse_layers(fused)
    assert "layers [1] run as they were, not fused: a LlamaDecoderLayer computes something else here" in caplog.text
    assert_close(run(fused, separate())[1], run(plain, separate())[1], 5e-6)


def _hooked(model):
    causal_model(model).model.layers[0].mlp.register_forward_hook(lambda *_: None)
    causal_model(model).model.layers[1].mlp.down_proj.register_forward_pre_hook(lambda *_: None)
    return model


def _replaced(model):
    for layer in model.model.layers:
        layer.mlp.forward = contextlib.nullcontext
    return model


def _two(model):
    model = with_adapters(model)
    model.add_adapter("other", model.peft_config["default"])
    model.base_model.set_adapter(["default", "other"])
    return model


REFUSED = {
    "another form": (lambda: build("phi3"), "it knows the decoder layers of .*Gemma, .* has none of them"),
    "padded": (build, "rows are padded: fused layers need padding_free=True"),
    "another activation": (lambda: prepared(build(hidden_act="relu")), "its MLP has the activation 'relu', not silu"),
    "dropped weights": (
        lambda: prepared(build(attention_dropout=0.1)), r"drops weights at random \(attention_dropout=0.1\)"
    ),
    "DoRA": (
        lambda: prepared(with_adapters(build(), use_dora=True)), "its adapter is a variant of LoRA .Dora"
    ),
    "two adapters": (lambda: prepared(_two(build())), r"2 adapters are active at once \(default, other\)"),
    "hooks": (lambda: _hooked(prepared(build())), "its mlp has hooks, which would not be called"),
    "another forward": (lambda: _replaced(prepared(build())), "the forward of its mlp was replaced"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_fused_is_refused(case):
    make, reason = REFUSED[case]
    model = make()
    assert (why_not_fused(model) or "").endswith(": leave fused_layers off")
    with pytest.raises(ValueError, match=reason):
        fuse_layers(model)


def test_adapters_in_another_dtype_need_mixed_precision():
    model = with_adapters(build(dtype=torch.bfloat16))
    for name, each in model.named_parameters():
        if "lora" in name:
            each.data = each.data.float()
    reason = why_not_fused(prepared(model))
    assert reason is not None
    assert reason.startswith("weights and adapters are of torch.bfloat16 and torch.float32 without mixed precision")
    assert why_not_fused(model, torch.bfloat16) is None


def test_a_kernel_that_fails_leaves_layers_as_they_were(monkeypatch):
    def fail(*args: object, **kwargs: object) -> None:
        raise RuntimeError("PTXAS error: no such instruction\nand more")

    model = prepared(build())
    monkeypatch.setattr(fused_layers, "decoder_layer", fail)
    with pytest.raises(ValueError, match=r"^its kernels fail here with RuntimeError: PTXAS error: no such instruction"):
        fuse_layers(model)


def _scale(model):
    for part in model.modules():
        if hasattr(part, "set_scale"):
            part.set_scale("default", 3.0)


def _other_weight(model):
    attention = model.base_model.model.model.layers[0].self_attn
    attention.k_proj.base_layer.weight = nn.Parameter(attention.k_proj.base_layer.weight * 2, requires_grad=False)


def _other_norm(model):
    norm = copy.deepcopy(model.base_model.model.model.layers[1].input_layernorm)
    norm.weight.data.mul_(2)
    model.base_model.model.model.layers[1].input_layernorm = norm


CHANGES = {
    "adapters off": lambda model: model.base_model.disable_adapter_layers(),
    "adapters merged": lambda model: model.merge_adapter(),
    "another adapter": lambda model: model.set_adapter("other"),
    "another scale": _scale,
    "another weight": _other_weight,
    "another norm": _other_norm,
    "no dropout": lambda model: model.eval(),
    "another dtype": lambda model: model.double(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_layer_that_has_changed_is_read_anew(change):
    found = []
    for fuses in (False, True):
        model = with_adapters(build(), lora_dropout=0.5)
        model.add_adapter("other", model.peft_config["default"])
        prepared(model)
        if fuses:
            fuse_layers(model)
            run(model, separate())
        CHANGES[change](model)
        if "adapters" in change:  # nothing is left to train
            found.append((loss_of(model, separate()).detach(), {}))
        else:
            found.append(run(model, separate()))
    (wanted_loss, wanted), (loss, got) = found
    torch.testing.assert_close(loss, wanted_loss)
    if wanted:
        assert_close(got, wanted, 5e-6)


def _idle(model, **options: Any) -> str | None:
    config = SFTConfig(use_cpu=True, bf16=False, report_to="none", **options)
    return TECHNIQUES["fused layers"].idle(Site(config, model, torch.device("cpu")))


def test_by_default_layers_are_fused_where_they_are_faster():
    model, other = prepared(build()), prepared(build("phi3"))
    assert _idle(model) is None
    assert _idle(model, fused_layers=True) is None
    assert _idle(prepared(build()).bfloat16()) == ""
    assert "this model has none of them" in (_idle(other) or "")
    with planning_for("cuda", (9, 0)):
        assert _idle(model) is None
        assert "this model has none of them" in (_idle(other) or "")
        assert "replaces what mlp_tile_tokens replaces" in (_idle(model, mlp_tile_tokens=8) or "")
    with planning_for("cuda", (7, 5)):
        assert "compute capability 8.0" in (_idle(model) or "")


def test_what_a_model_is_compared_with_is_computed_as_it_is():
    model, reference, other = prepared(build()), prepared(build()), prepared(build("phi3"))
    reference.load_state_dict(model.state_dict())
    reference.requires_grad_(False)
    config = SFTConfig(use_cpu=True, bf16=False, report_to="none", gradient_checkpointing=False)
    site = Site(config, model, torch.device("cpu"), compared=lambda: [model, reference, other])
    plain = loss_of(reference, separate())

    undo = TECHNIQUES["fused layers"].begin(site)
    assert torch.equal(loss_of(model, separate()), loss_of(reference, separate()))
    assert not torch.equal(loss_of(reference, separate()), plain)
    assert all("forward" not in vars(layer) for layer in other.model.layers)

    undo()
    assert torch.equal(loss_of(reference, separate()), plain)
