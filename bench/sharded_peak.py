"""`python -m bench.sharded_peak`: the peak of a rank whose weights are sharded, beside the sum that it is made of.

    states / N + activations + two layers + the head and its gradient

States are 16 bytes a parameter (float32, AdamW) on N ranks. In the rows form of head and embedding
(`fsdp_split_vocabulary`) no head is whole anywhere, and one chunk of logits takes its place. The activations of a
rank's rows are those of `lowtide.estimate` on one device, the chunks of logits among them. Measured are the bytes of
living tensors on the rank that holds most; what the process took above its imports stands beside them, with the copies
that gloo makes and what the allocator keeps. Under ZeRO-3 buckets are those of `"auto"`, and as little is gathered as
can be: with DeepSpeed's own sizes, a model of less than 500 million parameters stays whole through the backward.

With `--beside-replicas` each engine is run on the same rows, as its option alone has it, and the peak of its process
stands beside that of whole copies. Run it where deepspeed is installed, or name engines without it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.inputs.rows import CASES as METHOD_CASES
from bench.inputs.shapes import KNOWN_SHAPES
from bench.inputs.tokenizer import load_tokenizer, tokenizer_for
from bench.measuring.measure import hardware
from bench.measuring.processes import ChildFailed
from bench.measuring.results import BESIDE_REPLICAS, SHARDED_PEAK, over_earlier, versions, write
from bench.sharded.ranks import Case, parser_of_ranks, results_of_ranks

NAME, BESIDE = "sharded-peak", "sharded-beside-replicas"
MOST = 1.1
"""What is to be reached: measured over the sum."""
BYTES = 4
"""Of a number in float32."""
LARGE = "qwen2.5-0.5b-float32"
"""Two ranks of it take some 14 GB."""
IN_ROWS = {"fsdp_split_vocabulary": True}
LEAST_GATHERED = {
    "reduce_bucket_size": "auto",
    "stage3_prefetch_bucket_size": 0,
    "stage3_max_live_parameters": 0,
    "stage3_max_reuse_distance": 0,
}
"""Of DeepSpeed's stage 3."""
OF_REPLICAS = {"replicas": 1.0, "fsdp2": 0.75, "zero2": 1.0, "zero3": 1.0}
"""What is to be reached: the peak of a rank over that of whole copies."""
SMALL = ("llama-22m", "llama-60m")


@dataclass(frozen=True)
class PeakCase:
    """What is trained, over how many ranks, by which engine."""

    engine: str
    ranks: int
    shape: str = "llama-22m"
    in_rows: bool = False

    @property
    def name(self) -> str:
        engine = {"fsdp2": "FSDP2", "zero3": "ZeRO-3"}[self.engine] + (", rows" if self.in_rows else "")
        return f"{engine}, {self.shape}, {self.ranks} ranks"


CASES = {
    each.name: each
    for shape in ("llama-22m", LARGE)
    for ranks in (2, 4)
    for each in (
        PeakCase("fsdp2", ranks, shape),
        PeakCase("fsdp2", ranks, shape, in_rows=True),
        PeakCase("zero3", ranks, shape),
    )
}
"""By name."""


def main(argv: list[str] | None = None) -> int:
    """Measures, prints and records; returns 1 where the target is missed or a run fails."""
    options, console = parse(argv), Console()
    return beside_replicas(options, console) if options.beside_replicas else beside_the_sum(options, console)


def beside_replicas(options: argparse.Namespace, console: Console) -> int:
    """Peaks of the processes of all engines, by shape."""
    table = Table("model", "engine", "loading", "process", "of replicas", "target")
    reached = True
    for shape in options.shapes:
        whole = 0.0
        for engine in ("replicas", *(each for each in OF_REPLICAS if each in options.engines and each != "replicas")):
            with console.status(f"{engine}, {shape}"):
                ranks = ranks_of(PeakCase(engine, 2, shape), options)
            peak, loading = (max(each[name] for each in ranks) for name in ("peak_above_start_bytes", "loading_bytes"))
            whole = whole or peak
            row = [shape, engine, *(f"{size / 1e6:.0f}" for size in (loading, peak))]
            row += [f"{peak / whole:.2f}", f"{OF_REPLICAS[engine]:.2f}"]
            table.add_row(*row)
            console.print(*row, sep="  ")
            reached &= peak / whole <= OF_REPLICAS[engine]
            if options.record:
                found = {"process": peak, "loading": loading, "of_replicas": peak / whole}
                results = {"kind": BESIDE_REPLICAS, "hardware": hardware("cpu"), "versions": versions()}
                name = f"{engine}, {shape}, 2 ranks"
                results["cases"] = over_earlier(BESIDE, results["hardware"], "cases", {name: found})
                write(BESIDE, results)
    console.print(table)
    console.print("in MB")
    return int(not reached)


