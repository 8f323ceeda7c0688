"""One run of `bench.attention_heads`, in a process of its own: one row forward and back, and its peak.

Called with a JSON specification as its only argument. Gradients are there before the measured step, so that whatever is
held beyond is what the step itself takes.
"""

import time
from typing import Any

from bench.compare.child import say
from bench.measuring.arguments import specification
from bench.measuring.measure import PeakMeter

TILE = 512
SHAPE = {
    "model_type": "qwen3",
    "vocab_size": 1024,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131_072,
    "tie_word_embeddings": True,
}


def main() -> None:
    spec = specification(__doc__)
    say("result", **run(spec["groups"], spec["tokens"]))


def run(groups: int, tokens: int) -> dict[str, Any]:
    """Returns the peak above weights and gradients, the time, the loss and the norm of the gradients."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from lowtide.engine.forward import install, score
    from lowtide.memory.activations.attention_heads import install_attention_heads
    from lowtide.memory.activations.checkpointing import set_checkpointing
    from lowtide.memory.activations.tiled_mlp import install_tiled_mlp
    from lowtide.ragged import RaggedBatch

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**SHAPE)).train()
    install(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    set_checkpointing(model)
    install_tiled_mlp(model, TILE)
    if groups > 1:
        install_attention_heads(model, groups)

    def step(length: int) -> float:
        row = torch.randint(SHAPE["vocab_size"], (length,), generator=torch.Generator().manual_seed(1))
        loss = -score(model, RaggedBatch.from_segments([row.tolist()])).scored.mean()
        loss.backward()
        return loss.item()

    step(64)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    meter = PeakMeter("cpu")
    meter.start()
    began = time.process_time()
    loss = step(tokens)
    seconds = time.process_time() - began
    peak = meter.stop()["above_start_bytes"]
    grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    norm = torch.stack([grad.double().norm() for grad in grads]).norm().item()
    return {"peak_bytes": peak, "cpu_seconds": seconds, "loss": loss, "norm": norm}


if __name__ == "__main__":
    main()
