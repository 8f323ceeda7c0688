"""Trained layers in pinned host memory: the same bits, and a lower peak."""

import gc

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from lowtide.engine.forward import install, score
from lowtide.memory.optimizers.optimizer_in_backward import OptimizerInBackward
from lowtide.memory.optimizers.streamed_states import StreamedStates
from lowtide.memory.weights.trained_layers import TrainedLayers
from lowtide.run.streamed_weights import attach_trained
from lowtide.step.updaters.in_backward import InBackward
from tests.support.memory.gpu_batch import batch

CUDA = torch.device("cuda")


def build():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=500, hidden_size=1024, intermediate_size=4096, num_hidden_layers=12, num_attention_heads=8
    )
    model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16).train()
    install(model)
    return model


def test_the_same_bits_and_a_lower_peak(peak_above_start):
    tokens, found = batch(), []
    torch.use_deterministic_algorithms(True)
    for streams in (False, True):
        model = build()
        stream = attach_trained(model, TrainedLayers(CUDA), CUDA) if streams else None
        if stream is None:
            model.to(CUDA)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        if stream is not None:
            optimizer.host_states = StreamedStates(optimizer, stream, CUDA)
        steps: OptimizerInBackward = InBackward(optimizer, model, 0.0).steps

        def step(model=model, stream=stream, steps=steps, optimizer=optimizer):
            with steps.armed():
                with torch.enable_grad() if stream is None else stream.store.around():
                    loss = -score(model, tokens).scored.mean()
                loss.backward()
            optimizer.step()

        step()
        base = torch.cuda.memory_allocated()
        found.append((base + peak_above_start(step), {n: p.detach().cpu() for n, p in model.named_parameters()}))
        del model, optimizer, steps, step, stream
        gc.collect()  # a model is a cycle
    torch.use_deterministic_algorithms(False)
    (plain_peak, wanted), (streamed_peak, got) = found
    assert [name for name, weight in wanted.items() if not torch.equal(weight, got[name])] == []
    layers = sum(w.nbytes for name, w in wanted.items() if ".layers." in name)
    assert plain_peak - streamed_peak > 0.75 * 3 * layers  # weights and two moments, but for the layers on their way
