"""A run of a second that the faults of training, saving and resuming happen to."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback, set_seed

from lowtide import SFTConfig, SFTTrainer

from .case import started

STEPS = 12
SECONDS = 150
"""Time limit of a case of three runs, each of some seconds on a quiet machine."""
PHASES = ("train", "save", "evaluate")
"""What a run is at, told by files of these names in its folder of marks."""


class Marks(TrainerCallback):
    """Tells other processes by files which step of which phase a run is at; slows it down, so that they can follow."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        (self.folder / f"train-{state.global_step}").touch()

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        (self.folder / f"evaluate-{state.global_step}").touch()
        time.sleep(0.005)


def trainer(output: Path, **options: Any) -> SFTTrainer:
    """A tiny Llama with dropout on sixteen rows of token ids; saves every second step, evaluates every third."""
    adapters = LoraConfig(r=4, lora_dropout=0.1, target_modules=["q_proj"], task_type="CAUSAL_LM")
    peft_config = adapters if options.pop("adapters", False) else None
    width = options.pop("hidden_size", 16)
    set_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64, hidden_size=width, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=1, attention_dropout=0.1, eos_token_id=0,
        )
    )  # fmt: skip
    draw = torch.Generator().manual_seed(1)
    rows = [{"input_ids": torch.randint(1, 64, (5 + n % 7,), generator=draw).tolist()} for n in range(16)]
    config = {
        "max_steps": STEPS, "per_device_train_batch_size": 4, "learning_rate": 1e-2, "save_steps": 2, "eval_steps": 3,
        "eval_strategy": "steps", "per_device_eval_batch_size": 4, "save_total_limit": 3, "rehearsal": False,
        "report_to": "none", "disable_tqdm": True, "use_cpu": True, "logging_steps": 1,
        "dataset_kwargs": {"skip_prepare_dataset": True},
    }  # fmt: skip
    data = Dataset.from_list(rows)
    made = SFTTrainer(
        model=model,
        args=SFTConfig(output_dir=str(output), **{**config, **options}),
        train_dataset=data,
        eval_dataset=data,
        peft_config=peft_config,
    )
    marks = output.parent / f"{output.name}-marks"
    marks.mkdir(exist_ok=True)
    made.add_callback(Marks(marks))
    return made


def train(output: str, options: dict[str, Any], resume: bool | str = False) -> None:
    """What a process of a run does."""
    trainer(Path(output), **options).train(resume_from_checkpoint=resume)


def run(output: Path, options: dict[str, Any], resume: bool | str = False) -> int | None:
    """A run in a process of its own, to its end; its exit status."""
    process = started(train, str(output), options, resume)
    process.join()
    return process.exitcode


def begin(output: Path, options: dict[str, Any], printed: Path | None = None) -> BaseProcess:
    """A run in a process of its own, which goes on while this one does other things."""
    return started(train, str(output), options, output=printed)


def refusal(action: Callable[[], object]) -> str:
    """What an action that has to be refused says."""
    try:
        action()
    except ValueError as error:
        return str(error)
    raise AssertionError("it was not refused")


def wait_for(seen: Callable[[], bool], process: BaseProcess) -> None:
    """Waits until something is seen, or the process has ended."""
    while not seen() and process.is_alive():
        time.sleep(0.0005)


def reach(process: BaseProcess, output: Path, phase: str, step: int) -> None:
    """Waits until a run is in a phase at a step, or has ended."""
    if phase == "save":
        before = output / f"checkpoint-{step - step % 2 - 2}"
        wait_for(lambda: (output / ".saving").exists() and (before.name == "checkpoint-0" or before.exists()), process)
        return
    at = step - step % 3 if phase == "evaluate" else step
    wait_for((output.parent / f"{output.name}-marks" / f"{phase}-{at}").exists, process)


def end(process: BaseProcess, number: int) -> int | None:
    """Sends a signal to a run, and waits for its end; its exit status."""
    if process.is_alive():
        os.kill(process.pid or 0, signal.Signals(number))
    process.join()
    return process.exitcode


def check_same_end(output: Path, expected: Path) -> None:
    """Two runs ended with equal bits: weights and optimizer."""
    last = f"checkpoint-{STEPS}"
    for name in ("model.safetensors", "adapter_model.safetensors"):
        if (expected / last / name).exists():
            ours, theirs = load_file(output / last / name), load_file(expected / last / name)
            assert ours.keys() == theirs.keys()
            assert all(torch.equal(ours[key], theirs[key]) for key in theirs), f"other bits in {name}"
    ours, theirs = (torch.load(each / last / "optimizer.pt", weights_only=True) for each in (output, expected))
    assert _equal(ours, theirs), "other bits in optimizer.pt"


def _equal(ours: Any, theirs: Any) -> bool:
    if isinstance(theirs, torch.Tensor):
        return torch.equal(ours, theirs)
    if isinstance(theirs, dict):
        return ours.keys() == theirs.keys() and all(_equal(ours[key], theirs[key]) for key in theirs)
    if isinstance(theirs, list | tuple):
        return len(ours) == len(theirs) and all(map(_equal, ours, theirs))
    return ours == theirs
