"""a rank that is killed, is stopped, raises or has other rows: all ranks end, each with one message"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from lowtide.cli.endings import RANK_FAILED, USER_ERROR
from lowtide.cli.main import main
from lowtide.demo.data import dialogue_rows, make_questions, write_rows
from lowtide.demo.model import save
from lowtide.trainers.method import MethodTrainer

from .case import FORK, Case, print_to

RANKS = 2
TIMEOUT = 5
"""Seconds of `ddp_timeout` that a rank which is stopped costs on an idle machine."""
SLACK = 30
"""Seconds to find out which rank is missing and to end, on a machine that does other things too."""
PLACES = {
    "a step": "training_step",
    "preparation": "prepare",
    "evaluation": "evaluation_loop",
    "a checkpoint": "_save_checkpoint",
}
"""By name: the method of a trainer at whose second call, or only one, the rank fails."""
FAULTS = ("killed", "stopped", "raises")


def timeout_for(fault: str) -> int:
    """Seconds of `ddp_timeout`: long enough that no rank is given up before it fails, on a machine that does other
    things too. Only a rank that is stopped is waited for so long; of the others the connection ends."""
    if fault != "stopped":
        return 60
    return round(TIMEOUT * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1)))


def fail_at(place: str, fault: str, folder: Path) -> None:
    """Makes this process fail at a place."""
    method, calls = getattr(MethodTrainer, PLACES[place]), []
    wanted = 2 if place == "a step" else 1

    def failing(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(place)
        if len(calls) == wanted:
            (folder / "failed").touch()
            if fault == "raises":
                raise ZeroDivisionError("as planned")
            os.kill(os.getpid(), signal.SIGKILL if fault == "killed" else signal.SIGSTOP)
        return method(self, *args, **kwargs)

    kinds = [kind for kind in MethodTrainer.__subclasses__() if PLACES[place] in vars(kind)]
    for kind in [*kinds, MethodTrainer]:
        if kind is not MethodTrainer:
            method = getattr(kind, PLACES[place])
        setattr(kind, PLACES[place], failing)


def train(rank: int, port: int, folder: Path, rows: str, place: str, fault: str, timeout: int) -> None:
    """What a rank runs; `fault` is empty where it does not fail."""
    print_to(folder / f"rank{rank}.txt")
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if fault:
        fail_at(place, fault, folder)
    words = ["sft", "--model", str(folder / "model"), "--dataset", rows, "--eval_dataset", rows, "--use_cpu"]
    words += [
        "--output_dir",
        str(folder / "run"),
        "--ddp_timeout",
        str(timeout),
        "--disable_tqdm",
        "--report_to",
        "none",
    ]
    words += ["--max_steps", "3", "--eval_strategy", "steps", "--eval_steps", "2", "--save_steps", "1"]
    words += ["--report_to", "none"]
    sys.exit(main(words))


def ended(folder: Path, failing: int, place: str, fault: str, few: bool = False) -> dict[int, tuple[int, str]]:
    """By rank, how the run ended: exit status and output. A rank that was stopped is left out."""
    save(folder / "model", seed=0)
    rows = [row for each in make_questions(10, seed=0)[0][:32] for row in dialogue_rows(each)]
    write_rows(rows, folder / "rows.jsonl")
    write_rows(rows[:-3], folder / "few.jsonl")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks, timeout = [], timeout_for(fault)
    for rank in range(RANKS):
        own = rank == failing
        data = str(folder / ("few.jsonl" if few and own else "rows.jsonl"))
        ranks.append(FORK.Process(target=train, args=(rank, port, folder, data, place, fault if own else "", timeout)))
        ranks[rank].start()
    survivors = [rank for rank in range(RANKS) if not (rank == failing and fault == "stopped")]
    deadline = time.monotonic() + 60
    while not (few or (folder / "failed").exists()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert few or (folder / "failed").exists(), "the place was not reached"
    found = {}
    for rank in survivors:
        ranks[rank].join(SLACK + (timeout if fault == "stopped" else 0))
        text = (folder / f"rank{rank}.txt").read_text()
        assert ranks[rank].exitcode is not None, f"rank {rank} still waits: {text}"
        found[rank] = ranks[rank].exitcode, text
    for each in ranks:
        each.kill()
    return found


def check_fault(failing: int, place: str, fault: str, folder: Path) -> None:
    """The other rank ends in one message, which names the rank, and says why where that could be known."""
    other = 1 - failing
    status, text = ended(folder, failing, place, fault)[other]
    assert status == RANK_FAILED, f"exit status {status}: {text}"
    assert "Traceback" not in text, text
    assert text.count("error: ") == 1, text
    wanted = "ZeroDivisionError: as planned" if fault == "raises" else "does not answer any more"
    assert f"rank {failing} " in text, text
    assert wanted in text, text
    assert "checkpoint" in text or "start again" in text, text


def check_rows(folder: Path) -> None:
    """Both ranks refuse, with both numbers."""
    for rank, (status, text) in ended(folder, 1, "a step", "", few=True).items():
        assert status == USER_ERROR, f"rank {rank}: exit status {status}: {text}"
        assert "32 rows of" in text, text
        assert "29 rows of" in text, text
        assert "Traceback" not in text, text


def cases(seed: int) -> Iterator[Case]:
    """Each fault at each place in the second rank; the first one, which has the store, killed and stopped."""
    for place in PLACES:
        for fault in FAULTS:
            yield Case(f"{fault} in {place}", partial(check_fault, 1, place, fault), seconds=150)
    for fault in ("killed", "stopped"):
        yield Case(f"the first rank {fault} in a step", partial(check_fault, 0, "a step", fault), seconds=150)
    yield Case("fewer rows", check_rows, seconds=150)
