"""`python -m bench.start_peak`: the peak while a run starts beside the peak while it trains, from a float32 checkpoint.

Qwen2.5-0.5B from its config (random weights), saved in float32 and loaded by name. `adamw_flash` makes its weights
bfloat16 with masters of 24 bits before the first step: each weight is read from the file, split, and its pages are let
go. Two steps of 2 rows of 512 tokens, stepped in backward, in a process of its own. Resident memory above the imports,
in bytes; the prediction is that of the trainer's own start-up report.
"""

import json
import sys
import tempfile

from rich.console import Console

from bench.measuring.arguments import parser_of
from bench.measuring.measure import GIGABYTE
from bench.measuring.processes import ChildFailed, run_child
from bench.memory.surroundings import ENVIRONMENT

SUMMARY = "Show the peak while a run starts from a float32 checkpoint, and while it trains."
TIMEOUT = 1800


def main(argv: list[str] | None = None) -> int:
    """Measures and prints; returns 1 where a run fails."""
    parser = parser_of(__doc__)
    parser.add_argument("--json", action="store_true", help="print the bytes as one JSON object")
    options = parser.parse_args(argv)
    console = Console()
    with tempfile.TemporaryDirectory() as folder:
        try:
            run_child({"save": folder}, lambda _: None, TIMEOUT, "bench.start_peak.child")
            found = run_child({"model": folder}, lambda _: None, TIMEOUT, "bench.start_peak.child", ENVIRONMENT)
        except ChildFailed as failure:
            console.print(failure.reason, *failure.last_lines, sep="\n")
            return 1
    if options.json:
        print(json.dumps(found))
    for name in ("start", "training"):
        console.print(f"{name}: {found[name] / GIGABYTE:.2f} GB above the imports")
    return 0


if __name__ == "__main__":
    sys.exit(main())
