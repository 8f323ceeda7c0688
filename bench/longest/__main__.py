"""`python -m bench.longest`: the longest row that one GPU trains, by technique, with the shape of Llama-3.1-8B.

The planner predicts it anywhere, for a GPU that need not be there. Where there is one, each row is trained on it too:
two steps of one row, a process each, from what was predicted on, until the longest that fits and the shortest that does
not are a sixteenth apart. There it is also measured what offloading costs: the seconds of a step with it over those
without, both with checkpointing, at lengths where the copies should be hidden behind the products.

Rows in pieces (docs/chains.md) are predicted with the shape of Qwen3-8B, beside the lengths that others report.
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.inputs.shapes import LLAMA_8B, QWEN3_8B
from bench.longest.cases import CASES, LEAN, PIECE, PIECES, POSITIONS, LongCase, flags, shape
from bench.longest.tables import cells, pieces_cells
from bench.measuring.measure import hardware
from bench.measuring.processes import run_child
from bench.measuring.results import LONG_PIECES, LONGEST, merged, versions, write
from bench.memory.surroundings import device_here
from lowtide.memory.allocators import settings as allocator

SUMMARY = "Show the longest row that one GPU trains, by technique."
NAME, PIECES_NAME = "longest-llama-8b", "longest-in-pieces-qwen3-8b"
STEP = 1024
"""Tokens by which lengths differ."""
CLOSE = 16
"""A search ends where what fits and what does not are this part of it apart."""
OVERLAPPED = (8192, 16_384, 32_768)
"""Lengths at which offloading is to cost no more than `HIDDEN`."""
HIDDEN = 1.1
HOST_BYTES = 512 << 30
"""Of host memory a GPU, which offloaded activations may take."""
SECONDS = 3600
"""After which a process is given up."""


def main(argv: list[str] | None = None) -> int:
    """Predicts, measures where there is a GPU, prints and records; returns 1 where offloading costs too much."""
    options, console = parse(argv), Console()
    table = Table("row", "predicted", "trained", "not trained", title=f"longest row on {options.device}, in tokens")
    asked = options.only or [*PIECES, *CASES]
    for name in (each for each in asked if each in PIECES):
        with console.status(name):
            run = {"case": name, "device": options.device, **longest_in_pieces(name, options.device)}
        console.print(*pieces_cells(run), sep="  ")
        if options.record:
            record(run, options, PIECES_NAME, LONG_PIECES)
    for name in (each for each in asked if each in CASES):
        with console.status(name):
            run = {"case": name, "layers": options.layers, "device": options.device, **searched(name, options)}
        table.add_row(*cells(run))
        console.print(*cells(run), sep="  ")
        if options.record:
            record(run, options)
    console.print(table)
    met = True
    for length in OVERLAPPED if options.here == "cuda" else ():
        run = {"case": f"offloading {length:,} tokens", "layers": options.layers, **overlap(length, options)}
        met &= run["ratio"] <= HIDDEN
        console.print(f"{length:,} tokens: {run['ratio']:.3f} times the seconds with offloading (at most {HIDDEN})")
        if options.record:
            record(run, options)
    return 0 if met else 1


def searched(name: str, options: argparse.Namespace) -> dict[str, int]:
    """The longest row predicted; with a GPU also the longest that was trained and the shortest that was not; tokens."""
    predicted, _ = longest(lambda length: predicted_fits(name, length, options), STEP, 2.0)
    if options.here != "cuda":
        return {"predicted": predicted}
    trained, failed = longest(lambda length: trains(name, length, options), predicted or STEP, 1 + 1 / CLOSE)
    return {"predicted": predicted, "trained": trained, "failed": failed}


def longest(fits: Callable[[int], bool], start: int, factor: float) -> tuple[int, int]:
    """The longest row for which `fits` was true, or 0, and the shortest for which it was not; multiples of `STEP`.

    Args:
        fits: true up to some length, and false from there on.
        start: the first length that is tried.
        factor: by which it then grows, or shrinks, until the other answer comes.
    """
    low = high = start
    if fits(start):
        while fits(high := max(high + STEP, _rounded(high * factor))):
            low = high
    else:
        while (low := min(high - STEP, _rounded(high / factor))) and not fits(low):
            high = low
    while high - low > max(STEP, high // CLOSE):
        middle = _rounded((low + high) / 2)
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low, high


def _rounded(length: float) -> int:
    return round(length / STEP) * STEP


def predicted_fits(name: str, length: int, options: argparse.Namespace) -> bool:
    """Whether the planner has a step of one such row fit the device, and `HOST_BYTES`."""
    from transformers import AutoConfig

    import lowtide
    from bench.memory.child import adapters
    from lowtide.planner.devices import device_named

    case = CASES[name]
    with tempfile.TemporaryDirectory() as folder:
        config = lowtide.SFTConfig(folder, model_init_kwargs={"dtype": "bfloat16"}, **flags(case, length))
        estimate = lowtide.estimate(
            config,
            AutoConfig.for_model(**shape(options.layers)),
            lengths=[length],
            peft_config=adapters() if case.lora else None,
            device=options.device,
        )
    device = device_named(options.device)
    return estimate.reserved_bytes <= device.available_bytes and estimate.host_bytes <= HOST_BYTES


def longest_in_pieces(name: str, device: str) -> dict[str, Any]:
    """The longest row of whole pieces that the planner has fit the device and `HOST_BYTES`, and what it takes; of none
    that fits, one that does not.

    What grows with the row are the keys on the host, equally with each piece: so two lengths tell where to look.
    """
    few, more = (in_pieces(name, count, device) for count in (2, 4))
    each = (more["host_bytes"] - few["host_bytes"]) / 2
    count = 4 + int((HOST_BYTES - more["host_bytes"]) / each)
    while not (found := in_pieces(name, count, device))["fits"] and count > 2:
        count -= 1
    return found


def in_pieces(name: str, count: int, device: str) -> dict[str, Any]:
    """What is predicted of a step of one row of so many pieces."""
    from transformers import AutoConfig

    import lowtide
    from bench.memory.child import adapters, four_bits
    from lowtide.planner.devices import device_named

    case, tokens = PIECES[name], count * PIECE
    described: dict[str, Any] = QWEN3_8B | {"max_position_embeddings": POSITIONS}
    options = {**LEAN, **case.options, "tokens_per_microbatch": PIECE, "chain_storage": "host"}
    with tempfile.TemporaryDirectory() as folder:
        config = lowtide.SFTConfig(
            folder, model_init_kwargs={"dtype": "bfloat16"}, **flags(LongCase(options, case.lora), tokens)
        )
        found = lowtide.estimate(
            config,
            AutoConfig.for_model(**described),
            lengths=[tokens],
            peft_config=adapters() if case.lora else None,
            quantization_config=four_bits() if case.four_bits else None,
            device=device,
        )
    room = device_named(device).available_bytes
    return {
        "tokens": tokens,
        "options": options,
        "peak_bytes": found.peak_bytes,
        "host_bytes": found.host_bytes,
        "seconds": tokens / found.tokens_per_second if found.tokens_per_second else None,
        "fits": found.reserved_bytes <= room and found.host_bytes <= HOST_BYTES,
    }


def trains(name: str, length: int, options: argparse.Namespace) -> bool:
    """Whether two steps of one such row run on the GPU here."""
    return trained(name, length, options)["fits"]


def trained(name: str, length: int, options: argparse.Namespace, steps: int = 2) -> dict[str, Any]:
    """What a process that trained such rows says: whether they fit, and the seconds of each step but the first."""
    spec = {"case": name, "length": length, "layers": options.layers, "steps": steps, "device": options.here}
    environment = {allocator.NAME: allocator.SETTING}
    return run_child(spec, lambda step: None, SECONDS, "bench.longest.child", environment)


def overlap(length: int, options: argparse.Namespace) -> dict[str, float]:
    """The median seconds of a step with checkpointing, without and with offloading; each length fits any GPU that the
    model does."""
    plain, offloaded = (
        statistics.median(trained(name, length, options, steps=5)["seconds"])
        for name in ("LoRA, checkpointing", "LoRA, checkpointing and offloading")
    )
    return {"plain_seconds": plain, "offloaded_seconds": offloaded, "ratio": offloaded / plain}


def record(run: dict[str, Any], options: argparse.Namespace, name: str = NAME, kind: str = LONGEST) -> None:
    """Puts a run beside those of the same GPU, over an earlier one of its name; what is predicted is so anywhere."""
    here = hardware("cuda") if options.here == "cuda" else {"gpu": f"{options.device} predicted"}
    if kind == LONG_PIECES:
        here = {"gpu": f"{options.device} predicted"}
    key = ("case", "layers", "device") if kind == LONGEST else ("case", "device")
    runs = merged(name, here, {"device": options.here} | run | {"versions": versions()}, key=key)
    write(name, {"kind": kind, "hardware": here, "runs": runs})


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.longest", description=SUMMARY)
    parser.add_argument("--device", default=None, help="predict for this GPU; default: the one here, or H100-80GB")
    parser.add_argument("--layers", type=int, default=LLAMA_8B["num_hidden_layers"], help="of the model")
    parser.add_argument("--only", nargs="+", choices=[*PIECES, *CASES], metavar="NAME", help="these rows of the table")
    parser.add_argument("--no-record", dest="record", action="store_false", help="print only")
    options = parser.parse_args(argv)
    options.here = device_here() if options.device is None else "cpu"
    options.device = options.device or ("cuda" if options.here == "cuda" else "H100-80GB")
    return options


if __name__ == "__main__":
    sys.exit(main())
