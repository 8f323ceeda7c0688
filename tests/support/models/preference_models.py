"""Tiny policies and references in float64, rows of preferences, and their dense computation."""

from __future__ import annotations

import copy
import functools

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from lowtide.engine.forward import install
from lowtide.step_plan import Limits

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
}


CUTS = [Limits(), Limits(rows=8), Limits(rows=3), Limits(rows=1), Limits(tokens=60)]


def build(seed: int = 0, config=LlamaConfig, kind=AutoModelForCausalLM, **more):
    torch.manual_seed(seed)
    model = kind.from_config(config(**SIZES, **more))
    install(model)
    return model.double()


def pair_rows(count: int = 8) -> list[dict]:
    generator = torch.Generator().manual_seed(3)

    def tokens(low: int, high: int) -> list[int]:
        length = int(torch.randint(low, high, (), generator=generator))
        return torch.randint(0, 61, (length,), generator=generator).tolist()

    made = [
        {"prompt_ids": tokens(2, 12), "chosen_ids": tokens(1, 9), "rejected_ids": tokens(1, 9), "margin": number / 4}
        for number in range(count)
    ]
    made[1]["prompt_ids"] = made[0]["prompt_ids"]
    return made


def gradients(model) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def assert_equal(ours: dict, theirs: dict, tolerance: float = 3e-6) -> None:
    for name, grad in theirs.items():
        assert (ours[name] - grad).norm() <= tolerance * grad.norm() + 1e-12, name


def dense(model):
    """A copy of a model as transformers makes it."""
    plain = copy.deepcopy(model)
    plain.zero_grad()
    del plain.forward
    plain.get_input_embeddings().__dict__.pop("forward", None)
    plain.set_attn_implementation("eager")
    return plain


def dense_logprobs(model, prompt: list[int], completion: list[int]) -> torch.Tensor:
    """[tokens - 1]: log-probs of a whole sequence from the model's own logits."""
    ids = torch.tensor([prompt + completion])
    logits = type(model).forward(model, input_ids=ids).logits[0, :-1]
    return torch.log_softmax(logits, -1).gather(-1, ids[0, 1:, None])[:, 0]


@functools.cache
def policy_and_reference():
    return build(0), build(1)


def unpaired_rows(labels: str = "10010110") -> list[dict]:
    made = []
    for number, (row, label) in enumerate(zip(pair_rows(), labels, strict=True)):
        strange = pair_rows()[number - 1]["chosen_ids"]
        made.append(
            {
                "prompt_ids": row["prompt_ids"],
                "completion_ids": row["chosen_ids"],
                "kl_completion_ids": strange,
                "label": label == "1",
            }
        )
    return made
