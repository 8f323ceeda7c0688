"""SIGTERM and Ctrl-C leave a checkpoint, and a second run in a folder is refused"""

from __future__ import annotations

import random
import re
import shlex
import signal
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from lowtide.cli.main import main
from lowtide.demo.data import dialogue_rows, make_questions, write_rows
from lowtide.demo.model import save

from .case import Case, started
from .tiny_run import PHASES, SECONDS, STEPS, begin, check_same_end, end, reach, refusal, run, trainer, wait_for

TERMINATED, INTERRUPTED = 143, -signal.SIGINT


def check_signal(number: int, phase: str, step: int, options: dict[str, Any], folder: Path) -> None:
    """A signal ends a run with what it has to say, and the run that resumes has the bits of one that never stopped."""
    whole, stopped, printed = folder / "whole", folder / "stopped", folder / "printed.txt"
    assert run(whole, options) == 0
    process = begin(stopped, options, printed)
    reach(process, stopped, phase, step)
    status = end(process, number)
    text = printed.read_text()
    if number == signal.SIGTERM:
        assert status == TERMINATED, f"exit status {status}: {text}"
        found = re.search(r"stopped by SIGTERM after step (\d+)\. The last checkpoint is (\S+);", text)
        assert found, text
        assert found[2] == str(stopped / f"checkpoint-{found[1]}"), "it names another checkpoint"
    else:
        assert status != 0, f"exit status {status}: {text}"
        found = re.search(r"interrupted (?:in|after) step (\d+)\. (?:The last checkpoint is (\S+);|There is no)", text)
        assert found, text
    if found[2]:
        assert Path(found[2]).is_dir()
    assert not (stopped / ".lowtide.lock").exists()
    assert run(stopped, options, resume=found[2] or False) == 0
    if phase != "evaluate":  # one that was left, or not begun, draws no random numbers
        check_same_end(stopped, whole)


def check_second_run(folder: Path) -> None:
    """A run is refused the folder of another, which goes on; it has the folder when that one is killed."""
    output = folder / "run"
    first = begin(output, {"max_steps": 400})
    reach(first, output, "train", 3)
    assert first.is_alive()
    assert f"process {first.pid} trains into it" in refusal(lambda: trainer(output).train())
    assert first.is_alive()
    end(first, signal.SIGKILL)
    assert trainer(output).train(resume_from_checkpoint=True).global_step >= STEPS


def command(words: list[str]) -> None:
    """What a process of the command line does."""
    sys.exit(main(words))


def check_command(number: int, wanted: int, folder: Path) -> None:
    """`lowtide sft` ends with the conventional status, and the command that it prints resumes it."""
    model, rows, output, printed = (folder / name for name in ("model", "rows.jsonl", "run", "printed.txt"))
    save(model, seed=0)
    write_rows((row for each in make_questions(10, seed=0)[0][:64] for row in dialogue_rows(each)), rows)
    words = f"sft --model {model} --dataset {rows} --output_dir {output} --use_cpu --disable_tqdm --save_steps 2"
    words += " --per_device_train_batch_size 4 --max_steps"
    process = started(command, [*words.split(), "500"], output=printed)
    wait_for((output / "checkpoint-2").exists, process)
    time.sleep(0.1)
    assert end(process, number) == wanted, printed.read_text()
    found = re.search(r"this resumes: lowtide (.*)", printed.read_text().replace("\n", " "))
    assert found, printed.read_text()
    again = shlex.split(found[1])[: shlex.split(found[1]).index("--resume_from_checkpoint") + 2]
    step = int(again[-1].rsplit("-", 1)[1])
    assert main([*again, "--max_steps", str(step + 2)]) == 0
    assert (output / f"checkpoint-{step + 2}").is_dir()
    assert (output / "model.safetensors").is_file()


def cases(seed: int) -> Iterator[Case]:
    """Signals in each phase, to trainers and to commands."""
    draw = random.Random(seed)
    for number in (signal.SIGTERM, signal.SIGINT):
        chosen = [(phase, options) for phase in PHASES for options in ({}, {"optim": "adamw_compressed"})]
        for phase, options in [*chosen, ("train", {"dataloader_num_workers": 1, "eval_strategy": "no"})]:
            step = draw.randrange(3, STEPS - 2)
            named = ", ".join(f"{name}={value}" for name, value in options.items()) or "defaults"
            name = f"{signal.Signals(number).name} in {phase} at step {step}, {named}"
            yield Case(name, partial(check_signal, number, phase, step, options), SECONDS)
    yield Case("a second run in one folder", check_second_run, SECONDS)
    yield Case("lowtide sft and SIGTERM", partial(check_command, signal.SIGTERM, 143), SECONDS)
    yield Case("lowtide sft and Ctrl-C", partial(check_command, signal.SIGINT, 130), SECONDS)
