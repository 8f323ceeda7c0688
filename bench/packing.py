"""Packing a million long-tailed lengths: seconds and fill, beside TRL's packing.

    python bench/packing.py [--rows 1000000] [--capacity 2048] [--out FILE.json]

Ours plans from lengths alone. TRL packs the columns themselves, a thousand rows at a time as `pack_dataset` does
by default, so its seconds hold the copying of one byte-sized token column too; its `wrapped` only redraws the
column's offsets, and forgets where rows began. Both run on one core.
"""

import argparse
import json
import os
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
from rich.console import Console
from rich.progress import track
from rich.table import Table

from lowtide.compat.trl import packed_block
from lowtide.data.batches.packing import pack

BLOCK = 1000  # rows; the batch size of datasets' `map`, hence TRL's block


def lengths_of(shape: str, rows: int) -> np.ndarray:
    """Seeded long-tailed lengths of the named shape, in tokens."""
    random = np.random.default_rng(0)
    shapes = {
        "lognormal": lambda: random.lognormal(5.0, 1.0, rows),  # median 148, mean 245
        "pareto": lambda: 30 * random.pareto(1.5, rows),  # median 18, mean 60; the heavier tail
    }
    return np.clip(shapes[shape]().astype(np.int64), 1, 32_768)


def ours(lengths: np.ndarray, capacity: int, strategy: str) -> tuple[float, float]:
    """Seconds and fill of one plan for the whole dataset."""
    start = time.perf_counter()
    packing = pack(lengths, capacity, strategy)  # pyright: ignore[reportArgumentType]
    return time.perf_counter() - start, packing.fill


def trls(lengths: np.ndarray, capacity: int, strategy: str) -> tuple[float, float]:
    """Seconds and fill of TRL's packing, block by block."""
    seconds, tokens, bins = 0.0, 0, 0
    for at in track(range(0, len(lengths), BLOCK), description=f"trl {strategy}", transient=True):
        offsets = np.concatenate([[0], np.cumsum(lengths[at : at + BLOCK])]).astype(np.int32)
        column = pa.ListArray.from_arrays(pa.array(offsets), pa.array(np.zeros(offsets[-1], np.int8)))
        table = pa.table({"input_ids": column})
        start = time.perf_counter()
        packed = packed_block(table, capacity, strategy)
        seconds += time.perf_counter() - start
        tokens += len(packed["input_ids"].combine_chunks().flatten())
        bins += len(packed)
    return seconds, tokens / (bins * capacity)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--capacity", type=int, default=2048)
    parser.add_argument("--out", type=Path, help="also write the results as JSON")
    args = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    pa.set_cpu_count(1)

    table = Table(title=f"{args.rows:,} rows into bins of {args.capacity:,} tokens, one core")
    for name in ("lengths", "strategy"):
        table.add_column(name)
    for name in ("lowtide s", "trl s", "ratio", "lowtide fill", "trl fill"):
        table.add_column(name, justify="right")
    results = []
    for shape in ("lognormal", "pareto"):
        lengths = lengths_of(shape, args.rows)
        for strategy in ("bfd", "bfd_split", "wrapped"):
            (our_seconds, our_fill), (trl_seconds, trl_fill) = (
                measure(lengths, args.capacity, strategy) for measure in (ours, trls)
            )
            results.append(
                {
                    "lengths": shape,
                    "strategy": strategy,
                    "rows": args.rows,
                    "capacity": args.capacity,
                    "lowtide": {"seconds": our_seconds, "fill": our_fill},
                    "trl": {"seconds": trl_seconds, "fill": trl_fill},
                }
            )
            table.add_row(
                shape,
                strategy,
                f"{our_seconds:.2f}",
                f"{trl_seconds:.2f}",
                f"{trl_seconds / our_seconds:.1f}x",
                f"{our_fill:.5f}",
                f"{trl_fill:.5f}",
            )
    Console().print(table)
    if args.out:
        args.out.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
