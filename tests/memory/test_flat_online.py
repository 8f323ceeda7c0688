"""A run whose policy writes keeps its resident memory from step to step.

The run is a process of its own, whose heap is set up as the `lowtide` command does it. Completions have random lengths,
so keys and values of many sizes come and go.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile

import pytest

from lowtide.memory.allocators import host_heap
from lowtide.memory.allocators.measure import resident_bytes
from lowtide.memory.allocators.settings import steady_malloc

STEPS, SETTLED = 80, 20
"""Steps in all, and those before the first mark."""
MOST = 5_000_000
"""Bytes by which a run may grow after that, in all."""


def train() -> list[int]:
    """Resident bytes after each step of GRPO with a tiny model, lowtide's own generator and a reward function."""
    from datasets import Dataset
    from transformers import TrainerCallback

    from lowtide import GRPOConfig, GRPOTrainer
    from lowtide.demo.model import make_model, make_tokenizer

    class Marks(TrainerCallback):
        def __init__(self) -> None:
            self.resident: list[int] = []

        def on_step_end(self, *args: object, **kwargs: object) -> None:
            self.resident.append(resident_bytes())

    tokenizer, marks = make_tokenizer(), Marks()
    with tempfile.TemporaryDirectory() as folder:
        GRPOTrainer(
            make_model(tokenizer, seed=0),
            reward_funcs=lambda completion_ids, **_: [len({*ids}) / len(ids) for ids in completion_ids],
            args=GRPOConfig(
                output_dir=folder,
                max_steps=STEPS,
                per_device_train_batch_size=8,
                num_generations=4,
                max_completion_length=24,
                beta=0.04,
                learning_rate=1e-3,
                logging_steps=10,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
                use_cpu=True,
            ),
            train_dataset=Dataset.from_list([{"prompt": f"{7 * n} + {n} ="} for n in range(64)]),
            processing_class=tokenizer,
            callbacks=[marks],
        ).train()
    return marks.resident


@pytest.mark.slow
@pytest.mark.skipif(host_heap.glibc() is None, reason="the heap's settings are glibc's")
def test_resident_memory_does_not_grow_with_online_steps():
    environment = os.environ | steady_malloc({}) | {"OMP_NUM_THREADS": "1"}
    run = subprocess.run([sys.executable, __file__], capture_output=True, text=True, env=environment, timeout=900)
    assert run.returncode == 0, run.stderr[-2000:]
    resident = [int(each) for each in run.stdout.split("marks:")[1].split()]
    assert len(resident) == STEPS
    assert max(resident[SETTLED:]) - resident[SETTLED - 1] < MOST


if __name__ == "__main__":
    print("marks:", *train())
