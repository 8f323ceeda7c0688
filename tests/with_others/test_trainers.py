"""Plans for other trainers, read by these trainers' own parsers: each file that is written is one that they take."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import yaml

from lowtide.planner.answers.elsewhere import TRAINERS, settings_for
from lowtide.planner.plan import Alternative, Plan

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "budget": {"tokens_per_microbatch": 2048, "max_length": 1024},
    "adapters": {"use_peft": True, "lora_r": 8, "lora_target_modules": ["q_proj"], "lora_modules_to_save": ["lm_head"]},
    "all linear layers": {"use_peft": True, "lora_target_modules": "all-linear", "use_rslora": True},
    "4 bits": {"use_peft": True, "load_in_4bit": True},
    "8 bits": {"use_peft": True, "load_in_8bit": True},
    "offloading": {"activation_offloading": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
    "tiles": {"mlp_tile_tokens": 512, "checkpointing_policy": "attention"},
    "8-bit optimizer": {"optim": "adamw_8bit"},
    "torchao's optimizer": {"optim": "adamw_torch_8bit"},
    "muon": {"optim": "muon"},
    "adafactor": {"optim": "adafactor"},
    "lowtide's optimizer": {"optim": "adamw_flash", "optimizer_in_backward": "two_pass"},
    "packing": {"packing": True, "max_length": 2048},
    "a loss": {"loss_type": "ipo", "beta": 0.2},
    "losses": {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5], "label_smoothing": 0.1},
    "schedule": {"lr_scheduler_type": "cosine", "warmup_steps": 3, "weight_decay": 0.1, "adam_beta2": 0.95, "seed": 3},
    "evaluation": {"eval_strategy": "steps", "eval_steps": 5, "save_steps": 5, "max_steps": 10},
    "other rows to evaluate on": {"eval_strategy": "steps", "eval_steps": 5, "eval_dataset": "held-out"},
    "shards": {"fsdp": True, "fsdp_config": {"reshard_after_forward": True}},
    "completions": {"num_generations": 4, "max_completion_length": 64, "temperature": 0.8},
    "reference before": {"precompute_ref_log_probs": True},
}
"""Each given to every method of a trainer, which takes what it has."""


def written(other: str, method: str, name: str) -> dict[str, Any]:
    settings = SETTINGS[name]
    if method in ("grpo", "ppo"):
        settings = {key: value for key, value in settings.items() if key not in ("loss_type", "loss_weights")}
    asked = {"model": "Qwen/Qwen2.5-0.5B", "dataset": "rows", "output_dir": "out"}
    found = Plan(method, asked, Alternative(settings, 20 << 30, 1.0), 24 << 30, "RTX-4090", None)
    return yaml.safe_load(settings_for(other, found))


def cases(other: str) -> list[tuple[str, str]]:
    return [(method, name) for method in TRAINERS[other].methods for name in SETTINGS]


@pytest.mark.parametrize(("method", "name"), cases("axolotl"))
def test_axolotl_takes_what_is_written_for_it(method, name):
    if importlib.util.find_spec("axolotl") is None:
        pytest.skip("needs axolotl: make test-others")
    importlib.import_module("axolotl.utils.schemas.config").AxolotlInputConfig(**written("axolotl", method, name))


@pytest.mark.parametrize(("method", "name"), cases("llama-factory"))
def test_llama_factory_takes_what_is_written_for_it(method, name, tmp_path: Path, monkeypatch):
    if importlib.util.find_spec("llamafactory") is None:
        pytest.skip("needs llamafactory: make test-others")
    monkeypatch.setenv("DISABLE_VERSION_CHECK", "1")
    monkeypatch.chdir(tmp_path)
    values = written("llama-factory", method, name)
    # What wants a GPU, and a file of LLaMA-Factory's repository, is not asked of its parser.
    for option in ("bf16", "pure_bf16", "deepspeed"):
        values.pop(option, None)
    values |= {"template": "qwen", "use_cpu": True, "report_to": "none"}
    importlib.import_module("llamafactory.hparams.parser").get_train_args(values)
