"""`python -m bench.start_peak`: the peak while a run starts beside the peak while it trains, measured and predicted.

Qwen2.5-0.5B from its config (random weights), saved and loaded by name. Two steps of 2 rows of 512 tokens, in a process
of its own; it has started when the first step begins. Resident memory above the imports, in bytes; the prediction is
that of `lowtide.estimate`, of which the imports are taken off too. All of it is recorded. The cases:

- flash: a float32 checkpoint whose weights `adamw_flash` makes bfloat16 with masters of 24 bits: each is read from the
  file, split, and its pages are let go. It is stepped in backward;
- float32: the same checkpoint, trained as it is;
- lora: a bfloat16 checkpoint under adapters;
- cast: the float32 checkpoint, each of whose weights is cast to bfloat16 as it is loaded, under adapters.
"""

import json
import sys
from pathlib import Path

from rich.console import Console

from bench.measuring.arguments import parser_of
from bench.measuring.measure import GIGABYTE, hardware
from bench.measuring.processes import ChildFailed, run_child
from bench.measuring.results import START, over_earlier, versions, write
from bench.memory.surroundings import ENVIRONMENT, saved_weights
from bench.start_peak.child import CASES, PARTS, TOKENS

SUMMARY = "Show the peak while a run starts and while it trains, measured and predicted."
TIMEOUT = 1800


def main(argv: list[str] | None = None) -> int:
    """Measures, predicts and prints; returns 1 where a run fails."""
    parser = parser_of(__doc__)
    parser.add_argument("--case", choices=CASES, default="flash", help="what is trained, how (default: flash)")
    parser.add_argument("--tokens", type=int, default=TOKENS, help=f"of a row (default: {TOKENS})")
    parser.add_argument("--json", action="store_true", help="print the bytes as one JSON object")
    parser.add_argument("--no-record", dest="record", action="store_false", help="print only")
    options = parser.parse_args(argv)
    console = Console()
    try:
        model = saved_weights(CASES[options.case].get("stored", "float32"))
        spec = {"model": model, "case": options.case, "tokens": options.tokens}
        parts = [
            run_child({**spec, "part": part}, lambda _: None, TIMEOUT, "bench.start_peak.child", ENVIRONMENT)
            for part in PARTS
        ]
    except ChildFailed as failure:
        console.print(failure.reason, *failure.last_lines, sep="\n")
        return 1
    found = above_imports(*parts)
    if options.json:
        print(json.dumps(found))
    for name, each in found.items():
        measured, predicted = each["measured"], each["predicted"]
        console.print(
            f"{name}: {measured / GIGABYTE:.2f} GB above the imports, {predicted / GIGABYTE:.2f} GB predicted "
            f"({predicted / measured - 1:+.1%})"
        )
    if options.record and options.tokens == TOKENS:
        console.print(f"recorded in {recorded(options.case, found)}")
    return 0


def recorded(case: str, found: dict[str, dict[str, int]]) -> Path:
    """Writes the peaks of a case beside those of other cases on this machine; returns the file."""
    here, name = hardware("cpu"), "start-peak-qwen2.5-0.5b"
    cases = over_earlier(name, here, "cases", {case: {**found, "versions": versions()}})
    return write(name, {"kind": START, "tokens": TOKENS, "cases": cases, "hardware": here})


def above_imports(measured: dict[str, int], predicted: dict[str, int]) -> dict[str, dict[str, int]]:
    """Both peaks as they were measured and predicted, without what the imports of the measured process took."""
    imports = measured["imports"]
    return {
        name: {"measured": measured[name] - imports, "predicted": predicted[name] - imports}
        for name in ("start", "training")
    }


if __name__ == "__main__":
    sys.exit(main())
