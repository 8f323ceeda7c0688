"""`python -m bench.base_dtype`: what base weights in fewer bits change.

The model of `lowtide demo` is trained whole for some steps, and saved. From there LoRA goes on with the base as it is,
in FP8 computed in float32 (where weights alone are rounded) and in bfloat16 (where products are in 8 bits), and in
NVFP4 (torchao). Compared with the base as it is, in float32: the layers' weights, the held-out loss before a step, the
gradient of the adapters in the first step, and the held-out loss at the end. Relative distances are those of norms.
Some minutes on two cores.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from bench.measuring.measure import hardware
from bench.measuring.results import BASE_DTYPE, versions, write
from bench.optimizer_losses import HELD_OUT, demo

FORMS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "as it is, bfloat16": {"bf16": True},
    "float8": {"base_dtype": "float8"},
    "float8, bfloat16": {"base_dtype": "float8", "bf16": True},
    "nvfp4": {"base_dtype": "nvfp4"},
}
NAME = "base-dtype"


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints and records."""
    options, console = parse(argv), Console()
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder) / "base"
        train(base, options.base_steps)
        runs: dict[str, dict[str, Any]] = {}
        for form, settings in FORMS.items():
            found = measured(base, options.steps, **settings)
            exact = runs["as it is"] if runs else found
            parts = {part: distance(found.pop(part), exact[part]) for part in ("weights", "gradient") if runs}
            runs[form] = found | parts
            told = "".join(f", {part} {far:.2%} away" for part, far in parts.items())
            before, after = found["held_out_loss_before"], found["held_out_loss"]
            console.print(f"{form}: held-out loss {before:.4f} -> {after:.4f}{told}", soft_wrap=True)
    for part in ("weights", "gradient"):
        del runs["as it is"][part]
    if options.record:
        facts = {"kind": BASE_DTYPE, "hardware": hardware("cpu"), "versions": versions()}
        write(NAME, facts | {"base_steps": options.base_steps, "steps": options.steps, "runs": runs})
    return 0


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / other.norm())


def trainer(folder: Path, model: Any, steps: int, peft_config: Any = None, **options: Any) -> Any:
    """A trainer of the demo's rows."""
    from datasets import Dataset

    from lowtide import SFTConfig, SFTTrainer

    _, tokenizer, rows, settings = demo()
    given = {**settings, "max_steps": steps, **options}
    return SFTTrainer(
        model=model,
        args=SFTConfig(
            output_dir=str(folder), save_strategy="no", report_to="none", disable_tqdm=True, use_cpu=True,
            logging_steps=1000, gradient_checkpointing=False, **given,
        ),
        train_dataset=Dataset.from_list(rows[HELD_OUT:]),
        eval_dataset=Dataset.from_list(rows[:HELD_OUT]),
        processing_class=tokenizer,
        peft_config=peft_config,
    )  # fmt: skip


def train(folder: Path, steps: int) -> None:
    """Trains the whole model, and saves it."""
    made = trainer(folder, demo()[0], steps)
    made.train()
    made.save_model(str(folder))


def measured(base: Path, steps: int, **options: Any) -> dict[str, Any]:
    """The losses of a LoRA run; and, flat, the weights that layers stand for and the adapters' first gradient."""
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM

    from lowtide.engine.weights.merging import checkpoint_weights

    def run(steps: int, **more: Any) -> Any:
        model = AutoModelForCausalLM.from_pretrained(base)
        torch.manual_seed(0)
        adapters = LoraConfig(task_type="CAUSAL_LM", r=8, lora_alpha=16, target_modules="all-linear")
        return trainer(base.parent / "run", model, steps, adapters, **options, **more)

    made = run(steps)
    matrices = (weight for name, weight in checkpoint_weights(made.model) if ".layers." in name and weight.dim() == 2)
    weights = [weight.float().flatten() for weight in matrices]
    before = made.evaluate()["eval_loss"]
    made.train()
    once = run(1, optim="sgd", learning_rate=1.0, lr_scheduler_type="constant", warmup_steps=0, max_grad_norm=0.0)
    start = {name: p.detach().clone() for name, p in once.model.named_parameters() if p.requires_grad}
    once.train()
    moved = [start[name] - p.detach() for name, p in once.model.named_parameters() if p.requires_grad]
    return {
        "held_out_loss_before": before,
        "held_out_loss": made.evaluate()["eval_loss"],
        "weights": torch.cat(weights),
        "gradient": torch.cat([each.flatten() for each in moved]),
    }


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.base_dtype", description="Compare base weights in fewer bits with those as they are."
    )
    parser.add_argument("--base-steps", type=int, default=60, help="of training the whole model before")
    parser.add_argument("--steps", type=int, default=20, help="of LoRA")
    parser.add_argument("--no-record", dest="record", action="store_false", help="print only")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
