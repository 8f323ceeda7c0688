"""A plan in the settings of other trainers."""

from __future__ import annotations

import ast
import dataclasses
import importlib

import pytest
import yaml

from lowtide.planner.answers.elsewhere import settings_for
from lowtide.planner.plan import Alternative, Plan

ASKED = {"model": "Qwen/Qwen2.5-7B", "dataset": "pairs.jsonl", "use_peft": True, "lora_r": 8, "learning_rate": 1e-4}
CHOSEN = {"tokens_per_microbatch": 2048, "activation_offloading": True, "mlp_tile_tokens": 1024, "max_length": 1024}
AXOLOTL = {
    "base_model", "sequence_len", "micro_batch_size", "gradient_accumulation_steps", "num_epochs", "lr_scheduler",
    "rl_beta", "output_dir", "learning_rate", "max_steps", "seed", "warmup_steps", "bf16", "fp16", "weight_decay",
    "max_grad_norm", "gradient_checkpointing", "activation_offloading", "optimizer", "datasets", "adapter",
    "load_in_4bit", "load_in_8bit", "lora_r", "lora_alpha", "lora_dropout", "lora_target_linear", "tiled_mlp",
    "selective_checkpointing", "rl", "reward_model",
}  # fmt: skip
"""Of axolotl's `utils/schemas`, and transformers' where it passes them on."""
LLAMA_FACTORY = {
    "stage", "do_train", "model_name_or_path", "dataset", "template", "cutoff_len", "pref_beta", "pref_loss",
    "finetuning_type", "lora_rank", "lora_alpha", "lora_dropout", "lora_target", "quantization_bit",
    "quantization_method", "pure_bf16", "disable_gradient_checkpointing", "use_unsloth_gc", "optim",
}  # fmt: skip
"""Of LLaMA-Factory's `hparams`; the others are transformers'."""


def plan(method: str = "dpo", **changes) -> Plan:
    chosen = Alternative({**CHOSEN, **changes}, 20 << 30, 1.0)
    return Plan(method, ASKED, chosen, 24 << 30, "RTX-4090", None)


def test_trl_takes_all_that_is_written_for_it():
    pytest.importorskip("trl")
    from trl import DPOConfig, ModelConfig, ScriptArguments

    written = yaml.safe_load(settings_for("trl", plan(optimizer_in_backward="two_pass")))
    kinds = (DPOConfig, ModelConfig, ScriptArguments)
    known = {each.name for kind in kinds for each in dataclasses.fields(kind)}
    assert written.keys() <= known
    assert (written["model_name_or_path"], written["use_peft"], written["lora_r"]) == ("Qwen/Qwen2.5-7B", True, 8)
    assert (written["per_device_train_batch_size"], written["gradient_accumulation_steps"]) == (2, 4)
    assert written["activation_offloading"] is True


@pytest.mark.parametrize("method", ["sft", "dpo", "kto", "reward", "grpo"])
def test_trl_has_the_options_of_each_method(method):
    trl = pytest.importorskip("trl")
    name = {"sft": "SFT", "dpo": "DPO", "kto": "KTO", "reward": "Reward", "grpo": "GRPO"}[method]
    kinds = (getattr(trl, f"{name}Config"), trl.ModelConfig, trl.ScriptArguments)
    known = {each.name for kind in kinds for each in dataclasses.fields(kind)}
    changes = {} if method != "grpo" else {"max_length": None}
    assert yaml.safe_load(settings_for("trl", plan(method, **changes))).keys() <= known


def test_axolotl_has_words_for_tiles_and_offloading():
    text = settings_for("axolotl", plan(load_in_4bit=True))
    written = yaml.safe_load(text)
    assert written.keys() <= AXOLOTL
    assert (written["rl"], written["adapter"], written["tiled_mlp"]) == ("dpo", "qlora", True)
    assert (written["micro_batch_size"], written["sequence_len"]) == (2, 1024)
    assert "mlp_tile_tokens" not in text
    assert "tokens_per_microbatch" in text


def test_llama_factory_counts_in_its_own_words():
    from transformers import TrainingArguments

    written = yaml.safe_load(settings_for("llama-factory", plan("kto", gradient_checkpointing=False)))
    known = LLAMA_FACTORY | {each.name for each in dataclasses.fields(TrainingArguments)}
    assert written.keys() <= known
    assert (written["stage"], written["finetuning_type"], written["lora_rank"]) == ("kto", "lora", 8)
    assert written["disable_gradient_checkpointing"] is True


def test_unsloth_gets_a_script_that_parses():
    text = settings_for("unsloth", plan("sft", load_in_4bit=True))
    calls = {ast.unparse(each.func): each for each in ast.walk(ast.parse(text)) if isinstance(each, ast.Call)}
    loaded = {each.arg: ast.literal_eval(each.value) for each in calls["FastLanguageModel.from_pretrained"].keywords}
    assert (loaded["load_in_4bit"], loaded["use_gradient_checkpointing"]) == (True, "unsloth")
    importlib.import_module("trl")
    given = {each.arg: ast.literal_eval(each.value) for each in calls["SFTConfig"].keywords}
    assert given["per_device_train_batch_size"] == 2
    assert "use_peft" not in given


@pytest.mark.parametrize("other", ["trl", "axolotl", "llama-factory", "unsloth"])
def test_what_is_lacking_is_named(other):
    text = settings_for(other, plan(optimizer_in_backward="two_pass", optim="adamw_stochastic"))
    comments = "".join(line for line in text.splitlines() if line.startswith("#"))
    for name in ("tokens_per_microbatch", "optimizer_in_backward", "adamw_stochastic is lowtide's", "prefix_sharing"):
        assert name in comments, name
    assert "optimizer_in_backward:" not in text.split("Run it")[1]


def test_a_method_that_a_trainer_lacks_is_refused():
    with pytest.raises(ValueError, match="--for axolotl: Axolotl has no cpo; it has sft, reward, dpo"):
        settings_for("axolotl", plan("cpo"))
