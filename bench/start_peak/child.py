"""A part of `bench.start_peak`, in a process of its own: trains from the folder of a model, or predicts that."""

import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset

from bench.compare.child import say
from bench.inputs.rows import longtail_rows
from bench.inputs.tokenizer import load_tokenizer, tokenizer_for
from bench.measuring.arguments import specification
from bench.measuring.measure import PeakMeter, resident_bytes

ROWS, TOKENS, STEPS = 2, 512, 2
IN_BFLOAT16 = {"model_init_kwargs": {"dtype": "bfloat16"}}
CASES: dict[str, dict[str, Any]] = {
    "flash": {"optim": "adamw_flash", "optimizer_in_backward": True, "max_grad_norm": 0.0},
    "float32": {},
    "lora": {"stored": "bfloat16", "adapters": True, **IN_BFLOAT16},
    "cast": {"adapters": True, **IN_BFLOAT16},
}
"""Options of the trainer; with `stored` the dtype of the checkpoint, which is float32 otherwise."""
OPTIONS: dict[str, Any] = {
    "per_device_train_batch_size": ROWS,
    "max_steps": STEPS,
    "dataset_kwargs": {"skip_prepare_dataset": True},
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "use_cpu": True,
}


def rows_of(spec: dict[str, Any]) -> Dataset:
    """Token rows, the same ones each time."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(3, 32_000, (STEPS * ROWS, spec["tokens"]), generator=generator).tolist()
    return Dataset.from_dict({"input_ids": rows})


def inputs_of(spec: dict[str, Any], output: str) -> tuple[Any, Any]:
    """The trainer's config, and its adapters."""
    from peft import LoraConfig

    from lowtide import SFTConfig

    case = {name: value for name, value in CASES[spec["case"]].items() if name not in ("stored", "adapters")}
    adapters = LoraConfig(task_type="CAUSAL_LM", r=16) if CASES[spec["case"]].get("adapters") else None
    return SFTConfig(output_dir=str(Path(output)), **OPTIONS, **case), adapters


def measured(spec: dict[str, Any]) -> dict[str, int]:
    """The peaks of a run from the folder of a model, and what the process took before it."""
    import transformers.models.qwen2.modeling_qwen2
    from transformers import TrainerCallback

    from lowtide import SFTTrainer

    assert transformers.models.qwen2.modeling_qwen2
    tokenizer = load_tokenizer(tokenizer_for(longtail_rows()))
    meter, found = PeakMeter("cpu"), {}

    class Started(TrainerCallback):
        """Reads the peak before the first step, and has that of training begin anew."""

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if not found:
                found["start"] = meter.stop()["peak_bytes"]
                meter.start()

    rows = rows_of(spec)
    with tempfile.TemporaryDirectory() as output:
        args, adapters = inputs_of(spec, output)
        imports = resident_bytes("VmRSS")
        meter.start()
        trainer = SFTTrainer(
            model=spec["model"],
            args=args,
            train_dataset=rows,
            processing_class=tokenizer,
            peft_config=adapters,
            callbacks=[Started()],
        )
        trainer.train()
    return {"start": found["start"], "training": meter.stop()["peak_bytes"], "imports": imports}


def predicted(spec: dict[str, Any]) -> dict[str, int]:
    """The same peaks, of the whole process."""
    from lowtide import estimate

    with tempfile.TemporaryDirectory() as output:
        args, adapters = inputs_of(spec, output)
        found = estimate(args, spec["model"], rows_of(spec), device="cpu", peft_config=adapters)
    return {"start": found.start_bytes, "training": found.peak_bytes}


PARTS = {"measure": measured, "predict": predicted}


if __name__ == "__main__":
    spec = specification(__doc__)
    say("result", **PARTS[spec["part"]](spec))
