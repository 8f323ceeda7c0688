"""The whole of group relative policy optimization as one flat loop, without a Trainer: what `lowtide grpo` does.

    python examples/minimal_grpo.py

A tiny model learns to repeat the digit that it is shown. It starts from random weights and sees no right answer: it
writes completions, a function rewards them, and those that are better than the others of their prompt become likelier.
A prompt is computed once for its completions, in writing and in learning.
"""

import random

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from lowtide.data.batches.values import TOKEN_ADVANTAGE, WINDOW_TOKENS
from lowtide.engine.forward import install
from lowtide.methods import METHODS
from lowtide.methods.online.grpo import GRPOOptions
from lowtide.objectives.advantages import relative_to_group
from lowtide.rollout.generators.generator import Request, Sampling
from lowtide.rollout.generators.ragged import RaggedGenerator
from lowtide.rollout.rollout import Rollout
from lowtide.step.runner import StepOptions, StepRunner
from lowtide.step.updaters.updater import Updater

STEPS, PROMPTS, GROUP, LONGEST = 40, 16, 8, 6
ASK, STOP = 10, 11


def make_prompt(rng: random.Random) -> list[int]:
    """A digit and the token that asks for it. Tokens are digits, ASK and STOP."""
    return [rng.randrange(10), ASK]


def reward(prompt: list[int], completion: list[int]) -> float:
    """The share of the completion's tokens that are the prompt's digit."""
    return sum(token == prompt[0] for token in completion) / len(completion)


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
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
runner = StepRunner(
    model,
    METHODS["grpo"].objective(GRPOOptions(loss_type="dapo")),
    StepOptions(tokens_per_microbatch=400, max_grad_norm=1.0),
    updater=Updater(optimizer),
)
generator = RaggedGenerator()
sampling = Sampling(max_new_tokens=LONGEST, stop_ids=(STOP,))

runner.begin()
for step in range(1, STEPS + 1):
    # generate: the seed of a request keys the random numbers of its completions
    requests = [Request(make_prompt(rng), GROUP, seed=step * PROMPTS + number) for number in range(PROMPTS)]
    groups = generator.generate(model, requests, sampling)
    prompts = [list(request.prompt_ids) for request in requests for _ in range(GROUP)]
    rollout = Rollout(prompts, [one for group in groups for one in group], version=step - 1)

    # reward: a column for each reward function, here one
    rewards = torch.tensor([[reward(p, one.token_ids)] for p, one in zip(prompts, rollout.completions, strict=True)])
    advantages = relative_to_group(rewards, torch.ones(1), GROUP)
    lengths = torch.tensor(rollout.lengths)
    rollout.score_values[TOKEN_ADVANTAGE] = advantages.values.float().repeat_interleave(lengths)
    rollout.row_values[WINDOW_TOKENS] = torch.full((len(rollout),), float(sum(rollout.lengths)))

    # update: the policy wrote these completions with the weights that it still has, so ratios begin at 1
    loss = runner.gradients(rollout.batch())
    runner.clip()
    optimizer.step()
    optimizer.zero_grad()
    if step % 5 == 0:
        equal = advantages.without_spread.float().mean()
        print(f"step {step:3}  reward {rewards.mean():.2f}  groups without spread {equal:.0%}")
runner.end()
