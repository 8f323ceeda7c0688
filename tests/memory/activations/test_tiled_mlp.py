"""Tiled MLPs give the values and gradients of whole ones, compute nothing more often and hold less."""

import collections
import copy
import subprocess
import sys

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForMaskedLM

from lowtide.engine.forward import causal_model, score
from lowtide.engine.heads.head import Scores
from lowtide.memory.activations.tiled_mlp import install_tiled_mlp
from lowtide.ragged import RaggedBatch
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

PHI3 = {"num_key_value_heads": 4}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_inner": 48, "attn_pdrop": 0, "embd_pdrop": 0, "resid_pdrop": 0}
MODELS = {
    "llama": lambda dtype: build("llama", dtype),
    "llama_tied": lambda dtype: build("llama", dtype, tie_word_embeddings=True, mlp_bias=True),
    "gemma2": lambda dtype: build("gemma2", dtype),
    "phi3": lambda dtype: build("phi3", dtype, **PHI3),
    "gpt2": lambda dtype: build("gpt2", dtype, **GPT2),
    "gpt_neox": lambda dtype: build("gpt_neox", dtype),
    "apertus": lambda dtype: build("apertus", dtype),
    "adapters": lambda dtype: with_adapters(build("llama", dtype)).to(dtype),
    "gpt2_adapters": lambda dtype: with_adapters(build("gpt2", dtype, **GPT2), fan_in_fan_out=True).to(dtype),
}
CHECKPOINTING = [None, {"use_reentrant": False}, {"use_reentrant": True}]


def run(model, batch=None):
    """(the log-likelihood, all gradients), padded where `batch` is None."""
    if batch is not None:
        loss = loss_of(model, batch)
    else:
        ids = torch.arange(1, 43).view(3, 14)
        logits = model(input_ids=ids, use_cache=False).logits
        loss = -torch.log_softmax(logits[:, :-1], -1).gather(-1, ids[:, 1:, None]).mean()
    loss.backward()
    return loss.detach(), gradients(model)


@pytest.mark.parametrize("checkpointing", CHECKPOINTING, ids=str)
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    slow_but([(torch.float64, 1e-12)], [(torch.float32, 2e-6), (torch.float64, 1e-12)]),
    ids=str,
)
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS.keys())
def test_values_and_gradients_equal_whole_ones(make, dtype, tolerance, checkpointing):
    model = make(dtype)
    if checkpointing is not None:
        causal_model(model).gradient_checkpointing_enable(checkpointing)
    loss, wanted = run(model)
    for tile in (1, 5, 100):
        assert install_tiled_mlp(model, tile) == 2
        tiled_loss, got = run(model)
        torch.testing.assert_close(tiled_loss, loss, rtol=tolerance, atol=0)
        assert_close(got, wanted, tolerance)


@pytest.mark.parametrize("batch", [separate, shared])
def test_ragged_batches(batch):
    model = prepared(build(dtype=torch.float64))
    loss, wanted = run(model, batch())
    install_tiled_mlp(model, 7)
    tiled_loss, got = run(model, batch())
    torch.testing.assert_close(tiled_loss, loss, rtol=1e-12, atol=0)
    assert_close(got, wanted, 1e-12)


def test_without_gradients_and_of_a_copy_the_values_are_the_same():
    model = build()
    ids = torch.arange(1, 43).view(3, 14)
    with torch.no_grad():
        wanted = model(input_ids=ids).logits
        install_tiled_mlp(model, 4)
        torch.testing.assert_close(model(input_ids=ids).logits, wanted)
        copied = copy.deepcopy(model)
        nn.init.zeros_(model.model.layers[0].mlp.down_proj.weight)
        torch.testing.assert_close(copied(input_ids=ids).logits, wanted)


def test_mixed_precision_is_as_near_to_float32_as_without_tiles():
    model = build(mlp_bias=True)
    _, wanted = run(model)
    errors = []
    for tile in (None, 5):
        if tile is not None:
            install_tiled_mlp(model, tile)
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(input_ids=torch.arange(1, 43).view(3, 14), use_cache=False).logits.float()
        ids = torch.arange(1, 43).view(3, 14)
        (-torch.log_softmax(logits[:, :-1], -1).gather(-1, ids[:, 1:, None]).mean()).backward()
        got = gradients(model)
        assert all(grad.dtype == torch.float32 for grad in got.values())
        errors.append(max(float((got[n] - w).norm() / w.norm()) for n, w in wanted.items()))
    assert 0 < errors[1] < 1.2 * errors[0]


