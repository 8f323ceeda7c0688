"""Runs a benchmark child and listens to it: steps as they end, its result, or how it failed."""

import json
import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

ROOT = Path(__file__).parents[1]
MARK = "##bench "
"""Begins the lines that a child prints for its parent."""
LAST_LINES = 15
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
    module: str = "bench.child",
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


def ended(status: int) -> str:
    if status == -9:
        return "killed (signal 9), as the kernel does when memory runs out"
    return f"killed by signal {-status}" if status < 0 else f"exit status {status}"


def progress_bar(console: Console) -> Progress:
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("steps")
    return Progress(*columns, TimeElapsedColumn(), console=console)
