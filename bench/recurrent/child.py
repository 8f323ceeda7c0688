"""A part of `bench.recurrent`, in a process of its own: steps of one model, or completions, with or without padding."""

import random
import time
from typing import Any

from bench.compare.child import measure_contestant, say
from bench.generation.contestants import asked, generate, ours
from bench.inputs.generated import lognormal_lengths
from bench.inputs.rows import generated_dialogues
from bench.inputs.shapes import Shape, build_model
from bench.measuring.arguments import specification
from bench.measuring.measure import PeakMeter

VOCABULARY = 4096
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
}
DELTA_RULE: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "head_dim": 64,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
}
MAMBA_2: dict[str, Any] = {
    "model_type": "bamba",
    "mamba_n_heads": 12,
    "mamba_d_head": 64,
    "mamba_d_state": 64,
    "mamba_expand": 2,
    "mamba_chunk_size": 256,
    "attn_layer_indices": [3],
}
MODELS = {
    "gated delta rule": Shape(SIZES | DELTA_RULE, device="cpu", dtype="float32"),
    "Mamba-2": Shape(SIZES | MAMBA_2, device="cpu", dtype="float32"),
}
"""A Qwen3.5 and a Bamba of three recurrent layers and one of attention."""
LENGTHS = range(50, 501, 30)
"""Tokens of rows, which come in another order."""
PROMPT, COMPLETIONS = 300, range(60, 131, 10)


def rows_of(what: str) -> Any:
    """The batch of a step: rows of many lengths, or a group of completions of one prompt."""
    import torch

    from lowtide.ragged import RaggedBatch
    from lowtide.score_rules import IGNORE

    generator = torch.Generator().manual_seed(0)

    def draw(length: int) -> list[int]:
        return torch.randint(3, VOCABULARY, (length,), generator=generator).tolist()

    if what == "rows":
        order = torch.randperm(len(LENGTHS), generator=generator).tolist()
        return RaggedBatch.from_segments([draw(LENGTHS[number]) for number in order])
    own = [draw(length) for length in COMPLETIONS]
    labels = [[IGNORE] * PROMPT, *own]
    return RaggedBatch.from_segments([draw(PROMPT), *own], labels, prefix=[-1] + [0] * len(own), row=[0] * len(labels))


def steps(spec: dict[str, Any]) -> dict[str, Any]:
    """Seconds of forwards with their backwards, the loss, and the peak above the model."""
    from lowtide.engine.forward import install, score
    from lowtide.memory.activations.checkpointing import set_checkpointing

    model, batch, free = build_model(MODELS[spec["model"]]).train(), rows_of(spec["what"]), spec["ragged"]
    install(model, padding_free=free)
    if (policy := spec.get("policy")) is not None:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        set_checkpointing(model, policy)
    meter, seconds = PeakMeter("cpu"), []
    meter.start()
    for _ in range(spec["times"]):
        model.zero_grad()
        began = time.perf_counter()
        loss = -score(model, batch, padding_free=free).scored.mean()
        loss.backward()
        seconds.append(time.perf_counter() - began)
    return {"seconds": seconds, "loss": loss.item(), **meter.stop()}


def completions(spec: dict[str, Any]) -> dict[str, Any]:
    """Seconds to draw the completions of some prompts, prompts included, and their tokens."""
    writer, (prompts, lengths) = ours if spec["ragged"] else generate, asked(VOCABULARY)
    write_all, seconds, meter = writer(prompts, lengths, MODELS[spec["model"]]), [], PeakMeter("cpu")
    meter.start()
    for _ in range(spec["times"]):
        began = time.perf_counter()
        tokens = write_all(1.0)
        seconds.append(time.perf_counter() - began)
    return {"seconds": seconds, "tokens": tokens, **meter.stop()}


def long_tailed() -> list[dict[str, Any]]:
    """Conversations of log-normal lengths, shorter than those of `bench.compare`, so that TRL's peak stays small."""
    rng = random.Random(9)
    return generated_dialogues(lognormal_lengths(90, 1.2, rng, rows=64, shortest=8, longest=400), rng)


def trained(spec: dict[str, Any]) -> dict[str, Any]:
    """A few steps of supervised fine-tuning by one of two libraries."""
    return measure_contestant(spec, long_tailed())


EXPERTS, CHOSEN, TOKENS, RANK = 64, 8, 2048, 8
EXPERT_SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 512,
    "moe_intermediate_size": 256,
    "num_experts": EXPERTS,
    "num_experts_per_tok": CHOSEN,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}


def experts(spec: dict[str, Any]) -> dict[str, Any]:
    """Seconds of forwards with their backwards of one layer's experts with adapters, and the peak above the model."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    from lowtide.compat.peft import adapted_stacks
    from lowtide.engine.layers.experts import install_experts

    torch.manual_seed(0)
    base: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_moe", **EXPERT_SIZES), dtype=torch.float32)
    stacks = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    model = get_peft_model(base, LoraConfig(r=RANK, target_modules=[], target_parameters=stacks))
    (layer,) = adapted_stacks(model)
    if spec["grouped"]:
        install_experts(model)
    weights, chosen = torch.rand(TOKENS, EXPERTS).topk(CHOSEN)
    meter, seconds = PeakMeter("cpu"), []
    meter.start()
    for _ in range(spec["times"]):
        model.zero_grad()
        x = torch.randn(TOKENS, EXPERT_SIZES["hidden_size"], requires_grad=True)
        began = time.perf_counter()
        layer(x, chosen, weights).square().sum().backward()
        seconds.append(time.perf_counter() - began)
    return {"seconds": seconds, **meter.stop()}


PARTS = {"experts": experts, "rows": steps, "group": steps, "rollouts": completions, "sft": trained}


if __name__ == "__main__":
    given = specification(__doc__)
    say("result", **PARTS[given["what"]](given))
