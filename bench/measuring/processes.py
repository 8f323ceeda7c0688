"""Runs a benchmark child and listens to it: steps as they end, its result, or how it failed."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

ROOT = Path(__file__).parents[2]
MARK = "##bench "
"""Begins the lines that a child prints for its parent."""
LAST_LINES = 15
PORT = 29517
"""Where ranks meet."""
OF_RANKS = {
    "MASTER_ADDR": "localhost",
    "OMP_NUM_THREADS": "1",
    "DS_ACCELERATOR": "cpu",
    "ACCELERATE_USE_CPU": "true",
}
OFFLINE = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}


class ChildFailed(Exception):
    """A run that ended without a result, with the last lines that it printed."""

    def __init__(self, reason: str, last_lines: list[str]):
        super().__init__(reason)
        self.reason, self.last_lines = reason, last_lines


def run_child(
    spec: dict[str, Any],
    on_step: Callable[[int], None],
    timeout: float,
    module: str = "bench.compare.child",
    environment: dict[str, str] | None = None,
) -> dict[str, Any]:
    """Runs a child's module on `spec` and returns its result; `on_step` hears the number of each step that ended.
    `environment` has further variables for it.

    Raises `ChildFailed` if the child dies, is killed, or takes longer than `timeout` seconds. A child never
    outlives this call, however it ends.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", module, json.dumps(spec)],
        cwd=ROOT,
        env=os.environ | OFFLINE | (environment or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    timer = threading.Timer(timeout, process.kill)
    timer.start()
    result, last_lines = None, deque(maxlen=LAST_LINES)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if not line.startswith(MARK):
                last_lines.append(line.rstrip())
                continue
            message = json.loads(line.removeprefix(MARK))
            if message.pop("kind") == "step":
                on_step(message["number"])
            else:
                result = message
        status = process.wait()
    finally:
        timed_out = not timer.is_alive()
        timer.cancel()
        process.kill()
    if result is None:
        raise ChildFailed(f"no result within {timeout:.0f} s" if timed_out else ended(status), list(last_lines))
    return result


def run_ranks(
    spec: dict[str, Any],
    ranks: int,
    module: str,
    timeout: float,
    *,
    port: int = PORT,
    environment: dict[str, str] | None = None,
) -> list[dict[str, Any]]:
    """Runs so many ranks of a child's module on one `spec`, on a CPU with a thread each; returns what each found.

    Raises `ChildFailed` with the last lines of the first rank that ended without a result; the others are killed, and
    none outlives this call.
    """
    shared = os.environ | OFFLINE | OF_RANKS | (environment or {})
    shared |= {"WORLD_SIZE": str(ranks), "LOCAL_SIZE": str(ranks), "MASTER_PORT": str(port)}
    processes: list[subprocess.Popen] = []
    with contextlib.ExitStack() as ends:
        printed = [ends.enter_context(tempfile.TemporaryFile()) for _ in range(ranks)]
        ends.callback(_end, processes)
        for rank, output in enumerate(printed):
            own = shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            command = [sys.executable, "-m", module, json.dumps(spec)]
            processes.append(subprocess.Popen(command, cwd=ROOT, env=own, stdout=output, stderr=subprocess.STDOUT))
        until = time.monotonic() + timeout
        while (statuses := [each.poll() for each in processes]).count(None):
            if any(status and _result(output)[0] is None for status, output in zip(statuses, printed, strict=True)):
                break
            if time.monotonic() > until:
                raise ChildFailed(f"no result within {timeout:.0f} s", _result(printed[0])[1])
            time.sleep(0.05)
        found = [_result(output) for output in printed]
    for number in sorted(range(ranks), key=lambda rank: not statuses[rank]):
        if found[number][0] is None:
            raise ChildFailed(f"rank {number}: {ended(statuses[number] or 0)}", found[number][1])
    return [result for result, _ in found if result is not None]


def _end(processes: list[subprocess.Popen]) -> None:
    for process in processes:
        process.kill()
        process.wait()


def _result(output: IO[bytes]) -> tuple[dict[str, Any] | None, list[str]]:
    """What a child found, and the last lines that it printed beside."""
    output.seek(0)
    lines = output.read().decode(errors="replace").splitlines()
    marked = [line.removeprefix(MARK) for line in lines if line.startswith(MARK)]
    plain = [line for line in lines if not line.startswith(MARK)]
    return json.loads(marked[-1]) if marked else None, plain[-LAST_LINES:]


def ended(status: int) -> str:
    if status == -9:
        return "killed (signal 9), as the kernel does when memory runs out"
    return f"killed by signal {-status}" if status < 0 else f"exit status {status}"


def progress_bar(console: Console) -> Progress:
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("steps")
    return Progress(*columns, TimeElapsedColumn(), console=console)
