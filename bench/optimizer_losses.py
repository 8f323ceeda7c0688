"""`python -m bench.optimizer_losses`: does an optimizer of few bytes learn what float32 AdamW learns?

Two models with random weights are trained for 500 steps by each optimizer, on the same rows in the same order: that of
`lowtide demo` (0.2M parameters, batches of 128) and llama-22m on GSM8K (batches of 2). Compared are the loss of
held-out rows at the end and the mean training loss of the last 100 steps, each relative to float32 AdamW's. An
optimizer with bfloat16 weights also computes in bfloat16; `adamw_compressed` beside the others shows what of the
distance comes from that alone, for its masters are exact. And float32 AdamW is run once more on the rows in another
order: a distance below that of these two says nothing. Ten minutes or more on two cores.
"""

import argparse
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.inputs.rows import GSM8K_FILE, Row, gsm8k_rows
from bench.inputs.shapes import SHAPES, build_model
from bench.inputs.tokenizer import load_tokenizer, tokenizer_for
from bench.measuring.measure import hardware
from bench.measuring.results import LOSSES, merged, versions, write

PLAIN = "adamw_torch_fused"
OTHER_ORDER = f"{PLAIN}, another order"
OPTIMIZERS = (PLAIN, OTHER_ORDER, "adamw_flash")
CASES = ("demo", "llama-22m")
WITHIN = 0.001
"""Relative to the loss of float32 AdamW."""
HELD_OUT, LAST = 200, 100
"""Rows that are not trained on, and the steps at the end whose training loss is averaged."""
SMALL_BATCH = 2
NAME = "optimizer-losses"


def main(argv: list[str] | None = None) -> int:
    """Measures, prints and records; returns 1 where a loss is further away than it should be."""
    options, console, missed = parse(argv), Console(), False
    for case in options.cases:
        plain: dict[str, Any] = {}
        for optim in options.optimizers:
            with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
                run = pool.apply(measure, (case, optim, options.steps, options.gsm8k))
            plain = plain or run
            for name in ("held_out_loss", "training_loss"):
                run[f"{name}_distance"] = run[name] / plain[name] - 1
            far = optim == "adamw_flash" and abs(run["held_out_loss_distance"]) > WITHIN
            missed |= far
            verdict = f", target {WITHIN:.1%}: {'missed' if far else 'reached'}" if optim == "adamw_flash" else ""
            console.print(
                f"{case}, {optim}: held-out loss {run['held_out_loss']:.4f} ({run['held_out_loss_distance']:+.2%}"
                f"{verdict}), last {LAST} training losses {run['training_loss']:.4f} "
                f"({run['training_loss_distance']:+.2%}), {run['seconds']:.0f} s",
                soft_wrap=True,
            )
            if options.record:
                facts = {"kind": LOSSES, "hardware": hardware("cpu")}
                key = ("case", "optim", "steps")
                runs = merged(NAME, facts["hardware"], run | {"versions": versions()}, key=key)
                write(NAME, facts | {"runs": runs})
    return int(missed)


def measure(case: str, optim: str, steps: int, gsm8k: Path) -> dict[str, Any]:
    """Returns the losses of one model trained by one optimizer."""
    from datasets import Dataset
    from transformers import TrainerCallback

    from lowtide import SFTConfig, SFTTrainer

    losses: list[float] = []

    class Losses(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            losses.extend(logs[name] for name in ("loss",) if name in logs)

    model, tokenizer, rows, settings = demo() if case == "demo" else llama_22m(steps, gsm8k)
    if optim == OTHER_ORDER:
        settings["data_seed"] = 1
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as output_dir:
        trainer = SFTTrainer(
            model=model,
            args=SFTConfig(
                output_dir=output_dir, optim=optim.split(",")[0], max_steps=steps, logging_steps=1, save_strategy="no",
                report_to="none", disable_tqdm=True, use_cpu=True, gradient_checkpointing=False, **settings,
            ),
            train_dataset=Dataset.from_list(rows[HELD_OUT:]),
            eval_dataset=Dataset.from_list(rows[:HELD_OUT]),
            processing_class=tokenizer,
            callbacks=[Losses()],
        )  # fmt: skip
        trainer.train()
        held_out = trainer.evaluate()["eval_loss"]
    assert len(losses) == steps
    return {
        "case": case,
        "optim": optim,
        "steps": steps,
        "held_out_loss": held_out,
        "training_loss": statistics.mean(losses[-LAST:]),
        "first_loss": losses[0],
        "seconds": time.perf_counter() - start,
        "source": "generated arithmetic" if case == "demo" else gsm8k_source(gsm8k),
    }


def demo() -> tuple[Any, Any, list[Row], dict[str, Any]]:
    """The model, tokenizer, rows and settings of `lowtide demo`."""
    from lowtide.demo.data import make_questions
    from lowtide.demo.lessons import COMMON, LESSONS
    from lowtide.demo.model import make_model, make_tokenizer

    tokenizer, lesson = make_tokenizer(), LESSONS["sft"]
    questions, held_out = make_questions(HELD_OUT, seed=0)
    rows = [row for question in (*held_out, *questions) for row in lesson.rows(question)]
    ours = {"logging_steps", "save_strategy", "use_cpu", "gradient_checkpointing"}
    settings = {name: value for name, value in {**COMMON, **lesson.settings}.items() if name not in ours}
    return make_model(tokenizer, seed=0), tokenizer, rows, settings


def llama_22m(steps: int, gsm8k: Path) -> tuple[Any, Any, list[Row], dict[str, Any]]:
    """The model of the other benchmarks, and rows that are seen once each."""
    rows = rows_of(gsm8k, HELD_OUT + SMALL_BATCH * steps)
    settings = {
        "per_device_train_batch_size": SMALL_BATCH, "learning_rate": 3e-4, "lr_scheduler_type": "cosine",
        "warmup_steps": 40, "weight_decay": 0.1, "adam_beta2": 0.95, "shuffle_dataset": False,
    }  # fmt: skip
    return build_model(SHAPES["llama-22m"]), load_tokenizer(tokenizer_for(rows)), rows, settings


def rows_of(gsm8k: Path, count: int) -> list[Row]:
    if not gsm8k.exists():
        rows = gsm8k_rows()
        return [rows[number % len(rows)] for number in range(count)]
    with gsm8k.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in islice(lines, count)]


def gsm8k_source(gsm8k: Path) -> str:
    return "GSM8K's training split" if gsm8k.exists() else "generated conversations of GSM8K's lengths"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.optimizer_losses", description="Compare what optimizers learn in as many steps."
    )
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--optimizers", nargs="+", default=OPTIMIZERS, help="others are compared with the first")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--gsm8k", type=Path, default=GSM8K_FILE, help="its rows as messages, one JSON object a line")
    parser.add_argument("--no-record", dest="record", action="store_false", help="print only")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
