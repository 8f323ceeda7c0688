"""Writing by a copy of the weights: what is written, what stands in while it is, and that nothing is left of it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn

from lowtide.engine.adapters import adapters_off
from lowtide.engine.forward import causal_model, compute_in, install
from lowtide.engine.weights import generation_copy
from lowtide.engine.weights.generation_copy import GenerationCopy
from lowtide.engine.weights.reference_storage import in_4_bits, in_8_bits
from lowtide.memory.kernels.fused_layers import fuse_layers
from lowtide.ops import few_rows
from lowtide.ops.layers.stacks import put_stack_in_4_bits, put_stack_in_float8
from lowtide.rollout.generators.generator import Completion, Request, Sampling
from lowtide.rollout.generators.ragged import RaggedGenerator
from tests.support.models.adapted_models import STACKS, adapted_experts
from tests.support.models.architectures import build
from tests.support.references.distances import far
from tests.support.runs.generating import prompt, token_ids

SAMPLING = Sampling(8)
REQUESTS = [Request(prompt(3), 2, seed=1), Request(prompt(9), 2, seed=2)]
TARGETS = ["q_proj", "v_proj", "up_proj", "down_proj"]


def adapted(model: Any, **config: Any) -> PeftModel:
    """With adapters that change what is written."""
    model = get_peft_model(model, LoraConfig(r=3, target_modules=TARGETS, **config))
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) / 4)
    return model


def prepared(model: Any, computed_in: torch.dtype | None = None) -> Any:
    install(model)
    compute_in(model, computed_in)
    return model


def written(model: Any, copied: GenerationCopy | None) -> list[list[Completion]]:
    return RaggedGenerator(copy=copied).generate(model, REQUESTS, SAMPLING)


def logprobs(found: list[list[Completion]]) -> torch.Tensor:
    return torch.tensor([[each.logprobs, each.plain_logprobs] for group in found for each in group])


def check_same(model: Any, tolerance: float = 0.0, *, copied: int) -> None:
    """Of so many layers there is a copy, by which the same is written."""
    expected = written(model, None)
    before = dict(model.named_modules()), {name: id(p) for name, p in model.named_parameters()}
    made = GenerationCopy()
    predicted = made.bytes_of(model)
    with made.standing_in(model) as layers:
        held = [weight for each in layers for weight in each.weights]
        assert len(held) == copied
        assert sum(weight.numel() * weight.element_size() for weight in held) == predicted
    assert all(weight.numel() == 0 for weight in held)
    found = written(model, made)
    assert token_ids(found) == token_ids(expected)
    assert far(logprobs(found), logprobs(expected)) <= tolerance
    assert dict(model.named_modules()) == before[0]
    assert {name: id(p) for name, p in model.named_parameters()} == before[1]


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_masters_are_cast_once(name: str):
    model = prepared(build(name), torch.bfloat16)
    linears = sum(type(module) is nn.Linear for module in model.modules())
    check_same(model, copied=linears)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_weights_in_float32_are_laid_out_for_few_rows(name: str, fused: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(few_rows, "SMALLEST", 1)
    model = prepared(build(name))
    linears = [module for module in model.modules() if type(module) is nn.Linear]
    rows: list[int] = []
    product = few_rows.laid_out_product
    watched = lambda x, *of: rows.append(x.numel() // x.shape[-1]) or product(x, *of)  # noqa: E731
    monkeypatch.setattr(few_rows, "laid_out_product", watched)
    undo = fuse_layers(model) if fused else lambda: None
    expected, found = written(model, None), written(model, made := GenerationCopy())
    undo()
    assert rows.count(4) == (SAMPLING.max_new_tokens - 1) * len(linears) + 1  # the head's of the prompts
    assert token_ids(found) == token_ids(expected)
    assert far(logprobs(found), logprobs(expected)) <= 1e-6
    assert made.bytes_of(model) == sum(each.weight.numel() * 4 for each in linears)
    assert not any(vars(each) for each in model.parameters())


def test_masters_are_cast_once_beside_adapters_in_16_bits():
    model = prepared(adapted(build("llama")), torch.bfloat16)
    layers = causal_model(model).config.num_hidden_layers
    check_same(model, copied=layers * (7 + 2 * len(TARGETS)) + 1)


def test_adapters_are_merged_where_products_are_in_float32():
    model = prepared(adapted(build("llama")))
    check_same(model, 1e-6, copied=causal_model(model).config.num_hidden_layers * len(TARGETS))


@pytest.mark.parametrize("computed_in", [None, torch.bfloat16])
@pytest.mark.parametrize("store", [in_4_bits, in_8_bits])
def test_quantized_weights_are_made_dense_once(store: Any, computed_in: torch.dtype | None):
    pytest.importorskip("bitsandbytes")
    pytest.importorskip("torchao")
    model = build("llama")
    store(model, torch.device("cpu"))
    model = prepared(adapted(model), computed_in)
    layers = causal_model(model).config.num_hidden_layers
    if computed_in is None:
        check_same(model, 1e-6, copied=layers * 7)
    else:
        check_same(model, copied=layers * (7 + 2 * len(TARGETS)) + 1)


@pytest.mark.parametrize("kind", STACKS)
def test_adapters_of_experts_are_merged_where_products_are_in_float32(kind: str):
    model = prepared(adapted_experts(kind))
    stacks = sum(hasattr(module, "parameter_name") for module in model.modules())
    queries = sum(name.endswith("q_proj.base_layer") for name, _ in model.named_modules())
    check_same(model, 1e-6, copied=stacks + queries)


@pytest.mark.parametrize("store", [put_stack_in_float8, put_stack_in_4_bits])
@pytest.mark.parametrize("computed_in", [None, torch.bfloat16])
def test_quantized_experts_are_made_dense_once(store: Any, computed_in: torch.dtype | None):
    pytest.importorskip("bitsandbytes")
    model = prepared(adapted_experts("qwen3_moe", store=store), computed_in)
    made = GenerationCopy()
    with made.standing_in(model) as layers:
        experts = [each for each in layers if any(weight.dim() == 3 for weight in each.weights)]
        assert len(experts) == causal_model(model).config.num_hidden_layers
        assert {weight.dtype for each in experts for weight in each.weights} == {computed_in or torch.float32}
    expected, found = written(model, None), written(model, made)
    assert token_ids(found) == token_ids(expected)
    assert far(logprobs(found), logprobs(expected)) <= (1e-6 if computed_in is None else 0.0)


def test_what_is_merged_in_16_bits_is_the_rounded_sum():
    model = prepared(adapted(build("llama")), torch.bfloat16)
    merged = copy.deepcopy(model).merge_and_unload()
    compute_in(prepared(merged), torch.bfloat16)
    found = written(model, GenerationCopy(merges=True))
    expected = written(merged, None)
    assert token_ids(found) == token_ids(expected)
    torch.testing.assert_close(logprobs(found), logprobs(expected), atol=0, rtol=0)
    assert not torch.equal(logprobs(found), logprobs(written(model, None)))


def test_the_base_writes_by_its_own_weights():
    model = prepared(adapted(build("llama")))
    base = written(prepared(build("llama")), None)
    with adapters_off(model):
        found = written(model, GenerationCopy())
    assert token_ids(found) == token_ids(base)
    assert token_ids(found) != token_ids(written(model, GenerationCopy()))


def test_other_kinds_of_adapters_stay_beside_the_weights():
    model = prepared(adapted(build("llama"), use_dora=True))
    check_same(model, copied=0)


def test_nothing_is_left_where_there_is_no_memory(monkeypatch: pytest.MonkeyPatch):
    model, made = prepared(build("llama"), torch.bfloat16), []
    before = dict(model.named_modules())

    def fails(layer: nn.Linear) -> None:
        made.append(layer)
        if len(made) == 5:
            raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(generation_copy, "install_linear", fails)
    with pytest.raises(torch.OutOfMemoryError):
        written(model, GenerationCopy())
    assert dict(model.named_modules()) == before


def test_fused_layers_run_by_the_copy():
    model = prepared(adapted(build("llama")))
    fuse_layers(model)
    check_same(model, 1e-6, copied=causal_model(model).config.num_hidden_layers * len(TARGETS))
