"""a rank with a part of the weights that fails at any moment: no rank waits for ever, and each says which and why"""

from __future__ import annotations

import atexit
import importlib
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowtide.cli.endings import RANK_FAILED, USER_ERROR
from lowtide.cli.main import main
from lowtide.demo.data import dialogue_rows, make_questions, write_rows
from lowtide.demo.model import save
from lowtide.trainers.checkpoints.choosing import last_whole
from lowtide.trainers.checkpoints.output_folder import checkpoints_of

from .case import FORK, Case, print_to
from .ranks import RANKS, SLACK, timeout_for

LAYER = "transformers.models.qwen3.modeling_qwen3:Qwen3DecoderLayer.forward"
STEP = "lowtide.trainers.hooks:LowtideTrainer.training_step"
EVALUATION = "lowtide.trainers.hooks:LowtideTrainer.evaluation_loop"
SAVING = "lowtide.trainers.hooks:LowtideTrainer._save_checkpoint"
STEPS = 3
"""Of a run, with a checkpoint after each, and an evaluation after the second."""
FAULTS = ("killed", "stopped", "starved", "raises")


@dataclass(frozen=True)
class Moment:
    """When a rank fails: at a call of a function, after another function was called so often."""

    at: str
    """module:function, or module:Class.method."""
    after: str = STEP
    call: int = 2
    """Which call of `after` it comes in, from 1 on."""
    passing: int = 1
    """Which call of `at` it is, from there on."""
    method: str = "sft"
    options: tuple[str, ...] = ()
    backward: bool = False
    """It is when the gradient of what `at` returns arrives."""
    faults: tuple[str, ...] = ()
    """Of `FAULTS`, those that are tried there."""
    engine: tuple[str, ...] = ("--fsdp", "true")
    """What says which part of the weights a rank has."""
    resuming: tuple[str, ...] = ()
    """What one rank needs to go on from a checkpoint."""


GRPO = ("--reward_funcs", "length", "--num_generations", "2", "--max_completion_length", "8")
PRECOMPUTED = ("--precompute_ref_log_probs", "true")
WHOLE_OF = "lowtide.trainers.checkpoints.shards:whole_of"


def in_stages(at: str, *faults: str, **more: Any) -> Moment:
    """Where each rank has some layers."""
    engine, resuming = ("--pipeline_parallel_size", str(RANKS)), ("--resume_without_states", "true")
    return Moment(at, faults=faults, engine=engine, resuming=resuming, **more)


def in_generation(gather: str, *faults: str) -> Moment:
    """In a forward of the second generation."""
    options = (*GRPO, "--ds3_gather_for_generation", gather)
    return Moment(LAYER, "lowtide.run.writing:weights_for_writing", 2, 3, "grpo", options, faults=faults)


MOMENTS: dict[str, Moment] = {
    "loading": Moment("lowtide.run.training_run:load_inputs", "", faults=("killed", "starved")),
    "cutting the weights": Moment("lowtide.engine.weights.sharded.fully_shard:equal_weights", "", faults=("stopped",)),
    "beginning": Moment("lowtide.step.runner:StepRunner.begin", "", faults=("killed",)),
    "the rehearsal": Moment(LAYER, "lowtide.step.runner:StepRunner.rehearsal", 1, faults=("raises",)),
    "forward": Moment(LAYER, faults=FAULTS),
    "the head": Moment("lowtide.ops.logits.linear_logprobs:ChunkedHead.chunks", faults=("starved",)),
    "backward": Moment(LAYER, backward=True, faults=("killed", "starved")),
    "clipping": Moment("lowtide.step.updaters.updater:norm_of", faults=("raises",)),
    "the optimizer's step": Moment("torch.optim.adamw:AdamW.step", faults=("stopped", "starved")),
    "evaluation": Moment(LAYER, EVALUATION, 1, 3, faults=("killed", "starved")),
    "gathering a checkpoint": Moment(WHOLE_OF, SAVING, 2, 3, faults=("killed", "stopped")),
    "writing a checkpoint": Moment(
        "lowtide.trainers.checkpoints.whole:save_optimizer_shard", SAVING, 2, faults=("raises",)
    ),
    "generation, gathered": in_generation("true", "starved"),
    "generation, layer by layer": in_generation("false", "stopped", "raises"),
    "generation, some bytes": in_generation("100000", "raises"),
    "rewarding": Moment(
        "lowtide.rollout.rewards.rewards:Rewards.__call__", "", method="grpo", options=GRPO, faults=("raises",)
    ),
    "precomputing references": Moment(
        LAYER, "lowtide.trainers.references.precompute:_compute", 1, 3, "dpo", PRECOMPUTED, faults=("killed", "starved")
    ),
    "saving the model": Moment(WHOLE_OF, SAVING, STEPS, 40, faults=("killed",)),
    "a stage's forward": in_stages(LAYER, *FAULTS),
    "a stage's backward": in_stages(LAYER, "killed", "stopped", "starved", backward=True),
    "a stage's evaluation": in_stages(LAYER, "killed", "starved", after=EVALUATION, call=1, passing=3),
    "cutting into stages": in_stages("lowtide.run.engine:cut_into_stages", "raises", after=""),
    "gathering a checkpoint from stages": in_stages(
        "lowtide.trainers.checkpoints.shards:gathered_weights", "killed", after=SAVING
    ),
}  # fmt: skip


