"""`python -m bench.start_peak`: the peak while a run starts beside the peak while it trains, from a float32 checkpoint.

Qwen2.5-0.5B from its config (random weights), saved in float32 and loaded by name. `adamw_flash` makes its weights
bfloat16 with masters of 24 bits before the first step: each weight is read from the file, split, and its pages are let
go. Two steps of 2 rows of 512 tokens, stepped in backward, in a process of its own. Resident memory above the imports,
in bytes; the prediction is that of the trainer's own start-up report.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from rich.console import Console

from bench.child import say
from bench.measure import GIGABYTE, PeakMeter, resident_bytes
from bench.memory import ENVIRONMENT
from bench.processes import ChildFailed, run_child
from bench.shapes import QWEN_05B, Shape, build_model

SUMMARY = "Show the peak while a run starts from a float32 checkpoint, and while it trains."
ROWS, TOKENS, STEPS = 2, 512, 2
OPTIONS: dict[str, Any] = {
    "optim": "adamw_flash",
    "optimizer_in_backward": True,
    "max_grad_norm": 0.0,
    "per_device_train_batch_size": ROWS,
    "max_steps": STEPS,
    "dataset_kwargs": {"skip_prepare_dataset": True},
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "use_cpu": True,
}
TIMEOUT = 1800


def main(argv: list[str] | None = None) -> int:
    """Measures and prints; returns 1 where a run fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the bytes as one JSON object")
    parser.add_argument("specification", nargs="?", type=json.loads, help="a part of it, for a process of its own")
    options = parser.parse_args(argv)
    if options.specification:
        child(options.specification)
        return 0
    console = Console()
    with tempfile.TemporaryDirectory() as folder:
        try:
            run_child({"save": folder}, lambda _: None, TIMEOUT, "bench.start_peak")
            found = run_child({"model": folder}, lambda _: None, TIMEOUT, "bench.start_peak", ENVIRONMENT)
        except ChildFailed as failure:
            console.print(failure.reason, *failure.last_lines, sep="\n")
            return 1
    if options.json:
        print(json.dumps(found))
    for name in ("start", "training"):
        console.print(f"{name}: {found[name] / GIGABYTE:.2f} GB above the imports")
    return 0


def child(spec: dict[str, Any]) -> None:
    """One part of it, in this process."""
    if "save" in spec:
        build_model(Shape(QWEN_05B, device="cpu", dtype="float32")).save_pretrained(spec["save"])
        say("result")
        return
    say("result", **measured(spec["model"]))


def measured(model: str) -> dict[str, int]:
    """The peaks of a run from the folder of a model."""
    import transformers.models.qwen2.modeling_qwen2
    from transformers import TrainerCallback

    from bench.cases import longtail_rows
    from bench.tokenizer import load_tokenizer, tokenizer_for
    from lowtide import SFTConfig, SFTTrainer

    assert transformers.models.qwen2.modeling_qwen2
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(3, 32_000, (STEPS * ROWS, TOKENS), generator=generator).tolist()
    tokenizer = load_tokenizer(tokenizer_for(longtail_rows()))
    meter, found = PeakMeter("cpu"), {}

    class Started(TrainerCallback):
        """Reads the peak before the first step."""

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            found.setdefault("start", meter.stop()["peak_bytes"] - imports)

    imports = resident_bytes("VmRSS")
    meter.start()
    with tempfile.TemporaryDirectory() as output:
        trainer = SFTTrainer(
            model=model,
            args=SFTConfig(output_dir=str(Path(output)), **OPTIONS),
            train_dataset=Dataset.from_dict({"input_ids": rows}),
            processing_class=tokenizer,
            callbacks=[Started()],
        )
        trainer.train()
    return {"start": found["start"], "training": meter.stop()["peak_bytes"] - imports}


if __name__ == "__main__":
    sys.exit(main())
