"""`python -m bench.planning_time`: how long `lowtide estimate`, `plan` and `gpus` take for DPO, as whole processes.

10,000 generated pairs of the lengths of GSM8K's, in a file; llama-22m and Qwen2.5-0.5B as configs without weights, on
a CPU. The tokenizer of both is a byte-level BPE of 32,000 that is trained in code, so that of Qwen's 151,936 embeddings
most are never asked for. `gpus` has neither rows nor files: Qwen2.5-7B's config is built in, and it asks of all
devices. Each command starts with an empty cache of datasets, so that rows are tokenized each time, and with what the
process of a run takes measured beforehand, as it is once a machine. Seconds are the processor's, user and system
together, which other processes do not lengthen, and those on the clock beside them.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table

from bench.inputs.shapes import SHAPES
from bench.inputs.tokenizer import load_tokenizer, tokenizer_for
from bench.measuring.measure import hardware
from bench.measuring.processes import LAST_LINES, OFFLINE, ROOT, ChildFailed
from bench.measuring.results import PLANNING, versions, write
from bench.planning_time.rows import pairs

ROWS = 10_000
VOCABULARY_ROWS = 512
"""Of which the tokenizer is made."""


class Case(NamedTuple):
    """A command, for a shape of `bench.inputs.shapes`."""

    command: str
    shape: str
    target: float
    """Seconds on 2 quiet cores, imports included."""
    options: tuple[str, ...] = ()
    prepared: bool = True
    """Whether it reads rows, and a shape from a folder; without, a well-known model's config is all that it has."""


CASES = (
    Case("estimate", "llama-22m", 4),
    Case("plan", "llama-22m", 15, ("--budget", "1GiB")),
    Case("estimate", "qwen2.5-0.5b", 6),
    Case("plan", "qwen2.5-0.5b", 25, ("--budget", "8GiB")),
    Case("gpus", "Qwen/Qwen2.5-7B", 20, prepared=False),
)


def main(argv: list[str] | None = None) -> int:
    """Measures, prints and records."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.planning_time",
        description="How long an estimate, a plan and a table of devices take, as whole processes.",
    )
    parser.add_argument("--rows", type=int, default=ROWS, help=f"rows of the dataset (default: {ROWS:,})")
    parser.add_argument("--turns", type=int, default=1, help="runs of each command, of which the fastest counts")
    parser.add_argument("--cases", nargs="*", type=int, choices=range(len(CASES)), help="which of the commands")
    parser.add_argument("--no-record", dest="record", action="store_false", help="print only")
    options, console = parser.parse_args(argv), Console()
    with tempfile.TemporaryDirectory(prefix="lowtide-planning-") as name:
        folder = Path(name)
        rows = pairs(options.rows)
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        tokenizer = load_tokenizer(tokenizer_for(rows[:VOCABULARY_ROWS]))
        for shape in {case.shape for case in CASES if case.prepared}:
            tokenizer.save_pretrained(folder / shape)
            (folder / shape / "config.json").write_text(json.dumps(SHAPES[shape].config), encoding="utf-8")
        chosen = CASES if options.cases is None else [CASES[number] for number in options.cases]
        runs = []
        for case in chosen:
            try:
                if not runs:
                    timed(CASES[0], folder)  # measures what a process takes, which is kept
                with console.status(f"lowtide {case.command} dpo, {case.shape}"):
                    turns = [timed(case, folder) for _ in range(options.turns)]
            except ChildFailed as failed:
                console.print("\n".join([failed.reason, *failed.last_lines]), markup=False)
                return 1
            runs.append(case._asdict() | min(turns, key=lambda each: each["processor_seconds"]))
    console.print(_table(runs, options.rows))
    if options.record:
        found = {"kind": PLANNING, "rows": options.rows, "runs": runs}
        console.print(
            f"recorded in {write('planning-time', found | {'hardware': hardware('cpu'), 'versions': versions()})}"
        )
    return 0


def timed(case: Case, folder: Path) -> dict[str, float]:
    """Returns the seconds of a command, which starts with an empty cache of datasets.

    Raises:
        ChildFailed: it ended with another status than 0.
    """
    rows = ["--dataset", folder / "rows.jsonl", "--device", "cpu"] if case.prepared else []
    words = [case.command, "dpo", "--model", folder / case.shape if case.prepared else case.shape, *rows]
    with tempfile.TemporaryDirectory(dir=folder) as cache:
        environment = {**os.environ, **OFFLINE, "HF_DATASETS_CACHE": cache, "PYTHONPATH": str(ROOT / "src")}
        before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        command = [sys.executable, "-m", "lowtide", *map(str, words), *case.options]
        done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)
        seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        reason = f"lowtide {case.command} dpo ended with status {done.returncode}"
        raise ChildFailed(reason, done.stderr.splitlines()[-LAST_LINES:])
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"seconds": seconds, "processor_seconds": processor}


def _table(runs: list[dict[str, Any]], rows: int) -> Table:
    table = Table(title=f"Planning DPO on {rows:,} rows", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("command")
    table.add_column("model")
    for name in ("processor", "clock", "to reach"):
        table.add_column(f"{name}, s", justify="right")
    for run in runs:
        reached = run["seconds"] <= run["target"] or run["processor_seconds"] <= run["target"]
        seconds = (f"{run[name]:.1f}" for name in ("processor_seconds", "seconds"))
        words = " ".join(("lowtide", run["command"], "dpo", *run["options"]))
        table.add_row(words, run["shape"], *seconds, f"{run['target']:g}", style="green" if reached else "red")
    return table


if __name__ == "__main__":
    sys.exit(main())