def beside_the_sum(options: argparse.Namespace, console: Console) -> int:
    """Peaks of living tensors beside the sum of what has to be there."""
    table = Table("run", "states / N", "activations", "2 layers", "head", "sum", "measured", "ratio", "process, ratio")
    found, failed = {}, False
    for name in options.cases:
        try:
            with console.status(name):
                found[name] = measured(CASES[name], options)
        except ChildFailed as failure:
            failed = True
            console.print(name, failure.reason, *failure.last_lines, sep="\n", markup=False, highlight=False)
            continue
        table.add_row(name, *cells(found[name]))
        console.print(name, *cells(found[name]), sep="  ")
        if options.record:
            results = {"kind": SHARDED_PEAK, "hardware": hardware("cpu"), "versions": versions()}
            results["cases"] = over_earlier(NAME, results["hardware"], "cases", found)
            write(NAME, results)
    console.print(table)
    console.print(f"in MB; target: measured at most {MOST} of the sum")
    return int(failed or any(each["ratio"] > MOST for each in found.values()))


def measured(case: PeakCase, options: argparse.Namespace) -> dict[str, Any]:
    """The terms of the sum, and what the rank took that held most; in bytes."""
    terms = terms_of(case, options)
    ranks = ranks_of(case, options, counts_tensors=True, zero=LEAST_GATHERED)
    total = sum(terms.values())
    process = max(rank["peak_above_start_bytes"] for rank in ranks)
    found = max(rank.get("tensor_bytes", process) for rank in ranks)
    return {**terms, "sum": total, "measured": found, "ratio": found / total, "process": process}


def ranks_of(case: PeakCase, options: argparse.Namespace, **more: Any) -> list[dict[str, Any]]:
    """What each rank measured; see `bench.sharded.child`."""
    of_run = Case("sft", case.engine, ranks=case.ranks, shape=case.shape, rows=options.rows * case.ranks)
    steps = options.warmup + options.timed
    with tempfile.TemporaryDirectory() as folder:
        spec = {**vars(of_run), "contestant": "lowtide", "folder": folder, **more}
        spec |= {"options": IN_ROWS if case.in_rows else {}, "first_rows": steps * of_run.rows}
        spec |= {"warmup": options.warmup, "timed": options.timed}
        spec["tokenizer"] = str(tokenizer_for(METHOD_CASES["sft"]["gsm8k"].rows()))
        return results_of_ranks(spec, options)


def terms_of(case: PeakCase, options: argparse.Namespace) -> dict[str, int]:
    """The terms of the sum, in bytes."""
    import torch
    from datasets import Dataset
    from transformers import AutoConfig, AutoModelForCausalLM

    from lowtide import SFTConfig
    from lowtide.planning import estimate

    config = AutoConfig.for_model(**KNOWN_SHAPES[case.shape].config)
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config)
    layer = sum(p.numel() for p in model.get_decoder().layers[0].parameters())
    rows = METHOD_CASES["sft"]["gsm8k"].rows()
    steps = options.warmup + options.timed
    args = SFTConfig(
        output_dir="unused", per_device_train_batch_size=options.rows, bf16=False, use_cpu=True, rehearsal=False
    )
    found = estimate(
        args,
        config,
        dataset=Dataset.from_list(rows[: steps * options.rows * case.ranks]),
        processing_class=load_tokenizer(Path(tokenizer_for(rows))),
        device="cpu",
    )
    activations = max(held.get("activations", 0) + held.get("head", 0) for held in found.phases.values())
    head = 0 if case.in_rows else 2 * config.vocab_size * config.hidden_size * BYTES
    return {
        "states": 4 * BYTES * sum(p.numel() for p in model.parameters()) // case.ranks,
        "activations": activations,
        "layers": 2 * layer * BYTES,
        "head": head,
    }


def cells(found: dict[str, Any]) -> list[str]:
    """Terms and ratios of a run, for a table."""
    sizes = [f"{found[name] / 1e6:.0f}" for name in ("states", "activations", "layers", "head", "sum", "measured")]
    process = f"{found['process'] / 1e6:.0f}, {found['process'] / found['sum']:.2f}"
    return [*sizes, f"{found['ratio']:.2f}", process]


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = parser_of_ranks(__doc__)
    small = [name for name, case in CASES.items() if case.shape == "llama-22m"]
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=small, metavar="CASE")
    parser.add_argument("--rows", type=int, default=4, help="of a rank in a step [%(default)s]")
    parser.add_argument("--beside-replicas", action="store_true", help="measure peaks beside those of whole copies")
    parser.add_argument("--engines", nargs="+", choices=list(OF_REPLICAS), default=list(OF_REPLICAS), metavar="ENGINE")
    parser.add_argument("--shapes", nargs="+", choices=SMALL, default=SMALL, metavar="MODEL", help="beside replicas")
    parser.set_defaults(timed=1, warmup=1)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
