"""Trains a model of 50 million parameters for two steps, and writes the peak of its resident memory down."""

from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, LlamaConfig

from lowtide import SFTConfig, SFTTrainer

LAYERS, VOCABULARY = 6, 8_000


def resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def make(model: Path) -> None:
    config = LlamaConfig(hidden_size=768, intermediate_size=2048, num_attention_heads=12)
    config.update({"vocab_size": VOCABULARY, "num_hidden_layers": LAYERS})
    AutoModelForCausalLM.from_config(config).save_pretrained(model)


def train(rank: int, folder: str, options: dict) -> None:
    """Writes bytes into the file `peak` of a folder, which has the model.

    Args:
        rank: 0, of the one process.
        options: of the run, with adapters if `base_weights` is said.
    """
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(1, VOCABULARY, (64,), generator=generator).tolist() for _ in range(4)]
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
    SFTTrainer(str(Path(folder, "model")), args, train_dataset=dataset, peft_config=adapters).train()
    Path(folder, "peak").write_text(str(resident("VmHWM") - before))
