"""Layers in pinned host memory: the same bits, and a lower peak."""

import gc

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig

from lowtide.engine.forward import install, score
from lowtide.memory.weights.pinned_layers import PinnedLayers
from lowtide.memory.weights.streaming import WeightStream
from tests.support.memory.gpu_batch import batch

CUDA = torch.device("cuda")
LAYERS = 12


def build():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=500, hidden_size=1024, intermediate_size=4096, num_hidden_layers=LAYERS, num_attention_heads=8
    )
    model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16).train()
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    install(adapted)
    return adapted


@pytest.fixture(autouse=True)
def _deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("checkpointing", [None, {"use_reentrant": False}, {"use_reentrant": True}], ids=str)
def test_the_same_bits_and_a_lower_peak(checkpointing, peak_above_start):
    tokens, found = batch(), []
    for streams in (False, True):
        model = build()
        if checkpointing is not None:
            model.enable_input_require_grads()
            model.gradient_checkpointing_enable(checkpointing)
        if streams:
            frozen = [p for p in model.parameters() if not p.requires_grad]
            stream = WeightStream(model, frozen, PinnedLayers(CUDA))
            streamed = {id(weight) for weight in stream.weights}
            for tensor in (*model.parameters(), *model.buffers()):
                if id(tensor) not in streamed:
                    tensor.data = tensor.data.to(CUDA)
            around = stream.store.around
        else:
            model.to(CUDA)
            around = torch.enable_grad

        def step(model=model, around=around):
            with around():
                loss = -score(model, tokens).scored.mean()
            loss.backward()

        step()
        model.zero_grad(set_to_none=False)
        base = torch.cuda.memory_allocated()
        peak = base + peak_above_start(step)
        found.append((peak, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}))
        del model, step, around
        gc.collect()  # a model is a cycle
    (plain_peak, wanted), (streamed_peak, got) = found
    assert [name for name, grad in wanted.items() if not torch.equal(grad, got[name])] == []
    assert streamed_peak < plain_peak
