"""Supervised fine-tuning as one flat loop, without a Trainer: what `SFTTrainer` does, in the order it does it.

Rows become token rows, token rows a ragged batch, the batch one forward a micro-batch, whose loss is known there and
then. No padding and no logits anywhere. Runs on a CPU in seconds: `python examples/minimal_sft.py`.
"""

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from lowtide.engine.forward import install, score
from lowtide.engine.probe import probe
from lowtide.objectives.sft import nll
from lowtide.ragged import RaggedBatch
from lowtide.score_rules import IGNORE
from lowtide.step.cut import split
from lowtide.step_plan import Limits

torch.manual_seed(0)
torch.set_num_threads(1)  # so small a model is fastest on one core

# A task that a tiny model learns in a minute: repeat the letters of the prompt in reverse.
LETTERS, STOP, ASK = list(range(1, 9)), 9, 10


def example(generator: torch.Generator) -> tuple[list[int], list[int]]:
    """A prompt with its completion, and labels that score the completion alone."""
    length = int(torch.randint(2, 6, (), generator=generator))
    prompt = torch.randint(1, 9, (length,), generator=generator).tolist()
    completion = [*reversed(prompt), STOP]
    return [*prompt, ASK, *completion], [*[IGNORE] * (length + 1), *completion]


config = LlamaConfig(
    vocab_size=11,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
)
model = AutoModelForCausalLM.from_config(config)
assert probe(model).isolated, "segments laid end to end must not see each other"
install(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
generator = torch.Generator().manual_seed(1)

for step in range(300):
    rows = [example(generator) for _ in range(64)]
    batch = RaggedBatch.from_segments([tokens for tokens, _ in rows], [labels for _, labels in rows])
    total = 0.0
    for part in split(batch, Limits(tokens=400)):
        # One denominator for the whole batch: however it is cut, the gradients are the same.
        output = score(model, part, loss=nll, factor=1 / batch.scores, accumulate=True)
        output.loss.backward()
        total += output.loss.item()
    optimizer.step()
    optimizer.zero_grad()
    if (step + 1) % 50 == 0:
        print(f"step {step + 1:3d}  loss {total:.3f}  {batch.tokens} tokens, {batch.scores} scored")

prompt = [3, 1, 4, 1, 5, ASK]
answer = model.generate(torch.tensor([prompt]), max_new_tokens=6, do_sample=False)[0, len(prompt) :]
print("prompt", prompt[:-1], "answer", answer.tolist())
