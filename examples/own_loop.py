"""A training loop of your own around `StepRunner`: no Trainer, and all that a step does.

The runner cuts each batch to the token budget, does a step again in smaller micro-batches if memory runs out, clips,
and names the row where a NaN comes from. A tiny model learns to reverse letters, in seconds: `python
examples/own_loop.py`.
"""

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from lowtide.engine.forward import install
from lowtide.methods import METHODS
from lowtide.methods.sft import SFTOptions
from lowtide.ragged import RaggedBatch
from lowtide.score_rules import IGNORE
from lowtide.step.runner import StepOptions, StepRunner
from lowtide.step.updaters.updater import Updater

STOP, ASK = 9, 10


def example(generator: torch.Generator) -> tuple[list[int], list[int]]:
    """A prompt with its completion, and labels that score the completion alone."""
    length = int(torch.randint(2, 6, (), generator=generator))
    prompt = torch.randint(1, 9, (length,), generator=generator).tolist()
    completion = [*reversed(prompt), STOP]
    return [*prompt, ASK, *completion], [*[IGNORE] * (length + 1), *completion]


torch.manual_seed(0)
torch.set_num_threads(1)
config = LlamaConfig(vocab_size=11, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
model = AutoModelForCausalLM.from_config(config)
install(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
runner = StepRunner(
    model,
    METHODS["sft"].objective(SFTOptions()),
    StepOptions(tokens_per_microbatch=400, max_grad_norm=1.0),
    updater=Updater(optimizer),
)
generator = torch.Generator().manual_seed(1)

runner.begin()
for step in range(1, 201):
    rows = [example(generator) for _ in range(64)]
    loss = runner.gradients(RaggedBatch.from_segments([tokens for tokens, _ in rows], [labels for _, labels in rows]))
    norm = runner.clip()
    optimizer.step()
    optimizer.zero_grad()
    if step % 50 == 0:
        print(f"step {step:3d}  loss {loss.item():.3f}  gradient norm {norm.item():.2f}")
runner.end()

prompt = [3, 1, 4, 1, 5, ASK]
answer = model.eval().generate(torch.tensor([prompt]), max_new_tokens=6, do_sample=False)[0, len(prompt) :]
print("prompt", prompt[:-1], "answer", answer.tolist())