def found_at(path: str) -> tuple[Any, str]:
    """What holds a function, and its name there."""
    module, _, name = path.partition(":")
    holder: Any = importlib.import_module(module)
    *outer, name = name.split(".")
    for each in outer:
        holder = getattr(holder, each)
    return holder, name


def around(path: str, before: Callable[[], None], result: Callable[[Any], None] = lambda _: None) -> None:
    """Has functions called before each call of another, and with what it returns."""
    holder, name = found_at(path)
    plain = getattr(holder, name)

    def called(*args: Any, **kwargs: Any) -> Any:
        before()
        found = plain(*args, **kwargs)
        result(found)
        return found

    setattr(holder, name, called)


def fail_at(moment: Moment, fault: str, folder: Path) -> None:
    """Makes this process fail at a moment."""
    calls = {"after": moment.call if not moment.after else 0, "at": 0}

    def count() -> None:
        calls["after"] += 1

    def fail() -> None:
        if calls["after"] < moment.call:
            return
        calls["at"] += 1
        if calls["at"] < moment.passing:
            return
        if calls["at"] > moment.passing and fault != "starved":
            return
        (folder / "failed").touch()
        if fault == "raises":
            raise ZeroDivisionError("as planned")
        if fault == "starved":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 GiB")
        os.kill(os.getpid(), signal.SIGKILL if fault == "killed" else signal.SIGSTOP)

    def in_backward(found: Any) -> None:
        output: Tensor = found[0] if isinstance(found, tuple) else found
        if output.requires_grad:
            output.register_hook(lambda _: fail())

    if moment.after:
        around(moment.after, count)
    if moment.backward:
        around(moment.at, lambda: None, in_backward)
    else:
        around(moment.at, fail)


def words_of(folder: Path, moment: Moment, *more: str) -> list[str]:
    rows = str(folder / f"{moment.method}.jsonl")
    words = [moment.method, "--model", str(folder / "model"), "--dataset", rows, "--eval_dataset", rows, "--use_cpu"]
    words += ["--output_dir", str(folder / "run"), "--disable_tqdm", "--report_to", "none", "--save_steps", "1"]
    words += ["--max_steps", str(STEPS), "--eval_strategy", "steps", "--eval_steps", "2", *moment.options, *more]
    return [*words, "--per_device_train_batch_size", "4", "--per_device_eval_batch_size", "4"]


def train(rank: int, port: int, folder: Path, moment: Moment, fault: str, timeout: int) -> None:
    """What a rank runs; `fault` is empty where it does not fail."""
    print_to(folder / f"rank{rank}.txt")
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if fault:
        fail_at(moment, fault, folder)
    try:
        sys.exit(main(words_of(folder, moment, *moment.engine, "--ddp_timeout", str(timeout))))
    finally:
        atexit._run_exitfuncs()  # as an interpreter that ends; a forked process would not