def test_bfloat16_weights_lose_nothing_to_the_number_of_tiles():
    model = build(dtype=torch.bfloat16)
    exact = build(dtype=torch.float64)
    exact.load_state_dict(model.state_dict())
    _, wanted = run(exact)
    _, whole = run(model)
    install_tiled_mlp(model, 1)
    _, tiled = run(model)

    def error(got):
        return max(float((got[n].double() - w).norm() / w.norm()) for n, w in wanted.items() if "mlp" in n)

    assert error(tiled) < 1.2 * error(whole)


class Counter(nn.Module):
    """An activation that counts the tokens it sees."""

    def __init__(self):
        super().__init__()
        self.tokens = 0

    def forward(self, x):
        self.tokens += x.shape[:-1].numel()
        return nn.functional.silu(x)


@pytest.mark.parametrize(("checkpointing", "times"), list(zip(CHECKPOINTING, (2, 2, 3), strict=True)), ids=str)
def test_each_token_is_computed_twice(checkpointing, times):
    """In forward and in backward; only a reentrant checkpoint, which cannot stop early, adds a third time."""
    model = prepared(build())
    if checkpointing is not None:
        model.gradient_checkpointing_enable(checkpointing)
    install_tiled_mlp(model, 5)
    counters = [Counter() for _ in model.model.layers]
    for layer, counter in zip(model.model.layers, counters, strict=True):
        layer.mlp.act_fn = counter
    loss_of(model, separate()).backward()
    assert [counter.tokens for counter in counters] == [times * separate().tokens] * 2


@pytest.mark.parametrize("checkpointing", CHECKPOINTING, ids=str)
def test_hooks_on_parameters_see_the_whole_gradient_once(checkpointing):
    model = prepared(build())
    if checkpointing is not None:
        model.gradient_checkpointing_enable(checkpointing)
    install_tiled_mlp(model, 5)
    weight = model.model.layers[0].mlp.gate_proj.weight
    seen: list[torch.Tensor] = []
    after: list[torch.Tensor] = []
    weight.register_hook(lambda grad: seen.append(grad.clone()))
    weight.register_post_accumulate_grad_hook(lambda p: after.append(torch.clone(p.grad)))
    loss_of(model, separate()).backward()
    assert len(seen) == len(after) == 1
    assert torch.equal(seen[0], weight.grad)
    assert torch.equal(after[0], weight.grad)


def test_frozen_weights_get_no_gradient():
    model = prepared(build())
    for parameter in model.model.layers[0].mlp.parameters():
        parameter.requires_grad_(False)
    _, wanted = run(model, separate())
    install_tiled_mlp(model, 5)
    _, got = run(model, separate())
    assert_close(got, wanted, 2e-6)
    assert not any("layers.0.mlp" in name for name in got)


@pytest.mark.parametrize("checkpointing", CHECKPOINTING, ids=str)
def test_backward_sees_the_dropout_of_forward(checkpointing):
    """A finite difference under fixed random numbers."""
    model = prepared(build(dtype=torch.float64))
    if checkpointing is not None:
        model.gradient_checkpointing_enable(checkpointing)
    model = with_adapters(model, lora_dropout=0.3).double()
    install_tiled_mlp(model, 5)
    weight = next(p for name, p in model.named_parameters() if "layers.0.mlp.gate_proj.lora_A" in name)

    def loss():
        torch.manual_seed(11)
        return loss_of(model, separate())

    loss().backward()
    assert weight.grad is not None
    gradient, direction = weight.grad, torch.randn_like(weight)
    step = 1e-3  # norms compute in float32
    with torch.no_grad():
        weight += step * direction
        above = loss()
        weight -= 2 * step * direction
        below = loss()
    torch.testing.assert_close((gradient * direction).sum(), (above - below) / (2 * step), rtol=1e-3, atol=0)


def test_a_weight_changed_before_backward_is_an_error_as_ever():
    model = prepared(build())
    install_tiled_mlp(model, 5)
    loss = loss_of(model, separate())
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.add_(1)
    with pytest.raises(RuntimeError, match="inplace"):
        loss.backward()


MIXTURES = {"mixtral": 2, "qwen3_moe": 2, "qwen2_moe": 3, "gpt_oss": 2, "glm4_moe": 3, "gemma4_moe": 4}
"""Modules that run over tiles: experts of each layer, experts that see every token, and MLPs of layers without."""
ROUNDED = {"gpt_oss": 1e-6, "gemma4_moe": 1e-5}
"""Where something is computed in float32, whatever the weights are in."""


