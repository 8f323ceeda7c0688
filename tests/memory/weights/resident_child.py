"""Trains a model of 100 million parameters for two steps, and prints the peak of its resident memory in bytes.

The arguments: a folder for the model and the run, and the options as JSON; with adapters if `base_weights` is said.
"""

import json
import sys
from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, LlamaConfig

from lowtide import SFTConfig, SFTTrainer

LAYERS = 12


def resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def main(folder: str, options: dict) -> None:
    torch.set_num_threads(1)
    model = Path(folder, "model")
    if not model.exists():
        config = LlamaConfig(
            vocab_size=32_000, hidden_size=768, intermediate_size=2048, num_hidden_layers=LAYERS, num_attention_heads=12
        )
        AutoModelForCausalLM.from_config(config).save_pretrained(model)
        print(0)
        return
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(1, 32_000, (64,), generator=generator).tolist() for _ in range(4)]
    args = SFTConfig(
        output_dir=str(Path(folder, "run")),
        max_steps=2,
        per_device_train_batch_size=2,
        use_cpu=True,
        bf16=False,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        dataset_kwargs={"skip_prepare_dataset": True},
        **options,
    )
    adapters = LoraConfig(target_modules="all-linear") if "base_weights" in options else None
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    dataset = Dataset.from_dict({"input_ids": rows, "labels": rows})
    SFTTrainer(str(model), args, train_dataset=dataset, peft_config=adapters).train()
    print(resident("VmHWM") - before)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
