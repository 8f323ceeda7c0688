"""`python -m bench.measured_runs`: checks the lines of docs/measured-runs.jsonl, and prints them as a table.

Each line is a run that somebody measured with `lowtide measure METHOD --share FILE`. A line that has other fields than
those, or a text in place of a number or a known word, is refused. `--write` writes the table into
docs/predicted-and-measured.md.
"""

import argparse
import sys
from typing import TYPE_CHECKING

from bench.measuring.processes import ROOT

if TYPE_CHECKING:
    from lowtide.planner.answers.shared_run import SharedRun

LINES = ROOT / "docs" / "measured-runs.jsonl"
PAGE = ROOT / "docs" / "predicted-and-measured.md"
MARK, END = "<!-- written by `python -m bench.measured_runs --write` -->", "<!-- /runs -->"


def main(argv: list[str] | None = None) -> int:
    """Checks, prints and writes; returns 1 where a line is none."""
    parser = argparse.ArgumentParser(prog="python -m bench.measured_runs", description="Check and show measured runs.")
    parser.add_argument("--write", action="store_true", help=f"write the table into {PAGE.relative_to(ROOT)}")
    options = parser.parse_args(argv)
    from lowtide.planner.answers.shared_run import SharedRun

    runs = []
    for number, line in enumerate(LINES.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            runs.append(SharedRun.read(line))
        except ValueError as error:
            print(f"{LINES.relative_to(ROOT)}, line {number}: {error}")
            return 1
    lines = table(runs)
    print("\n".join(lines))
    if options.write:
        before, rest = PAGE.read_text(encoding="utf-8").split(MARK)
        PAGE.write_text("\n".join([before + MARK, "", *lines, "", END]) + rest.split(END)[1], encoding="utf-8")
    return 0


def table(runs: "list[SharedRun]") -> list[str]:
    """The lines of the table, in Markdown."""
    from lowtide.memory.allocators.measure import bytes_text

    lines = ["| date | run | device | measured | predicted | error |", "|---|---|---|---:|---:|---:|"]
    for run in runs:
        kind, layers, size = (run.shape.get(name, "?") for name in ("model_type", "num_hidden_layers", "hidden_size"))
        model = run.model or f"{kind}, {layers} layers of {size}"
        how = f"adapters of rank {run.trained['rank']}" if run.trained["adapters"] else "all weights"
        sizes = [bytes_text(size) for size in (run.measured_bytes, run.predicted_bytes)]
        what = f"{run.method}, {model}, {how}, {run.rows['tokens']:,} tokens"
        lines.append(f"| {run.date} | {what} | {run.device} | {' | '.join(sizes)} | {run.error:+.1%} |")
    return lines


if __name__ == "__main__":
    sys.exit(main())