def mixture(name, dtype, implementation):
    model = architectures.build(name).to(dtype)
    model.set_experts_implementation(implementation)
    return prepared(model)


def run_with_router(model, batch):
    """As `run`, with the auxiliary loss of the router where the family has one."""
    has_loss = model.config.model_type not in ("glm4_moe", "gemma4_text")
    output = score(model, batch, Scores(batch.score_index, batch.score_target, aux_loss=has_loss))
    loss = -output.scored.mean() + (3 * output.aux_loss if has_loss else 0)
    loss.backward()
    return loss.detach(), gradients(model)


@pytest.mark.parametrize("checkpointing", slow_but([None], CHECKPOINTING), ids=str)
@pytest.mark.parametrize("name", MIXTURES)
def test_experts_run_over_tiles(name, checkpointing):
    model = mixture(name, torch.float64, "eager")
    if checkpointing is not None:
        model.gradient_checkpointing_enable(checkpointing)
    loss, wanted = run_with_router(model, shared())
    tolerance = ROUNDED.get(name, 1e-12)
    for tile in (1, 7, 100):
        assert install_tiled_mlp(model, tile) == MIXTURES[name]
        tiled_loss, got = run_with_router(model, shared())
        torch.testing.assert_close(tiled_loss, loss, rtol=tolerance, atol=0)
        assert_close(got, wanted, tolerance)


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_other_implementations_of_experts_run_over_tiles(name, implementation):
    model = mixture(name, torch.float32, implementation)
    loss, wanted = run_with_router(model, shared())
    install_tiled_mlp(model, 7)
    tiled_loss, got = run_with_router(model, shared())
    torch.testing.assert_close(tiled_loss, loss, rtol=1e-5, atol=0)
    assert_close(got, wanted, 1e-5)


@pytest.mark.parametrize("adapted", [True, False])
def test_frozen_experts_pass_gradients_on(adapted):
    """To what is before them, and by the weights of experts to the router."""
    model = mixture("mixtral", torch.float64, "eager")
    if adapted:
        model = prepared(get_peft_model(model, LoraConfig(target_modules=["q_proj", "v_proj"])).double())
    else:
        for layer in model.model.layers:
            layer.mlp.experts.requires_grad_(False)
    loss, wanted = run(model, shared())
    install_tiled_mlp(model, 7)
    tiled_loss, got = run(model, shared())
    torch.testing.assert_close(tiled_loss, loss, rtol=1e-12, atol=0)
    assert_close(got, wanted, 1e-12)
    assert not any("experts.down_proj" in name for name in got)


def test_adapted_experts_are_refused():
    with pytest.raises(ValueError, match="a mixture whose experts, a ParamWrapper, are not transformers' own"):
        install_tiled_mlp(with_adapters(mixture("mixtral", torch.float32, "eager")), 7)


def test_tiles_of_experts_hold_fewer_bytes():
    def most(tile):
        model = mixture("mixtral", torch.float32, "grouped_mm")
        if tile is not None:
            install_tiled_mlp(model, tile)
        batch = RaggedBatch.from_segments([tokens(400)])
        with LivingBytes() as living, living.during("layers"):
            loss_of(model, batch)
        return living.peaks["layers"]

    assert most(16) < 0.8 * most(None)


LLAMA4 = {"intermediate_size_mlp": 48, "moe_layers": [0], "num_local_experts": 4, "num_experts_per_tok": 1}


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        ("llama4_text", LLAMA4, r"model\.layers\.0\.feed_forward, a Llama4TextMoe"),
        ("bloom", {"n_head": 4}, r"transformer\.h\.0\.mlp, a BloomMLP"),
        ("opt", {"ffn_dim": 48, "word_embed_proj_dim": 32}, "model type opt"),
        ("mamba", {"state_size": 4}, "model type mamba"),
    ],
)
def test_what_is_no_token_wise_mlp_is_refused(model_type, changes, message):
    with pytest.raises(ValueError, match=message):
        install_tiled_mlp(build(model_type, **changes), 8)


ENCODERS = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


