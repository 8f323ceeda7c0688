"""`python -m bench.chains`: rows above the token budget, run in pieces, beside rows that are run whole.

A Llama of 22M parameters (6 layers, 384 wide, 6 heads of which 2 have keys and values), float32, AdamW, one row a step.
Each run is a process of its own; its peak is what the process holds beyond its imports. Compared are

- peak: a row of 32,768 tokens in pieces of 4,096 with a row of 4,096, plus the keys and values of all tokens and as
  much for their gradients;
- gradients: of a row of 16,384 tokens in pieces with those of the whole row, and the losses;
- time: of that row in pieces without checkpointing, with the whole row with checkpointing;
- windows: the peak of a row of 131,072 tokens with that of 8,192, where all layers have sliding windows of 1,024;
  windows-file: the same where keys wait in a file (`chain_storage="host"`).

Prints each beside its target, records them, and exits with 1 where one is missed. The times want a machine that does
nothing else.
"""

import sys
from typing import Any

from bench.measuring.figures import Figure, measure
from bench.measuring.measure import GIGABYTE
from bench.measuring.processes import run_child
from bench.measuring.results import CHAINS

NAME = "chains-llama-22m"
CAP = 4096
LAYERS, KV_HEADS, DIM = 6, 2, 64
KEY_BYTES = LAYERS * 2 * KV_HEADS * DIM * 4
"""Of the keys and values of a token, in float32."""
TIMEOUT = 1800


def main(argv: list[str] | None = None) -> int:
    """Measures, prints and records; returns 1 where a figure misses its target or a run fails."""
    return measure(__doc__, argv, MEASURES, NAME, CHAINS)


def run(**spec: Any) -> dict[str, Any]:
    """What one process found."""
    return run_child(spec, lambda number: None, TIMEOUT, "bench.chains.child")


def peak() -> dict[str, Any]:
    """Of 32,768 tokens in pieces."""
    whole, row = run(tokens=CAP), run(tokens=8 * CAP, cap=CAP)
    keys = KEY_BYTES * 8 * CAP
    ratio = row["peak_bytes"] / (whole["peak_bytes"] + 2 * keys)
    parts = " + ".join(f"{each / GIGABYTE:.3f}" for each in (whole["peak_bytes"], keys, keys))
    text = f"{row['peak_bytes'] / GIGABYTE:.3f} GB for {8 * CAP:,} tokens, {ratio:.2f}x of {parts} GB (target 1.2x)"
    return {"whole": whole, "row": row, "key_bytes": keys, "ratio": ratio, "text": text, "met": ratio <= 1.2}


def gradients() -> dict[str, Any]:
    """Of 16,384 tokens, in pieces and whole."""
    found = run(tokens=4 * CAP, cap=CAP, compare=True)
    error, loss = found["gradient_error"], found["loss_error"]
    text = f"differ by {error:.1e} of the norm at most, losses by {loss:.1e} (target 1e-5)"
    return {**found, "text": text, "met": error <= 1e-5 and loss <= 1e-5}


def time() -> dict[str, Any]:
    """Of 16,384 tokens: in pieces without checkpointing, and whole with it."""
    whole, row = run(tokens=4 * CAP), run(tokens=4 * CAP, cap=CAP // 2, checkpointing=False)
    ratio = row["seconds"] / whole["seconds"]
    text = (
        f"{row['seconds']:.1f} s in pieces of {CAP // 2:,}, {row['peak_bytes'] / GIGABYTE:.3f} GB; "
        f"{whole['seconds']:.1f} s whole, {whole['peak_bytes'] / GIGABYTE:.3f} GB: {ratio:.2f}x (target 1.15x)"
    )
    return {"whole": whole, "row": row, "ratio": ratio, "text": text, "met": ratio <= 1.15}


def windows(storage: str = "device") -> dict[str, Any]:
    """Of 131,072 tokens and of 8,192, both in pieces, with sliding windows in all layers."""
    short, row = (run(tokens=tokens, cap=CAP, window=1024, storage=storage) for tokens in (2 * CAP, 32 * CAP))
    ratio = row["peak_bytes"] / short["peak_bytes"]
    text = (
        f"{row['peak_bytes'] / GIGABYTE:.3f} GB for {32 * CAP:,} tokens in {row['seconds']:.0f} s, {ratio:.2f}x of "
        f"{short['peak_bytes'] / GIGABYTE:.3f} GB for {2 * CAP:,} (target 1.3x)"
    )
    return {"short": short, "row": row, "ratio": ratio, "text": text, "met": ratio <= 1.3}


MEASURES: dict[str, Figure] = {
    "peak": peak,
    "gradients": gradients,
    "time": time,
    "windows": windows,
    "windows-file": lambda: windows("host"),
}


if __name__ == "__main__":
    sys.exit(main())
