"""Activations in pinned host memory: the same bits, and a lower peak."""

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from lowtide.engine.forward import install, score
from lowtide.memory.activations.offloading import ActivationOffload
from tests.support.memory.gpu_batch import batch

CUDA = torch.device("cuda")


def build() -> PreTrainedModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=500, hidden_size=512, intermediate_size=1024, num_hidden_layers=8, num_attention_heads=8
    )
    model = AutoModelForCausalLM.from_config(config).to(CUDA, torch.bfloat16).train()
    install(model)
    return model


@pytest.fixture(autouse=True)
def _deterministic():
    torch.use_deterministic_algorithms(True)  # with warn_only, attention's backward still adds up in any order
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("checkpointing", [None, {"use_reentrant": False}, {"use_reentrant": True}], ids=str)
def test_the_same_bits_and_a_lower_peak(checkpointing, peak_above_start):
    model, tokens = build(), batch()
    if checkpointing is not None:
        model.gradient_checkpointing_enable(checkpointing)

    def step():
        (-score(model, tokens).scored.mean()).backward()

    def offloaded_step():
        with offload.around():
            loss = -score(model, tokens).scored.mean()
        loss.backward()

    offload = ActivationOffload(model, CUDA)
    step()  # makes the gradients, and whatever the libraries want
    model.zero_grad(set_to_none=False)
    plain_peak = peak_above_start(step)
    wanted = {name: p.grad.clone() for name, p in model.named_parameters()}
    for _ in range(3):
        model.zero_grad(set_to_none=False)
        offloaded_peak = peak_above_start(offloaded_step)
        assert [name for name, p in model.named_parameters() if not torch.equal(p.grad, wanted[name])] == []
    assert offload.offloaded_bytes == 0
    assert offload.peak_offloaded_bytes > 0
    if checkpointing is None:
        assert offloaded_peak < plain_peak / 2


def test_host_memory_is_bounded():
    model = build()
    offload = ActivationOffload(model, CUDA, max_host_bytes=32 << 20)
    with offload.around():
        loss = -score(model, batch()).scored.mean()
    assert 0 < offload.offloaded_bytes <= 32 << 20
    loss.backward()
    assert offload.offloaded_bytes == 0
