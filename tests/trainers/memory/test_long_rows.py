"""Trainers whose rows are longer than the token budget end with the weights that whole rows give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, LlamaConfig

from lowtide import SFTConfig, SFTTrainer
from tests.support.marks import slow_but
from tests.support.runs.online_runs import online, weights

SETTINGS: dict[str, Any] = {
    "per_device_train_batch_size": 4,
    "max_steps": 2,
    "learning_rate": 1e-2,
    "lr_scheduler_type": "constant",
    "logging_steps": 1,
    "use_cpu": True,
    "bf16": False,
    "report_to": "none",
    "save_strategy": "no",
    "disable_tqdm": True,
    "gradient_checkpointing": False,
    "dataset_kwargs": {"skip_prepare_dataset": True},
}


def rows() -> Dataset:
    generator = torch.Generator().manual_seed(1)
    made = [torch.randint(0, 40, (length,), generator=generator).tolist() for length in (70, 9, 33, 12) * 4]
    return Dataset.from_dict({"input_ids": made, "labels": made})


def trainer(folder: Path, *, heads: dict[str, Any] | None = None, **options: Any) -> SFTTrainer:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, **(heads or {})
    )
    model = AutoModelForCausalLM.from_config(config).double()
    args = SFTConfig(output_dir=str(folder), **SETTINGS | options)
    return SFTTrainer(model, args, train_dataset=rows(), eval_dataset=rows())


def trained(folder: Path, **options: Any) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    made = trainer(folder, **options)
    made.train()
    return weights(made), made.evaluate()


def assert_near(found: tuple, expected: tuple) -> None:
    for name, value in expected[0].items():
        torch.testing.assert_close(found[0][name], value, rtol=1e-6, atol=1e-7, msg=name)
    for name in ("eval_loss", "eval_entropy", "eval_mean_token_accuracy"):
        assert found[1][name] == pytest.approx(expected[1][name], rel=1e-6)


@pytest.mark.parametrize(
    "options",
    slow_but(
        [{}],
        [
            {},
            {"chain_storage": "host"},
            {"gradient_checkpointing": True, "rehearsal": False},
            {"optimizer_in_backward": True, "max_grad_norm": 0.0},
            {"activation_offloading": True},
            {"mlp_tile_tokens": 8},
        ],
    ),
    ids=str,
)
def test_whole_rows_give_the_same_weights(options, tmp_path, monkeypatch):
    monkeypatch.setattr("lowtide.memory.activations.spill_file.is_in_memory", lambda folder: False)
    plain = {"max_grad_norm": options.get("max_grad_norm", 1.0)}
    assert_near(trained(tmp_path, tokens_per_microbatch=16, **options), trained(tmp_path, **plain))


def test_what_a_model_cannot_is_refused_at_construction(tmp_path):
    message = r"tokens_per_microbatch=16 is below the longest row of the train dataset, 70 tokens.*{}"
    with pytest.raises(ValueError, match=message.format(r"use_reentrant|reentrant checkpointing")):
        trainer(
            tmp_path,
            tokens_per_microbatch=16,
            gradient_checkpointing=True,
            gradient_checkpointing_kwargs={"use_reentrant": True},
        )
    with pytest.raises(ValueError, match=message.format("attention dropout")):
        trainer(tmp_path, tokens_per_microbatch=16, heads={"attention_dropout": 0.1})
    with pytest.raises(ValueError, match=r"tokens_per_microbatch=15 .*at least 16 tokens"):
        trainer(tmp_path, tokens_per_microbatch=15)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["GRPO", "PPO", "RLOO", "OnlineDPO"])
def test_completions_that_the_policy_writes(method, tmp_path):
    found = []
    for budget in (None, 16):
        pair = {"num_generations": 2} if method == "OnlineDPO" else {}
        made = online(tmp_path, method, tokens_per_microbatch=budget, max_steps=2, rehearsal=False, **pair)
        if budget is not None:
            assert made.row_lengths().max() > budget
        made.train()
        found.append(weights(made))
    for name, value in found[1].items():  # norms are in float32, and AdamW moves a weight by 1e-3 a step
        torch.testing.assert_close(found[0][name], value, rtol=2e-6, atol=4e-6, msg=name)
