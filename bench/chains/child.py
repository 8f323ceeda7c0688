"""One run of `bench.chains`, in a process of its own: a step of one row, in pieces or whole.

Called with a JSON specification: `tokens` of the row, `cap` of a piece (left out: the row is run whole),
`checkpointing` (on unless false), `window` of all layers, `storage` of keys as `chain_storage` has it, `compare` the
gradients with those of the whole row.
"""

import json
import time
from typing import Any

from bench.measuring.arguments import specification
from bench.measuring.measure import reset_high_water_mark, resident_bytes
from bench.measuring.processes import MARK

VOCABULARY, HIDDEN, INNER, HEADS = 32_000, 384, 1024, 6
LAYERS, KV_HEADS = 6, 2


def main(spec: dict[str, Any]) -> dict[str, Any]:
    """Returns seconds and peak of the step, beyond what the imports hold."""
    import torch

    from lowtide.engine.forward import install
    from lowtide.memory.activations.chain_storage import DEVICE, place_maker
    from lowtide.memory.allocators.host_heap import settle_heap
    from lowtide.methods.sft import SFTOptions, objective
    from lowtide.ragged import RaggedBatch
    from lowtide.step.models import Models
    from lowtide.step.train_step import train_step
    from lowtide.step_plan import Limits

    model = build(spec)
    imports = resident_bytes("VmRSS") - sum(p.nbytes for p in model.parameters())
    install(model)
    settle_heap(model)
    place = place_maker(spec.get("storage", DEVICE), model, torch.device("cpu"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    loss_of = objective(SFTOptions())

    def row(tokens: int) -> RaggedBatch:
        ids = torch.randint(3, VOCABULARY, (tokens,), generator=torch.Generator().manual_seed(tokens))
        return RaggedBatch.from_rows([{"input_ids": ids.tolist()}])

    def gradients(cap: int | None) -> float:
        return train_step(Models(model, place=place), batch, loss_of, limits=Limits(tokens=cap)).item()

    batch = row(64)
    gradients(None)
    optimizer.step()  # which makes its moments
    optimizer.zero_grad()
    batch = row(spec["tokens"])
    reset_high_water_mark()
    began = time.perf_counter()
    loss = gradients(spec.get("cap"))
    found: dict[str, Any] = {}
    if spec.get("compare"):
        ours = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        optimizer.zero_grad()
        whole = gradients(None)
        errors = [(ours[n] - p.grad).norm() / p.grad.norm() for n, p in model.named_parameters() if p.grad is not None]
        found |= {"gradient_error": max(errors).item(), "loss_error": abs(loss - whole) / whole}
    optimizer.step()
    seconds = time.perf_counter() - began
    return found | {"seconds": seconds, "peak_bytes": resident_bytes("VmHWM") - imports, "loss": loss}


def build(spec: dict[str, Any]) -> Any:
    """The model, in training."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig

    window = spec.get("window")
    kind = LlamaConfig if window is None else MistralConfig
    more = {} if window is None else {"sliding_window": window}
    config = kind(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=1 << 18,
        tie_word_embeddings=True,
        **more,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).train()
    if spec.get("checkpointing", True):
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


if __name__ == "__main__":
    print(MARK + json.dumps({"kind": "result", **main(specification(__doc__))}), flush=True)
