"""A part of `bench.start_peak`, in a process of its own: saves a model, or trains from it."""

import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset

from bench.compare.child import say
from bench.inputs.shapes import QWEN_05B, Shape, build_model
from bench.measuring.arguments import specification
from bench.measuring.measure import PeakMeter, resident_bytes

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

    from bench.inputs.rows import longtail_rows
    from bench.inputs.tokenizer import load_tokenizer, tokenizer_for
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
    child(specification(__doc__))
