"""What the host does in a step beside forwards and backwards, counted and timed.

    python -m bench.step_host [--against COMMIT] [--repeat 5]

Counted: the tensor operations of cutting a batch of 256 rows, or pairs, into micro-batches. Timed: a step of
`StepRunner` whose model does next to nothing, so that what is left is the host's: planning, cutting, counting,
metrics. With `--against`, the other commit's source is timed in turns with this one's, and the ratio is printed; both
are driven by public names alone.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys

from bench.measuring.other_commits import AGAINST, importing, source_of
from bench.measuring.processes import ROOT
from bench.step_host.child import CASES, operations

SUMMARY = "Count and time what the host does in a step beside forwards and backwards."


def measured(environment: dict[str, str]) -> dict[str, float]:
    """The seconds of each case with the library that the environment imports."""
    command = [sys.executable, "-m", "bench.step_host.child"]
    done = subprocess.run(command, env=os.environ | environment, cwd=ROOT, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.step_host", description=SUMMARY)
    parser.add_argument("--against", metavar="COMMIT", help=AGAINST)
    parser.add_argument("--repeat", type=int, default=5, help="runs of each, in turns")
    options = parser.parse_args()
    print("tensor operations of cutting a batch")
    for kind in ("sft", "dpo"):
        print(f"  {kind}, 256 rows: {operations(kind)}")
    with source_of(options.against) as other:
        sources = {"this": importing(ROOT)} | ({"other": other} if options.against else {})
        runs = [{name: measured(each) for name, each in sources.items()} for _ in range(options.repeat)]
    print("milliseconds of a step outside forwards and backwards")
    for case in CASES:
        ours = statistics.median(run["this"][case] for run in runs)
        line = f"  {case}: {1e3 * ours:.1f}"
        if options.against:
            theirs = statistics.median(run["other"][case] for run in runs)
            line += f", {options.against}: {1e3 * theirs:.1f}, ratio {ours / theirs:.2f}"
        print(line)


if __name__ == "__main__":
    main()