def resume(folder: Path, moment: Moment) -> None:
    """On one rank, with whole weights."""
    print_to(folder / "resumed.txt")
    sys.exit(main(words_of(folder, moment, *moment.resuming, "--resume_from_checkpoint", "latest")))


def make_world(folder: Path, method: str) -> None:
    save(folder / "model", seed=0)
    questions = make_questions(10, seed=0)[0][:16]
    rows: list[dict[str, Any]] = [row for each in questions for row in dialogue_rows(each)]
    if method == "grpo":
        rows = [{"prompt": row["messages"][:1]} for row in rows]
    if method == "dpo":
        other = rows[0]["messages"][1:]
        rows = [{"prompt": r["messages"][:1], "chosen": r["messages"][1:], "rejected": other} for r in rows]
    write_rows(rows, folder / f"{method}.jsonl")


def ended(folder: Path, failing: int, moment: Moment, fault: str) -> dict[int, tuple[int, str]]:
    """By rank, how the run ended: exit status and output. A rank that was stopped is left out."""
    make_world(folder, moment.method)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ["HF_DATASETS_CACHE"] = str(folder / "cache")
    timeout = timeout_for(fault)
    processes = [
        FORK.Process(target=train, args=(rank, port, folder, moment, fault if rank == failing else "", timeout))
        for rank in range(RANKS)
    ]
    for each in processes:
        each.start()
    deadline = time.monotonic() + 60
    while not (folder / "failed").exists() and time.monotonic() < deadline and processes[failing].is_alive():
        time.sleep(0.05)
    text = (folder / f"rank{failing}.txt").read_text()
    assert (folder / "failed").exists(), f"the moment did not come: {text}"
    found = {}
    for rank in range(RANKS):
        if rank == failing and fault == "stopped":
            continue
        processes[rank].join(SLACK + (timeout if fault == "stopped" else 0))
        text = (folder / f"rank{rank}.txt").read_text()
        assert processes[rank].exitcode is not None, f"rank {rank} still waits: {text}"
        found[rank] = processes[rank].exitcode, text
    for each in processes:
        each.kill()
    return found


def check_fault(name: str, failing: int, fault: str, folder: Path) -> None:
    """The other rank ends in one message, which names the rank, and says why where that could be known."""
    moment, other = MOMENTS[name], 1 - failing
    found = ended(folder, failing, moment, fault)
    status, text = found[other]
    assert status == RANK_FAILED or (status == USER_ERROR and fault == "starved"), f"exit status {status}: {text}"
    assert "Traceback" not in text, text
    assert text.count("error: ") == 1, text
    known = {"raises": "ZeroDivisionError: as planned", "starved": "out of memory"}
    wanted = known.get(fault, "does not answer any more")
    assert f"rank {failing} " in text, text
    assert wanted in text, text
    assert "checkpoint" in text or "start again" in text, text
    if fault in ("raises", "starved"):
        status, text = found[failing]
        assert status == (USER_ERROR if fault == "starved" else 1), f"exit status {status}: {text}"
        assert text.count("error: ") == (fault == "starved"), text
    check_checkpoints(folder, moment)


def check_checkpoints(folder: Path, moment: Moment) -> None:
    """All that there are are whole, and a run goes on from the last."""
    run = folder / "run"
    there = checkpoints_of(run)
    if not there:
        return
    chosen = last_whole(run)
    assert chosen is not None
    assert chosen.folder == there[0], chosen.passed_over
    process = FORK.Process(target=resume, args=(folder, moment))
    process.start()
    process.join()
    assert process.exitcode == 0, (folder / "resumed.txt").read_text()


def cases(seed: int) -> Iterator[Case]:
    """Each moment with its faults in the second rank; the first one, which writes and has the store, at some."""
    for name, moment in MOMENTS.items():
        for fault in moment.faults:
            yield Case(f"{fault} in {name}", partial(check_fault, name, 1, fault), seconds=150)
    for name, fault in (("forward", "killed"), ("backward", "stopped"), ("gathering a checkpoint", "raises")):
        yield Case(f"the first rank {fault} in {name}", partial(check_fault, name, 0, fault), seconds=150)
