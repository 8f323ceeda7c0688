"""One training of `bench.side_by_side`, in a process of its own."""

import random
import statistics
import tempfile
from pathlib import Path
from typing import Any

from bench.measuring.arguments import specification
from bench.side_by_side.cases import (
    CASES,
    CONTESTANTS,
    EQUAL,
    EQUAL_STEPS,
    LONGEST,
    MEDIAN,
    RANK,
    SPREAD,
    TARGETS,
    UNEQUAL_STEPS,
    WARM,
    Case,
    Contestant,
)

SMALL = {
    "vocab_size": 500,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
"""In place of a model's sizes, on a CPU; its rows are so many times shorter:"""
SHORTER = 32


def main(spec: dict[str, Any]) -> None:
    from bench.compare.child import say

    case, contestant = CASES[spec["case"]], CONTESTANTS[spec["contestant"]]
    say("result", **trained(case, contestant, small=spec["small"]))


def trained(case: Case, contestant: Contestant, *, small: bool) -> dict[str, Any]:
    """Trains steps of unequal rows, then of equal ones; tokens a second of each, and the bytes that torch's allocator
    handed out and reserved at most in the steps that are counted.

    Args:
        small: a tiny model in float32 on a CPU, to see that it works.
    """
    if contestant.package == "unsloth":
        import unsloth  # noqa: F401  # pyright: ignore[reportMissingImports]  (before transformers)
    import torch

    from bench.compare.child import clock, differences

    lengths = row_lengths(case.rows, SHORTER if small else 1)
    meter = None if small else torch.cuda
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model"
        saved(case, path, small=small)
        timer = metered(clock("cpu" if small else "cuda"), meter)
        trainer = made(case, contestant, path, [n for step in lengths for n in step], timer, small=small)
        trainer.train()
    tokens = [sum(step) for step in lengths][1:]
    seconds = differences(timer.ends)
    unequal, equal = slice(WARM - 1, UNEQUAL_STEPS - 1), slice(UNEQUAL_STEPS, None)
    return {
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "seconds": seconds,
        "equal_tokens_per_second": statistics.median(map(_ratio, tokens[equal], seconds[equal])),
        "unequal_tokens_per_second": sum(tokens[unequal]) / sum(seconds[unequal]),
        "equal_bytes": max(timer.handed_out[UNEQUAL_STEPS + 1 :], default=None),
        "unequal_bytes": max(timer.handed_out[WARM:UNEQUAL_STEPS], default=None),
        "reserved_bytes": max(timer.reserved[WARM:], default=None),
    }


def _ratio(tokens: int, seconds: float) -> float:
    return tokens / seconds


def row_lengths(rows: int, shorter: int = 1) -> list[list[int]]:
    """[steps][rows]: tokens of each row, the same for all contestants."""
    drawn, steps = random.Random(7), []
    for _ in range(UNEQUAL_STEPS):
        found = (int(drawn.lognormvariate(0, SPREAD) * MEDIAN) for _ in range(rows))
        steps.append([max(12, min(LONGEST, length) // shorter) for length in found])
    return steps + [[EQUAL // shorter] * rows] * EQUAL_STEPS


def metered(timer: Any, meter: Any) -> Any:
    """A clock that notes after each step what torch's allocator handed out and reserved at most in it."""

    class Metered(type(timer)):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            super().on_step_end(args, state, control, **kwargs)
            if meter is not None:
                self.handed_out.append(meter.max_memory_allocated())
                self.reserved.append(meter.max_memory_reserved())
                meter.reset_peak_memory_stats()

    timer.__class__ = Metered
    timer.handed_out, timer.reserved = [], []
    return timer


def saved(case: Case, path: Path, *, small: bool) -> None:
    """Writes a model of random weights and a tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from lowtide.demo.model import make_tokenizer

    shape = {**case.shape, **(SMALL if small else {})}
    if small:
        shape.pop("head_dim", None)
    with torch.device("cpu" if small else "cuda"):
        dtype = torch.float32 if small else torch.bfloat16
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**shape), dtype=dtype)
    model.save_pretrained(path)
    make_tokenizer().save_pretrained(path)


def made(case: Case, contestant: Contestant, path: Path, lengths: list[int], timer: Any, *, small: bool) -> Any:
    """A contestant's trainer."""
    import importlib

    from transformers import AutoTokenizer

    package = importlib.import_module("lowtide" if contestant.package == "lowtide" else "trl")
    options: dict[str, Any] = {
        "output_dir": str(path.parent / "run"),
        "per_device_train_batch_size": case.rows,
        "max_steps": UNEQUAL_STEPS + EQUAL_STEPS,
        "max_length": LONGEST,
        "learning_rate": 1e-5,
        "bf16": not small,
        "use_cpu": small,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "train_sampling_strategy": "sequential",
        "dataset_kwargs": {"skip_prepare_dataset": True},
        "gradient_checkpointing": True,
    }
    given = {"train_dataset": rows_of(lengths), "callbacks": [timer]}
    if contestant.package == "unsloth":
        model, tokenizer = by_unsloth(case, path)
        args = package.SFTConfig(**options | dict(contestant.flags))
        return package.SFTTrainer(model, args=args, processing_class=tokenizer, **given)
    options["model_init_kwargs"] = {"dtype": "float32" if small else "bfloat16"}
    if case.four_bits and contestant.package == "trl":
        options["model_init_kwargs"]["quantization_config"] = four_bits()
    elif case.four_bits:
        given["quantization_config"] = four_bits()
    args = package.SFTConfig(**options | dict(contestant.flags))
    tokenizer = AutoTokenizer.from_pretrained(path)
    return package.SFTTrainer(str(path), args=args, processing_class=tokenizer, peft_config=adapters(case), **given)


def rows_of(lengths: list[int]) -> Any:
    """Rows of random tokens."""
    from datasets import Dataset

    drawn = random.Random(8)
    ids = [[drawn.randrange(10, 100) for _ in range(length)] for length in lengths]
    return Dataset.from_dict({"input_ids": ids, "labels": ids, "attention_mask": [[1] * len(row) for row in ids]})


def adapters(case: Case) -> Any:
    from peft import LoraConfig

    return LoraConfig(task_type="CAUSAL_LM", r=RANK, lora_alpha=RANK, target_modules=TARGETS) if case.adapters else None


def four_bits() -> Any:
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype="bfloat16")


def by_unsloth(case: Case, path: Path) -> tuple[Any, Any]:
    """Unsloth's model, with its adapters where there are any, and its tokenizer."""
    import torch
    from unsloth import FastLanguageModel  # pyright: ignore[reportMissingImports]

    model, tokenizer = FastLanguageModel.from_pretrained(
        model_name=str(path),
        max_seq_length=LONGEST,
        dtype=torch.bfloat16,
        load_in_4bit=case.four_bits,
        full_finetuning=not case.adapters,
    )
    if case.adapters:
        model = FastLanguageModel.get_peft_model(
            model,
            r=RANK,
            lora_alpha=RANK,
            lora_dropout=0,
            target_modules=TARGETS,
            bias="none",
            use_gradient_checkpointing="unsloth",
        )
    return model, tokenizer


if __name__ == "__main__":
    main(specification(__doc__))
