"""The whole of direct preference optimization as one flat loop, without a Trainer: what `lowtide dpo` does.

    python examples/minimal_dpo.py

A tiny model learns which of two answers to a sum is preferred. A pair is three segments, prompt, chosen and
rejected; the prompt is computed once, and only completions meet the vocabulary.
"""

import random

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from lowtide.engine.forward import install, score
from lowtide.engine.heads.head import Scores
from lowtide.engine.reference import FrozenModel
from lowtide.methods.dpo import DPOOptions
from lowtide.objectives.preference import Pairs, sigmoid
from lowtide.ragged import RaggedBatch

STEPS, PAIRS = 60, 16


def make_pair(rng: random.Random) -> tuple[list[int], list[int], list[int]]:
    """(prompt, chosen, rejected): a + b =, the sum, and a number that it is not. Tokens are digits, 10 and 11."""
    a, b = rng.randrange(50), rng.randrange(50)
    digits = lambda number: [int(digit) for digit in str(number)]  # noqa: E731
    wrong = rng.choice([number for number in range(100) if number != a + b])
    return [*digits(a), 10, *digits(b), 11], digits(a + b), digits(wrong)


def lay(pairs: list) -> RaggedBatch:
    """Three segments a pair; the prompt is not scored, and stands before both completions."""
    tokens = [segment for pair in pairs for segment in pair]
    labels = [side if place % 3 else [-100] * len(side) for place, side in enumerate(tokens)]
    prefix = [(place // 3) * 3 if place % 3 else -1 for place in range(len(tokens))]
    return RaggedBatch.from_segments(tokens, labels, prefix=prefix, row=[place // 3 for place in range(len(tokens))])


def completions(logprobs: torch.Tensor, batch: RaggedBatch) -> torch.Tensor:
    """[pairs, 2]: log-probabilities summed over the chosen and the rejected completion."""
    sums = logprobs.new_zeros(len(batch.segments)).index_add(0, batch.score_segment, logprobs)
    return sums.view(-1, 3)[:, 1:]


torch.manual_seed(0)
rng = random.Random(0)
config = Qwen3Config(
    vocab_size=12,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    head_dim=16,
)
model = AutoModelForCausalLM.from_config(config)
install(model)
reference = FrozenModel.copy_of(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
options = DPOOptions(beta=0.5)

for step in range(1, STEPS + 1):
    batch = lay([make_pair(rng) for _ in range(PAIRS)])
    policy = completions(score(model, batch, Scores(batch.score_index, batch.score_target)).scored, batch)
    referred = completions(reference(batch), batch)
    lengths = torch.tensor([float(part.length) for part in batch.segments]).view(-1, 3)
    pairs = Pairs(policy[:, 0], policy[:, 1], referred[:, 0], referred[:, 1], lengths[:, 1], lengths[:, 2])
    loss = sigmoid(pairs, options).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 10 == 0:
        accuracy = (pairs.chosen_ratio > pairs.rejected_ratio).float().mean()
        print(f"step {step:3}  loss {loss.item():.3f}  preferred {accuracy:.0%}  tokens {batch.tokens}")
