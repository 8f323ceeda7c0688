"""a run that is killed at any moment, and resumed, ends with the bits of the run that was not"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from .case import Case
from .tiny_run import PHASES, SECONDS, STEPS, begin, check_same_end, end, reach, run

KILLS = 60
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"optim": "adamw_compressed"},
    {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2},
    {"adapters": True},
    {"lr_scheduler_type": "cosine", "train_sampling_strategy": "group_by_length"},
    {"optimizer_in_backward": True, "max_grad_norm": 0.0},
)


def check_kill(options: dict[str, Any], phase: str, step: int, seconds: float, folder: Path) -> None:
    """Kills a run some seconds after it has reached a step, and resumes it."""
    whole, killed = folder / "whole", folder / "killed"
    assert run(whole, options) == 0
    process = begin(killed, options)
    reach(process, killed, phase, step)
    time.sleep(seconds)
    end(process, signal.SIGKILL)
    there = any(killed.glob("checkpoint-*"))
    assert run(killed, options, resume=there) == 0, "it does not resume"
    check_same_end(killed, whole)
    assert not (killed / ".saving").exists()


def cases(seed: int) -> Iterator[Case]:
    """Kills in training, in saving and in evaluation, spread over the steps of a run and over its options."""
    draw = random.Random(seed)
    for number in range(KILLS):
        phase, options = PHASES[number % len(PHASES)], OPTIONS[number // len(PHASES) % len(OPTIONS)]
        step, seconds = draw.randrange(3, STEPS), draw.uniform(0, 0.04)
        named = ", ".join(f"{name}={value}" for name, value in options.items()) or "defaults"
        name = f"{number}: {phase} at step {step} + {1000 * seconds:.0f} ms, {named}"
        yield Case(name, partial(check_kill, options, phase, step, seconds), SECONDS)