@pytest.mark.parametrize("checkpointing", CHECKPOINTING[:2], ids=str)
@pytest.mark.parametrize("model_type", ["bert", "electra", "roberta-prelayernorm"])
def test_layers_that_run_their_mlp_by_a_method(model_type, checkpointing):
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **ENCODERS, vocab_size=96, pad_token_id=0, hidden_dropout_prob=0.0)
    model = AutoModelForMaskedLM.from_config(config, dtype=torch.float64).train()
    if checkpointing is not None:
        model.gradient_checkpointing_enable(checkpointing)
    ids = torch.arange(1, 43).view(3, 14)

    def pass_through():
        model.zero_grad()
        logits = model(input_ids=ids).logits
        logits.square().mean().backward()
        return logits.detach(), gradients(model)

    model.config.attention_probs_dropout_prob = 0.0
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    expected, wanted = pass_through()
    names = set(model.state_dict())
    for tile in (1, 5, 100):
        assert install_tiled_mlp(model, tile) == 2
        found, got = pass_through()
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
        assert_close(
            {n: g for n, g in got.items() if "key.bias" not in n},
            {n: g for n, g in wanted.items() if "key.bias" not in n},
            1e-10,
        )
    assert set(model.state_dict()) == names
    copied = copy.deepcopy(model)
    nn.init.zeros_(model.get_input_embeddings().weight)
    torch.testing.assert_close(copied(input_ids=ids).logits, expected, rtol=1e-12, atol=1e-14)


class Mixing(nn.Module):
    """Looks like an MLP, and lets tokens see each other."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return self.down(self.up(x).softmax(dim=1))


def test_tokens_that_see_each_other_are_found_out():
    with pytest.raises(ValueError, match=r"mlp, a Mixing.*other values"):
        install_tiled_mlp(nn.ModuleDict({"mlp": Mixing()}), 8)
    with pytest.raises(ValueError, match="0 tokens"):
        install_tiled_mlp(build(), 0)


@pytest.mark.parametrize("quantized", [False, True])
def test_products_in_16_bits_may_differ_by_their_rounding(quantized):
    """As those of 4-bit layers do, whose kernels go by the number of tokens, with float32 adapters around them."""

    class MLP(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.adapter = nn.Linear(4, 4)
            if quantized:
                self.codes = nn.Parameter(torch.zeros(2, dtype=torch.uint8), requires_grad=False)

        def forward(self, x):
            return self.adapter(x) * (1 + 2e-3 * (x.shape[1] > 2))

    model = nn.ModuleDict({"mlp": MLP()})
    if quantized:
        assert install_tiled_mlp(model, 8) == 1
    else:
        with pytest.raises(ValueError, match="it gives other values for tiles than for all tokens"):
            install_tiled_mlp(model, 8)


def test_installing_leaves_modes_and_random_numbers_alone():
    model = build()
    model.model.layers[0].mlp.eval()
    before = torch.get_rng_state()
    install_tiled_mlp(model, 8)
    assert torch.equal(torch.get_rng_state(), before)
    assert not model.model.layers[0].mlp.training
    assert model.model.layers[1].mlp.training


RESIDENT = """
import sys, torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP
from lowtide.memory.allocators.host_heap import trim_heap
from lowtide.memory.allocators.measure import peak_resident_bytes
from lowtide.engine.forward import causal_model, score
from lowtide.engine.heads.head import Scores
from lowtide.memory.activations.tiled_mlp import install_tiled_mlp

model = torch.nn.ModuleDict({"mlp": LlamaMLP(LlamaConfig(hidden_size=64, intermediate_size=1024))})
x = torch.randn(1, 8192, 64, requires_grad=True)  # the inner tensors are 32 MiB each

def rise():
    trim_heap(near=1)
    before = peak_resident_bytes()
    model["mlp"](x).sum().backward()
    return (peak_resident_bytes() - before) >> 20

install_tiled_mlp(model, 512)
first = rise()
install_tiled_mlp(model, len(x[0]))
print(first, rise())
"""


@pytest.mark.slow
def test_resident_memory_falls():
    done = subprocess.run([sys.executable, "-c", RESIDENT], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    tiled, whole = map(int, done.stdout.split())
    assert whole > 90
    assert tiled < whole / 2


class Casts(TorchDispatchMode):
    """Counts casts to bfloat16 by the shape of what is cast."""

    def __init__(self):
        super().__init__()
        self.seen = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._to_copy.default:
            self.seen[tuple(args[0].shape)] += 1
        return func(*args, **(kwargs or {}))


def test_autocast_casts_each_weight_once_for_all_tiles_and_keeps_none():
    model = build("llama", torch.float32)
    install_tiled_mlp(model, 5)
    mlp = causal_model(model).model.layers[0].mlp
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False), Casts() as casts:
        mlp(torch.randn(1, 14, mlp.hidden_size))
        assert not torch.is_autocast_cache_enabled()
    assert casts.seen[tuple(mlp.gate_proj.weight.shape)] == 2  # and that of up_proj
    assert casts.seen[tuple(mlp.down_proj.weight.shape)] == 1
