"""`python -m bench.bfloat16`: bfloat16 beside float32, on a CPU that has instructions for it.

A model of 22M parameters and one of 0.5B, on rows of GSM8K, 8 a step, with the defaults but for `bf16`; each run is a
process of its own, and runs take turns. Speed and peak of lowtide in bfloat16 are set against those in float32, its
losses against TRL's, and each run against the rate of a bare product in the dtype that it computes in.

Prints all of it beside the targets, records it, and exits with 1 where one is missed. Wants a machine that does nothing
else.
"""

import argparse
import statistics
import sys
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.inputs.rows import CASES
from bench.inputs.tokenizer import tokenizer_for
from bench.measuring.measure import GIGABYTE, hardware, matmul_rate
from bench.measuring.processes import ChildFailed, run_child
from bench.measuring.results import BFLOAT16, FLOPS_PER_PARAMETER, FORWARD_FLOPS, over_earlier, versions, write

NAME = "bfloat16"
ROWS = "gsm8k"
LOSSES = 0.005
"""By which losses in bfloat16 may differ from TRL's, as a share: what the rounding of two orders of operations does."""
DTYPES = {False: "float32", True: "bfloat16"}
TIMEOUT = 3600


@dataclass(frozen=True)
class Target:
    """What is to be reached by a method on a model."""

    method: str
    shape: str
    faster: float
    """Times the speed of float32."""
    timed: int
    with_trl: bool = True

    @property
    def name(self) -> str:
        return f"{self.method}, {self.shape}"


TARGETS = {
    each.name: each
    for each in (
        Target("sft", "llama-22m", 3.0, 4),
        Target("dpo", "llama-22m", 3.0, 4),
        Target("sft", "qwen2.5-0.5b-float32", 4.0, 2, with_trl=False),
        Target("dpo", "qwen2.5-0.5b-float32", 4.0, 2, with_trl=False),
    )
}


def main(argv: list[str] | None = None) -> int:
    """Measures, prints and records."""
    parser = argparse.ArgumentParser(prog="python -m bench.bfloat16", description="bfloat16 beside float32 on a CPU.")
    parser.add_argument("--only", nargs="+", choices=TARGETS, default=list(TARGETS), help="which runs")
    parser.add_argument("--turns", type=int, default=2, help="of each run, of which the fastest counts")
    parser.add_argument("--no-record", dest="record", action="store_false", help="print only")
    options, console = parser.parse_args(argv), Console()
    rates = {name: matmul_rate("cpu", name) for name in DTYPES.values()}
    console.print(", ".join(f"{name}: {rate / 1e9:,.0f} GFLOP/s" for name, rate in rates.items()))
    found: dict[str, Any] = {}
    for name in options.only:
        try:
            found[name] = measured(TARGETS[name], options.turns, rates)
        except ChildFailed as error:
            console.print(f"{name}: {error.reason}", *error.last_lines, sep="\n")
            return 1
        console.print(table_of(name, found[name]))
        console.print(verdict(TARGETS[name], found[name]))
        if options.record:
            machine = hardware("cpu")
            results = {"kind": BFLOAT16, "hardware": machine, "versions": versions(), "rates": rates}
            write(NAME, results | {"runs": over_earlier(NAME, machine, "runs", found)})
    return int(not all(each["met"] for each in found.values()))


def measured(target: Target, turns: int, rates: dict[str, float]) -> dict[str, Any]:
    """The fastest turn of each run, and how lowtide in bfloat16 stands to the others."""
    ways = [("lowtide", False), ("lowtide", True), *[("trl", True)] * target.with_trl]
    best: dict[str, dict[str, Any]] = {}
    for _ in range(turns):
        for package, narrow in ways:
            run = one(target, package, narrow, rates[DTYPES[narrow]])
            name = f"{package}, {DTYPES[narrow]}"
            best[name] = min(best.get(name, run), run, key=lambda each: each["seconds"])
    wide, narrow = best["lowtide, float32"], best["lowtide, bfloat16"]
    faster, peak = wide["seconds"] / narrow["seconds"], narrow["peak_bytes"] / wide["peak_bytes"]
    trl = best.get("trl, bfloat16")
    loss = None if trl is None else narrow["loss"] / trl["loss"] - 1
    met = faster >= target.faster and peak < 1 and (loss is None or abs(loss) <= LOSSES)
    return {"runs": best, "faster": faster, "peak": peak, "loss_error": loss, "met": met}


def one(target: Target, package: str, narrow: bool, rate: float) -> dict[str, Any]:
    """One run."""
    spec = {"method": target.method, "shape": target.shape, "case": ROWS, "contestant": package, "warmup": 2}
    spec |= {"timed": target.timed, "tokenizer": str(tokenizer_for(CASES[target.method][ROWS].rows()))}
    run = run_child(spec | {"flags": {"bf16": narrow}}, lambda step: None, TIMEOUT)
    seconds, tokens = statistics.mean(run["step_seconds"]), statistics.mean(run["step_tokens"])
    flops = FLOPS_PER_PARAMETER * run["multiplied_parameters"] * tokens / seconds
    again = FORWARD_FLOPS * run["recomputed_parameters"] * tokens / seconds
    return {
        "seconds": seconds,
        "peak_bytes": run["above_start_bytes"],
        "loss": run["loss"],
        "share": flops / rate,
        "share_with_recomputation": (flops + again) / rate,
    }


def table_of(name: str, found: dict[str, Any]) -> Table:
    """The runs, a line each."""
    columns = ("s/step", "peak", "loss", "of the products' rate", "with recomputation")
    table = Table(name, *columns, title_justify="left")
    for run, each in found["runs"].items():
        shares = (f"{each[share]:.0%}" for share in ("share", "share_with_recomputation"))
        table.add_row(
            run, f"{each['seconds']:.2f}", f"{each['peak_bytes'] / GIGABYTE:.2f} GB", f"{each['loss']:.4f}", *shares
        )
    return table


def verdict(target: Target, found: dict[str, Any]) -> str:
    """Whether what is to be reached is."""
    loss = "" if found["loss_error"] is None else f", losses {found['loss_error']:+.2%} from TRL's"
    reached = "reached" if found["met"] else "NOT reached"
    speed = f"bfloat16 at {found['faster']:.2f}x the speed of float32 (target {target.faster:g}x)"
    return f"{reached}: {speed} with {found['peak']:.2f}x its peak (target below 1){loss}"


if __name__ == "__main__":
    sys.exit(main())
