"""`python -m bench.front_door`: how soon the commands that people meet first answer.

Each is a process of its own, in an empty folder. Seconds are the processor's, user and system together, but for the
first token of `lowtide chat`, where they are those on the clock, from the start of the process to the first character.
A model is Qwen2.5-0.5B's shape with random weights in bfloat16, 1 GB, which is written first; what is told before
weights are read is told of a folder without any.
"""

from __future__ import annotations

import argparse
import itertools
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
from bench.measuring.processes import OFFLINE, ROOT
from bench.measuring.results import FRONT_DOOR, versions, write
from bench.planning_time.rows import pairs

SUMMARY = "Measure how soon the commands that people meet first answer."
SHAPE = "qwen2.5-0.5b"
WITHOUT, WHOLE = "without-weights", "whole"
"""Folders of the model."""
VOCABULARY_ROWS = 512


PROCESSOR, CLOCK = "processor_seconds", "clock_seconds"
"""What is measured; on the clock until the first character of an answer."""


class Case(NamedTuple):
    """A command."""

    what: str
    words: str
    target: float
    """Seconds, at most."""
    says: str
    status: int = 2
    typed: str = ""
    """What is said to it."""
    measure: str = PROCESSOR


CASES = {
    "option": Case("a mistyped option", "sft --modl m", 1, "did you mean '--model'"),
    "file": Case("a mistyped file", f"sft --model {WITHOUT} --dataset rosw.csv", 1, "did you mean 'rows.csv'"),
    "check": Case("lowtide check", f"check sft --model {WITHOUT} --dataset named.csv", 2, "ok", status=0),
    "column": Case("a wrong column", f"sft --model {WITHOUT} --dataset rows.csv --use_cpu true", 4, "User Question"),
    "chat": Case("chat, first token", f"chat {WHOLE} --max_new_tokens 8", 10, "", 0, "hello\n", CLOCK),
}


def main(argv: list[str] | None = None) -> int:
    """Measures, prints and records; returns 1 where a target is missed."""
    options, console = parse(argv), Console()
    with tempfile.TemporaryDirectory(prefix="lowtide-front-door-") as name:
        lay_out(Path(name), with_weights="chat" in options.cases)
        runs = [fastest(CASES[each], Path(name), options.turns) for each in options.cases]
    console.print(table(runs))
    if options.record:
        found = {"kind": FRONT_DOOR, "runs": runs, "hardware": hardware("cpu"), "versions": versions()}
        console.print(f"recorded in {write('front-door', found)}")
    return 0 if all(run["seconds"] <= run["target"] for run in runs) else 1


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.front_door", description=SUMMARY)
    parser.add_argument("--cases", nargs="*", choices=CASES, default=list(CASES), help="which of the commands")
    parser.add_argument("--turns", type=int, default=3, help="runs of each, of which the fastest counts (default: 3)")
    parser.add_argument("--no-record", dest="record", action="store_false", help="print only")
    return parser.parse_args(argv)


def lay_out(folder: Path, *, with_weights: bool) -> None:
    """Writes rows, and the model with its weights and without."""
    (folder / "rows.csv").write_text("User Question,Bot Answer\n2 + 2?,four\n", encoding="utf-8")
    (folder / "named.csv").write_text("question,answer\n2 + 2?,four\n", encoding="utf-8")
    tokenizer = load_tokenizer(tokenizer_for(pairs(VOCABULARY_ROWS)))
    tokenizer.save_pretrained(folder / WITHOUT)
    (folder / WITHOUT / "config.json").write_text(json.dumps(SHAPES[SHAPE].config), encoding="utf-8")
    if with_weights:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.for_model(**SHAPES[SHAPE].config)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.save_pretrained(folder / WHOLE)
        tokenizer.save_pretrained(folder / WHOLE)


def fastest(case: Case, folder: Path, turns: int) -> dict[str, Any]:
    """The fastest of some runs of a command."""
    runs = [timed(case, folder) for _ in range(turns)]
    best = min(runs, key=lambda each: each[case.measure])
    return {**case._asdict(), **best, "seconds": best[case.measure], "turns": turns}


def timed(case: Case, folder: Path) -> dict[str, float]:
    """The processor's seconds of a command, which says what it has to, and those on the clock until its first answer,
    or its end where nothing is typed."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    with _process(case, folder) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdin.write(case.typed.encode())
        process.stdin.close()
        first = process.stdout.read(1 if case.typed else -1)
        clock = time.perf_counter() - began
        out, err = first + process.stdout.read(), process.stderr.read()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    said = " ".join((out + err).decode().split())
    if process.returncode != case.status or case.says.lower() not in said.lower() or len(first) < len(case.typed[:1]):
        raise RuntimeError(f"lowtide {case.words} ended with status {process.returncode}: {said}")
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {PROCESSOR: processor, CLOCK: clock}


def _process(case: Case, folder: Path) -> subprocess.Popen[bytes]:
    environment = {**os.environ, **OFFLINE, "PYTHONPATH": str(ROOT / "src"), "HF_DATASETS_CACHE": str(folder / "cache")}
    command = [sys.executable, "-m", "lowtide", *case.words.split()]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=folder, env=environment, stdin=pipe, stdout=pipe, stderr=pipe)


def table(runs: list[dict[str, Any]]) -> Table:
    """Seconds of the processor and on the clock, with what is asked behind those that it is asked of."""
    made = Table(box=box.SIMPLE_HEAD, title="seconds, and at most so many", title_justify="left")
    made.add_column("what", no_wrap=True)
    for name in ("processor", "at most", "clock", "at most"):
        made.add_column(name, justify="right", no_wrap=True)
    for run in runs:
        style = "green" if run["seconds"] <= run["target"] else "red"
        cells = [(f"{run[name]:.1f}", f"{run['target']:g}" * (run["measure"] == name)) for name in (PROCESSOR, CLOCK)]
        made.add_row(run["what"], *itertools.chain.from_iterable(cells), style=style)
    return made


if __name__ == "__main__":
    sys.exit(main())
