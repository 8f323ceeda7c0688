"""The small run that shows what a training process holds beside tensors; `lowtide.planner.process` runs it."""

from __future__ import annotations

import sys
import tempfile
from typing import Any

SIZES: dict[str, Any] = {
    "vocab_size": 4_000,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}
ROWS, TOKENS = 4, 256


def small_run(folder: str, adapters: bool) -> dict[str, Any]:
    """Config, model description, rows and adapters of the run that is measured."""
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import LlamaConfig

    from lowtide import SFTConfig

    config = SFTConfig(
        output_dir=folder,
        max_steps=2,
        per_device_train_batch_size=ROWS,
        max_length=TOKENS,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    rows = [{"input_ids": list(range(1, TOKENS + 1))} for _ in range(4 * ROWS)]
    peft_config = LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM") if adapters else None
    return {
        "config": config,
        "described": LlamaConfig(**SIZES),
        "dataset": Dataset.from_list(rows),
        "peft_config": peft_config,
    }


def main(adapters: bool) -> int:
    """Trains the small model in this process; returns what it held beside tensors, in bytes."""
    from transformers import AutoModelForCausalLM

    from lowtide import SFTTrainer
    from lowtide.demo.model import make_tokenizer
    from lowtide.memory.allocators import host_heap
    from lowtide.memory.allocators.measure import peak_resident_bytes
    from lowtide.planner.devices import device_named
    from lowtide.planner.estimate import estimate_run
    from lowtide.planner.tracing.fake_run import FakeRun
    from lowtide.run.options.configs import method_of

    host_heap.LARGE, host_heap.TRIM_ABOVE = 0, 1 << 20  # without holes, what is beside tensors is the process
    with tempfile.TemporaryDirectory() as folder:
        run = small_run(folder, adapters)
        trainer = SFTTrainer(
            AutoModelForCausalLM.from_config(run["described"]),
            args=run["config"],
            train_dataset=run["dataset"],
            processing_class=make_tokenizer(),
            peft_config=run["peft_config"],
        )
        trainer.train()
        peak = peak_resident_bytes()
        traced = FakeRun(method_of(run["config"]), **run, processing_class=make_tokenizer())
        predicted = estimate_run(traced, device_named("cpu"), beside=0)
    return peak - predicted.peak_bytes


if __name__ == "__main__":
    print(main("adapters" in sys.argv))
