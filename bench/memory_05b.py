"""`python -m bench.memory_05b`: the resident peak of fine-tuning all of Qwen2.5-0.5B in float32 on a CPU.

Qwen2.5-0.5B from its config (random weights), AdamW, 8 rows of 1,024 tokens a step, gradient checkpointing, two
steps, so that the second holds the optimizer's states too. Weights, gradients and the two moments are 16 bytes a
parameter, 7.90 GB; what is above them is what the implementation costs. A token budget of one row keeps the
activations small and, as micro-batches are summed exactly, does not change the numbers.
"""

import argparse
import sys
import tempfile
from typing import Any

from rich.console import Console

from bench.measure import GIGABYTE, PeakMeter, hardware, resident_bytes
from bench.results import MEMORY, versions, write
from bench.shapes import QWEN_05B, Shape, build_model, parameter_counts

TARGET_GB = 8.3
STATE_BYTES = 16
"""Bytes a parameter: float32 weight, gradient and AdamW's two moments."""


def main(argv: list[str] | None = None) -> int:
    """Trains, prints the peak and records it; returns 1 where a full-length run misses the target."""
    options, console = parse(argv), Console()
    results = measure(options)
    peak, states = results["peak_less_imports_bytes"] / GIGABYTE, results["states_bytes"] / GIGABYTE
    full = options.length == 1024 and options.rows == 8
    reached = peak <= TARGET_GB
    console.print(f"{options.rows} rows of {options.length} tokens, {results['seconds']:.0f} s for two steps")
    console.print(f"resident peak less imports {peak:.2f} GB; states alone {states:.2f} GB")
    console.print(f"target at most {TARGET_GB} GB: {'reached' if reached else 'NOT reached'}" if full else "")
    if full and options.record:
        console.print(f"recorded in {write('memory-qwen2.5-0.5b', results)}")
    return 0 if reached or not full else 1


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the peak of two steps, less what the process held when everything was imported."""
    import torch
    from datasets import Dataset

    from bench.cases import longtail_rows
    from bench.tokenizer import load_tokenizer, tokenizer_for
    from lowtide import SFTConfig, SFTTrainer

    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, 32_000, (2 * options.rows, options.length), generator=generator)
    dataset = Dataset.from_dict({"input_ids": tokens.tolist()})
    tokenizer = load_tokenizer(tokenizer_for(longtail_rows()))
    meter = PeakMeter("cpu")
    meter.start()
    imports = resident_bytes("VmRSS")
    model = build_model(Shape(QWEN_05B, device="cpu", dtype="float32"))
    with tempfile.TemporaryDirectory() as output_dir:
        args = SFTConfig(
            output_dir=output_dir,
            per_device_train_batch_size=options.rows,
            max_length=options.length,
            max_steps=2,
            gradient_checkpointing=True,
            tokens_per_microbatch=options.length,
            use_cpu=True,
            bf16=False,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
        )
        trainer = SFTTrainer(model=model, args=args, train_dataset=dataset, processing_class=tokenizer)
        outcome = trainer.train()
    memory = meter.stop()
    return {
        "kind": MEMORY,
        "rows": options.rows,
        "length": options.length,
        "imports_bytes": imports,
        "peak_bytes": memory["peak_bytes"],
        "peak_less_imports_bytes": memory["peak_bytes"] - imports,
        "states_bytes": STATE_BYTES * parameter_counts(model)[0],
        "target_bytes": int(TARGET_GB * GIGABYTE),
        "seconds": outcome.metrics["train_runtime"],
        "hardware": hardware("cpu"),
        "versions": versions(),
    }


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.memory_05b")
    parser.add_argument("--rows", type=int, default=8, help="rows a step")
    parser.add_argument("--length", type=int, default=1024, help="tokens in a row")
    parser.add_argument("--no-record", dest="record", action="store_false", help="print only")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
