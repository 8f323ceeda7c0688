"""What the host does in a step beside forwards and backwards, counted and timed.

    python -m bench.step_host [--against COMMIT] [--repeat 5]

Counted: the tensor operations of cutting a batch of 256 rows, or pairs, into micro-batches. Timed: a step of
`StepRunner` whose model does next to nothing, so that what is left is the host's: planning, cutting, counting,
metrics. With `--against`, the other commit's source is timed in turns with this one's, and the ratio is printed; both
are driven by public names alone.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from lowtide.compat.torch import TorchDispatchMode

SUMMARY = "Count and time what the host does in a step beside forwards and backwards."
BUDGET = 8192
ROOT = Path(__file__).parent.parent


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
    from lowtide.step.runner import StepOptions, StepRunner
    from lowtide.step.updater import Updater

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


def measured(source: Path) -> dict[str, float]:
    """The seconds of each case with the library of some source tree."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(source / "src"), str(ROOT)])}
    command = [sys.executable, "-m", "bench.step_host", "--child"]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.step_host", description=SUMMARY)
    parser.add_argument("--against", help="a commit whose host time is measured beside this one's")
    parser.add_argument("--repeat", type=int, default=5, help="runs of each, in turns")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child()
        return
    print("tensor operations of cutting a batch")
    for kind in ("sft", "dpo"):
        print(f"  {kind}, 256 rows: {operations(kind)}")
    with tempfile.TemporaryDirectory() as folder:
        sources = {"this": ROOT}
        if options.against:
            sources["other"] = Path(folder, "other")
            subprocess.run(["git", "worktree", "add", "-q", "--detach", sources["other"], options.against], check=True)
        try:
            runs = [{name: measured(source) for name, source in sources.items()} for _ in range(options.repeat)]
        finally:
            if options.against:
                subprocess.run(["git", "worktree", "remove", "--force", sources["other"]], check=True)
    print("milliseconds of a step outside forwards and backwards")
    for case in CASES:
        ours = statistics.median(run["this"][case] for run in runs)
        line = f"  {case}: {1e3 * ours:.1f}"
        if options.against:
            theirs = statistics.median(run["other"][case] for run in runs)
            line += f", {options.against}: {1e3 * theirs:.1f}, ratio {ours / theirs:.2f}"
        print(line)


if __name__ == "__main__":
    main()
