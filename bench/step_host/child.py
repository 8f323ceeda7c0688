"""One run of `bench.step_host`: the seconds of each case; and the operations, which are counted."""

from __future__ import annotations

import json
import random
import time
from typing import Any

import torch

from bench.measuring.arguments import no_options
from lowtide.compat.torch import TorchDispatchMode

BUDGET = 8192


class Operations(TorchDispatchMode):
    """Counts the operations on tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def batch_of(kind: str, rows: int) -> Any:
    """A batch of rows of 100 to 1,000 tokens, or of pairs of 30 to 300 tokens a part."""
    from lowtide.data.batches.collate import CompletionCollator
    from lowtide.ragged import RaggedBatch

    draw = random.Random(0)
    if kind == "sft":
        return RaggedBatch.from_segments([[3] * draw.randint(100, 1000) for _ in range(rows)])
    names = ("prompt_ids", "chosen_ids", "rejected_ids")
    made = [{name: [3 + row % 4] * draw.randint(30, 300) for name in names} for row in range(rows)]
    return CompletionCollator(names[1:])(made)


def operations(kind: str, rows: int = 256) -> int:
    """Of cutting a batch within the token budget."""
    from lowtide.step.cut import cut
    from lowtide.step_plan import Limits, cut_rows

    batch = batch_of(kind, rows)
    with Operations() as seen:
        cut(batch, cut_rows(batch.segments, Limits(tokens=BUDGET)))
    return seen.count


def seconds(kind: str, rows: int) -> float:
    """Of the host, for a step of a model of one layer that is 8 wide."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    from lowtide.engine.forward import install
    from lowtide.engine.reference import FrozenModel
    from lowtide.methods import METHODS
    from lowtide.step.runner import StepOptions, StepRunner, Updater  # whose own module is not the same in every commit

    sizes = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    model, other = (
        AutoModelForCausalLM.from_config(LlamaConfig(**sizes, num_attention_heads=1, num_key_value_heads=1))
        for _ in range(2)
    )
    install(model)
    install(other)
    method = METHODS[kind]
    objective = method.objective(method.options())
    reference = FrozenModel(other, padding_free=True) if kind == "dpo" else None
    updater = Updater(torch.optim.SGD(model.parameters(), lr=0.0))
    runner = StepRunner(
        model, objective, StepOptions(tokens_per_microbatch=BUDGET), reference=reference, updater=updater
    )
    runner.begin()
    inside = 0.0

    def timed(call: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal inside
            start = time.process_time()
            try:
                return call(*args, **kwargs)
            finally:
                inside += time.process_time() - start

        return run

    model.forward = timed(model.forward)
    other.forward = timed(other.forward)
    runner.updater.backward = timed(runner.updater.backward)  # type: ignore[method-assign]
    batch = batch_of(kind, rows)
    runner.gradients(batch)
    inside, start = 0.0, time.process_time()
    runner.gradients(batch)
    return time.process_time() - start - inside


CASES = {"sft, 256 rows": ("sft", 256), "sft, 32 rows": ("sft", 32), "dpo, 256 pairs": ("dpo", 256)}


def child() -> None:
    """Prints the seconds of each case."""
    torch.set_num_threads(1)
    print(json.dumps({name: seconds(*case) for name, case in CASES.items()}))


if __name__ == "__main__":
    no_options(__doc__)
    child()
