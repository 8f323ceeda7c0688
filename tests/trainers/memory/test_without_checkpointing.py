"""Families that transformers cannot checkpoint train without it, unless it was asked for."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from lowtide import SFTConfig, SFTTrainer

SMALL: dict[str, dict[str, Any]] = {
    "ctrl": {"n_embd": 16, "dff": 24, "n_layer": 2, "n_head": 2, "n_positions": 64, "resid_pdrop": 0, "embd_pdrop": 0},
    "openai-gpt": {"n_embd": 16, "n_layer": 2, "n_head": 2, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0},
    "gpt_neox_japanese": {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    },
}
ROWS = [[5, 6, 7, 8, 9, 10, 11], [12, 13, 14], [15, 16, 17, 18, 19]]


def tiny(family: str) -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, vocab_size=40, **SMALL[family]))


def trainer(folder: Path, family: str, **options: Any) -> SFTTrainer:
    common = {"max_steps": 1, "per_device_train_batch_size": 3, "learning_rate": 1.0, "optim": "sgd", "use_cpu": True}
    common |= {"report_to": "none", "save_strategy": "no", "max_grad_norm": 0.0, "lr_scheduler_type": "constant"}
    args = SFTConfig(output_dir=str(folder), dataset_kwargs={"skip_prepare_dataset": True}, **common, **options)
    return SFTTrainer(tiny(family), args, train_dataset=Dataset.from_dict({"input_ids": ROWS, "labels": ROWS}))


@pytest.mark.parametrize("family", SMALL)
def test_the_default_is_left_out_aloud_and_the_step_is_the_plain_one(
    family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    with caplog.at_level(logging.WARNING):
        run = trainer(tmp_path, family)
        run.train()
    said = [each for each in caplog.messages if each.startswith("gradient_checkpointing is off")]
    assert said == [f"gradient_checkpointing is off, since transformers has none for model type {family}"]
    plain = tiny(family).train()
    scored = sum(len(row) - 1 for row in ROWS)
    for row in ROWS:
        ids = torch.tensor([row])
        logits = plain(input_ids=ids).logits[0, :-1]
        (torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum") / scored).backward()
    for (name, found), wanted in zip(run.model.named_parameters(), plain.parameters(), strict=True):
        moved = wanted.detach() if wanted.grad is None else wanted.detach() - wanted.grad
        torch.testing.assert_close(found.detach(), moved, atol=2e-6, rtol=0, msg=name)


def test_it_is_refused_where_it_was_asked_for(tmp_path: Path):
    with pytest.raises(ValueError, match=r"gradient_checkpointing=True .* none for model type ctrl: set gradient_"):
        trainer(tmp_path, "ctrl", gradient_checkpointing=True)
