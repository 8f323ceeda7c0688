"""`python -m bench.accumulation`: what gradient accumulation costs in memory.

llama-22m without checkpointing, AdamW, rows of 256 tokens: 2 rows in one forward, 8 rows as 4 forwards of 2, 8 rows
in one forward; and 2 rows where gradients are zeroed in place between steps rather than freed. In each case the
second step is watched, from its start to the end of the optimizer's step: what tensors hold at most, beyond the
weights and the two moments.
"""

import argparse
import multiprocessing
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.inputs.shapes import SHAPES, build_model, parameter_counts
from bench.measuring.measure import GIGABYTE, hardware
from bench.measuring.results import ACCUMULATION, versions, write
from bench.vocabulary.child import most_allocated

LENGTH = 256
CASES = {
    "2 rows, one forward": (2, 2, True),
    "8 rows, 4 forwards of 2": (8, 2, True),
    "8 rows, one forward": (8, 8, True),
    "2 rows, one forward, gradients zeroed in place": (2, 2, False),
}
"""Rows of a step, rows of a forward, and whether gradients are freed between steps."""


def main(argv: list[str] | None = None) -> int:
    """Measures, prints and records."""
    parser = argparse.ArgumentParser(prog="python -m bench.accumulation", description="What accumulation costs.")
    parser.add_argument("--no-record", dest="record", action="store_false", help="print only")
    options, console = parser.parse_args(argv), Console()
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:  # the profiler counts a process's
        runs = {name: pool.apply(measure, case) for name, case in CASES.items()}
    for name, run in runs.items():
        peak, gradients = (f"{run[key] / GIGABYTE:.3f} GB" for key in ("peak_bytes", "gradients_bytes"))
        console.print(f"{name}: {peak} beside weights and moments; all gradients are {gradients}")
    if options.record:
        results = {"kind": ACCUMULATION, "runs": runs, "hardware": hardware("cpu"), "versions": versions()}
        console.print(f"recorded in {write('accumulation-llama-22m', results)}")
    return 0


def measure(rows: int, rows_a_forward: int, set_to_none: bool) -> dict[str, Any]:
    """Returns what tensors hold at most in the second step, beside weights and moments."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    from lowtide.engine.forward import install
    from lowtide.methods.sft import SFTOptions, objective
    from lowtide.ragged import RaggedBatch
    from lowtide.step.train_step import train_step
    from lowtide.step_plan import Limits

    shape = SHAPES["llama-22m"]
    model = build_model(shape)
    install(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    tokens = torch.randint(3, 32_000, (rows, LENGTH), generator=torch.Generator().manual_seed(0))
    batch = RaggedBatch.from_rows([{"input_ids": row} for row in tokens.tolist()])
    loss = objective(SFTOptions())

    def step() -> None:
        train_step(model, batch, loss, limits=Limits(rows=rows_a_forward))
        optimizer.step()

    step()
    optimizer.zero_grad(set_to_none=set_to_none)
    kept = sum(p.grad.numel() * p.grad.element_size() for p in model.parameters() if p.grad is not None)
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            step()
        profiler.export_chrome_trace(str(trace))
        peak = most_allocated(trace) + kept  # what was there before the profiler began
    return {"peak_bytes": peak, "gradients_bytes": 4 * parameter_counts(model)[0]}


if __name__ == "__main__":
    sys.exit(main())
