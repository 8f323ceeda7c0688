"""Small runs whose weights may be streamed, and what they come to."""

from pathlib import Path

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig

from lowtide import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer
from tests.support.matrix.matrix import tokenizer
from tests.support.models.tiny_models import build

LORA = {"r": 4, "target_modules": "all-linear", "init_lora_weights": False}
WRITTEN = {"trained_weights": "stream", "optimizer_in_backward": "two_pass", "max_grad_norm": 0.1}


def saved(folder: Path, dtype=torch.float32, **changes) -> str:
    model = build(dtype=dtype, vocab_size=400, tie_word_embeddings=False, **changes)
    model.save_pretrained(folder)
    return str(folder)


def rows(count: int = 16) -> Dataset:
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(2, 30, (count,), generator=generator).tolist()
    made = [torch.randint(1, 400, (length,), generator=generator).tolist() for length in lengths]
    return Dataset.from_dict({"input_ids": made, "labels": made})


def pairs(count: int = 8) -> Dataset:
    names = ("prompt_ids", "chosen_ids", "rejected_ids")
    side = rows(count)["input_ids"]
    return Dataset.from_dict({name: [[*row, k] for row in side] for k, name in enumerate(names)})


COMMON = {
    "per_device_train_batch_size": 4,
    "max_steps": 4,
    "learning_rate": 1e-2,
    "lr_scheduler_type": "constant",
    "logging_steps": 1,
    "report_to": "none",
    "save_strategy": "no",
    "disable_tqdm": True,
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "dataset_kwargs": {"skip_prepare_dataset": True},
}


def sft(model, folder, *, peft=LORA, **options):
    torch.manual_seed(0)
    args = SFTConfig(output_dir=str(folder), **{**COMMON, **options})
    return SFTTrainer(model, args, train_dataset=rows(), peft_config=None if peft is None else LoraConfig(**peft))


def dpo(model, folder, *, peft=LORA, **options):
    torch.manual_seed(0)
    given = {name: options.pop(name) for name in ("ref_model",) if name in options}
    given["processing_class"] = tokenizer()
    common = {name: value for name, value in COMMON.items() if name != "dataset_kwargs"}
    args = DPOConfig(output_dir=str(folder), **{**common, "learning_rate": 1e-3, **options})
    peft_config = None if peft is None else LoraConfig(**peft)
    return DPOTrainer(model, args=args, train_dataset=pairs(), peft_config=peft_config, **given)


def outcome(trainer):
    trainer.train()
    losses = [each["loss"] for each in trainer.state.log_history if "loss" in each]
    return losses, {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}


def assert_like(got, wanted, tolerance=1e-5):
    assert len(got[0]) == len(wanted[0]) > 1
    assert wanted[0][0] != wanted[0][-1]
    assert got[0] == pytest.approx(wanted[0], rel=tolerance)
    assert got[1].keys() == wanted[1].keys()
    apart = {n: float((got[1][n] - w).norm() / w.norm().clamp(min=1e-6)) for n, w in wanted[1].items()}
    assert {name: far for name, far in apart.items() if far > tolerance} == {}


def assert_resumes(name: str, folder: Path, **options) -> dict[str, torch.Tensor]:
    """A run that goes on from its second step comes to the same bits; returns the weights that are trained."""
    options |= {"save_strategy": "steps", "save_steps": 2}
    _, wanted = outcome(sft(name, folder, **options))
    trainer = sft(name, folder, **options)
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    assert_equal({name: p for name, p in trainer.model.named_parameters() if p.requires_grad}, wanted)
    return wanted


def assert_all_resumes(folder: Path) -> None:
    """The same where all weights are trained and streamed, and the last checkpoint has them."""
    trained = assert_resumes(saved(folder / "model"), folder / "out", peft=None, **WRITTEN, learning_rate=1e-3)
    again = type(build()).from_pretrained(folder / "out" / "checkpoint-4")
    assert_equal(dict(again.named_parameters()), trained)


def assert_equal(got, wanted):
    assert got.keys() == wanted.keys()
    assert [name for name, weight in wanted.items() if not torch.equal(got[name], weight)] == []
