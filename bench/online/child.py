"""One run of one contestant of `bench.online`, in a process of its own: see `bench.compare.child`."""

import importlib
import random
import tempfile
from typing import Any

from bench.compare.child import clock, differences, say
from bench.compare.contestants import Contestant
from bench.inputs.shapes import SHAPES, build_model
from bench.inputs.tokenizer import load_tokenizer, tokenizer_for
from bench.measuring.arguments import specification
from bench.measuring.measure import PeakMeter, now
from bench.online.cases import CASES, LONG_TOKENS

MOST = 32
"""Tokens of a completion."""


def measure(spec: dict[str, Any]) -> dict[str, Any]:
    """Trains some steps; returns the seconds of those after the warm-up, and the run's peak."""
    from datasets import Dataset

    contestant, shape = Contestant(spec["contestant"]), SHAPES[spec["shape"]]
    package = importlib.import_module(contestant.package)
    rows = CASES[spec["prompts"]]()
    tokenizer = load_tokenizer(tokenizer_for(rows))
    if spec["prompts"] == "long":
        rows = [{"prompt": cut(row["prompt"], tokenizer)} for row in rows]
    model, timer, meter = build_model(shape), clock(shape.device), PeakMeter(shape.device)
    with tempfile.TemporaryDirectory() as folder:
        flags = {
            "output_dir": folder,
            "per_device_train_batch_size": spec["rows"],
            "num_generations": spec["completions"],
            "max_completion_length": MOST,
            "max_steps": spec["steps"],
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
            "use_cpu": shape.device == "cpu",
            "bf16": False,
            **({"rehearsal": False} if contestant.package == "lowtide" else {}),
        }
        arguments = {"rollout_func": Written(tokenizer)} if spec["update_alone"] else {}
        args = package.GRPOConfig(**flags)
        meter.start()
        trainer = package.GRPOTrainer(
            model=model,
            reward_funcs=even_tokens,
            args=args,
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
            callbacks=[timer],
            **arguments,
        )
        began = now(shape.device)
        result = trainer.train()
        memory = meter.stop()
    ends = differences([began, *timer.ends])
    return {"step_seconds": ends[spec["warmup"] :], "loss": result.training_loss, **memory}


def even_tokens(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """The share of even ids: a reward that differs within a group."""
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]


class Written:
    """A `rollout_func` that gives completions of random tokens and unlike lengths."""

    def __init__(self, tokenizer: Any):
        self.tokenizer, self.rng = tokenizer, random.Random(0)

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        ids = [
            self.tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
            for prompt in prompts
        ]
        written = [[self.rng.randrange(3, 32_000) for _ in range(self.rng.randint(8, MOST))] for _ in prompts]
        return {"prompt_ids": ids, "completion_ids": written, "logprobs": [[-1.0] * len(each) for each in written]}


def cut(prompt: list[dict[str, str]], tokenizer: Any) -> list[dict[str, str]]:
    """The prompt with `LONG_TOKENS` tokens of words."""
    ids = tokenizer(prompt[0]["content"])["input_ids"][:LONG_TOKENS]
    return [{"role": "user", "content": tokenizer.decode(ids)}]


if __name__ == "__main__":
    say("result", **measure(specification(__doc__)))
