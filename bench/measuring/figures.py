"""Figures beside their targets: the command that measures some of them, prints them and records them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console

from bench.measuring.arguments import parser_of
from bench.measuring.measure import hardware
from bench.measuring.processes import ChildFailed
from bench.measuring.results import over_earlier, versions, write

Figure = Callable[[], dict[str, Any]]
"""Measures: `text` says what was found beside its target, `met` whether it is reached; all of it is recorded."""


def measure(doc: str | None, argv: Sequence[str] | None, figures: Mapping[str, Figure], name: str, kind: str) -> int:
    """Measures the figures that are asked for on this CPU; returns 1 where one misses its target or a run fails.

    Args:
        doc: what `--help` shows.
        name: of the record, beside the machine's; `kind` is of `bench.measuring.results`.
    """
    parser = parser_of(doc)
    parser.add_argument("--only", nargs="+", choices=figures, default=list(figures), help="what to measure")
    parser.add_argument("--no-record", dest="record", action="store_false", help="print only")
    options, console = parser.parse_args(argv), Console()
    measured: dict[str, Any] = {}
    for each in options.only:
        try:
            measured[each] = figures[each]()
        except ChildFailed as failure:
            console.print(f"{each}: {failure.reason}", *failure.last_lines, sep="\n", markup=False)
            return 1
        console.print(f"{each}: {measured[each]['text']}", soft_wrap=True)
    if options.record:
        here = hardware("cpu")
        results = {"kind": kind, "hardware": here, "versions": versions()}
        results["measured"] = over_earlier(name, here, "measured", measured)
        console.print(f"recorded in {write(name, results)}")
    return 0 if all(each["met"] for each in measured.values()) else 1
