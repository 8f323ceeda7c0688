"""`lowtide convert`: files of Axolotl and LLaMA-Factory, as their own examples have them, become run files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from lowtide.cli.converting.convert import converted
from lowtide.cli.main import main
from lowtide.cli.training.run_file import read_run_file
from lowtide.cli.training.train import options_of_command

AXOLOTL: dict[str, Any] = {
    "base_model": "org/model", "model_type": "LlamaForCausalLM", "load_in_4bit": True, "strict": False,
    "datasets": [{"path": "org/chats", "type": "chat_template", "field_messages": "messages", "train_on_eos": "turn",
                  "message_property_mappings": {"role": "role", "content": "content"}}],
    "val_set_size": 0.05, "output_dir": "out", "adapter": "qlora", "sequence_len": 2048, "sample_packing": True,
    "pad_to_sequence_len": True, "lora_r": 32, "lora_alpha": 16, "lora_dropout": 0.05, "lora_target_linear": True,
    "wandb_project": "mine", "gradient_accumulation_steps": 4, "micro_batch_size": 2, "num_epochs": 2,
    "optimizer": "adamw_bnb_8bit", "lr_scheduler": "cosine", "learning_rate": "2e-4", "bf16": "auto", "tf32": False,
    "gradient_checkpointing": True, "flash_attention": True, "warmup_ratio": 0.1, "evals_per_epoch": 4,
    "saves_per_epoch": 1, "special_tokens": {"pad_token": "<pad>"}, "loss_watchdog_threshold": 5.0,
}  # fmt: skip
LLAMA_FACTORY: dict[str, Any] = {
    "model_name_or_path": "org/model", "stage": "dpo", "do_train": True, "finetuning_type": "lora", "lora_rank": 8,
    "lora_target": "q_proj,v_proj", "pref_beta": 0.2, "pref_loss": "sigmoid", "dataset": "pairs", "template": "llama3",
    "cutoff_len": 512, "max_samples": 1000, "overwrite_cache": True, "preprocessing_num_workers": 4, "plot_loss": True,
    "output_dir": "saves", "logging_steps": 10, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 8,
    "learning_rate": 5e-6, "num_train_epochs": 3.0, "lr_scheduler_type": "cosine", "warmup_ratio": 0.1, "bf16": True,
    "ddp_timeout": 180000000,
}  # fmt: skip


def of(values: dict[str, Any], folder: Path, **more: Any) -> tuple[str, dict[str, Any], str]:
    """The method, the options as its command reads them off the file that is written, and what is not in it."""
    source, output = folder / "theirs.yaml", folder / "ours.yaml"
    source.write_text(yaml.safe_dump({**values, **more}), encoding="utf-8")
    output.unlink(missing_ok=True)
    assert main(["convert", str(source), "--output", str(output)]) == 0
    found = converted(source)
    return found.method, read_run_file(output, options_of_command(found.method).options), " ".join(found.lacks)


@pytest.mark.parametrize(("rate", "typed"), [(5e-6, "5e-6"), (2.5e-05, "2.5e-05"), (0.001, "0.001"), (1e16, "1e16")])
def test_a_number_is_written_as_people_write_it(rate, typed, tmp_path):
    _, values, _ = of(LLAMA_FACTORY, tmp_path, learning_rate=rate)
    assert f"\nlearning_rate: {typed}\n" in (tmp_path / "ours.yaml").read_text(encoding="utf-8")
    assert values["learning_rate"] == rate


def test_a_file_of_axolotl(tmp_path, capsys):
    method, values, lacks = of(AXOLOTL, tmp_path)
    assert method == "sft"
    assert values == {
        "model": "org/model", "dataset": "org/chats", "output_dir": "out", "assistant_only_loss": True,
        "test_split_size": 0.05, "use_peft": True, "load_in_4bit": True, "lora_target_modules": "all-linear",
        "lora_r": 32, "lora_alpha": 16, "lora_dropout": 0.05, "eval_strategy": "steps", "eval_steps": 0.125,
        "save_strategy": "steps", "save_steps": 0.5, "pad_token": "<pad>", "optim": "adamw_8bit", "max_length": 2048,
        "per_device_train_batch_size": 2, "num_train_epochs": 2, "lr_scheduler_type": "cosine", "packing": True,
        "warmup_steps": 0.1, "report_to": "wandb", "gradient_accumulation_steps": 4, "learning_rate": 2e-4,
        "tf32": False, "gradient_checkpointing": True,
    }  # fmt: skip
    assert lacks == "loss_watchdog_threshold (5.0)"
    assert yaml.safe_load((tmp_path / "ours.yaml").read_text())["env"] == {"WANDB_PROJECT": "mine"}
    said = " ".join(capsys.readouterr().out.split())
    assert "not in it: loss_watchdog_threshold (5.0): no word for it" in said
    assert f"Run it: lowtide sft --config {tmp_path / 'ours.yaml'}" in said


def test_what_axolotl_trains_where_nothing_is_said(tmp_path):
    _, values, _ = of({"base_model": "M", "datasets": ["rows.jsonl"], "learning_rate": 1e-5}, tmp_path)
    assert (values["max_length"], values["per_device_train_batch_size"], values["num_train_epochs"]) == (512, 1, 1.0)
    assert (values["lr_scheduler_type"], values["save_strategy"]) == ("cosine", "epoch")


@pytest.mark.parametrize(
    ("more", "method", "expected"),
    [
        ({"rl": "dpo", "rl_beta": 0.3}, "dpo", {"beta": 0.3}),
        ({"rl": "ipo"}, "dpo", {"loss_type": "ipo"}),
        ({"rl": "simpo"}, "cpo", {"loss_type": "simpo"}),
        ({"rl": "kto", "kto_desirable_weight": 0.5}, "kto", {"desirable_weight": 0.5}),
        ({"rl": "orpo", "orpo_alpha": 0.1}, "orpo", {"beta": 0.1}),
        ({"rl": "grpo", "trl": {"num_generations": 4, "beta": 0.01}}, "grpo", {"num_generations": 4, "beta": 0.01}),
        ({"reward_model": True}, "reward", {}),
        ({"chat_template": "phi_3"}, "sft", {"chat_template_path": "phi3"}),
        ({"chat_template": "qwen_25"}, "sft", {"chat_template_path": None}),
        ({"chat_template": "jinja", "chat_template_jinja": "a.jinja"}, "sft", {"chat_template_path": "a.jinja"}),
        ({"train_on_inputs": True}, "sft", {"assistant_only_loss": None}),
        ({"context_parallel_size": 2}, "sft", {"parallelism_config": {"sp_size": 2}}),
        ({"dp_shard_size": 4}, "sft", {"parallelism_config": {"dp_shard_size": 4}}),
        ({"fsdp_config": {"offload_params": True}}, "sft", {"fsdp": True, "fsdp_config": {"offload_params": True}}),
        ({"gradient_checkpointing": "offload"}, "sft", {"gradient_checkpointing": True, "activation_offloading": True}),
    ],
)  # fmt: skip
def test_methods_and_options_of_axolotl(more, method, expected, tmp_path):
    found, values, _ = of({"base_model": "M", "datasets": ["rows.jsonl"], **more}, tmp_path)
    assert found == method
    assert {name: values.get(name) for name in expected} == expected


@pytest.mark.parametrize(
    ("entry", "expected", "named"),
    [
        ({"path": "a", "split": "train[:5]", "name": "en"}, {"dataset_split": "train[:5]", "dataset_config": "en"}, ""),
        ({"path": "x.json", "ds_type": "json"}, {"dataset": "x.json"}, ""),
        ({"path": "json", "data_files": ["a.json"]}, {"datasets": [{"path": "json", "data_files": ["a.json"]}]}, ""),
        ({"path": "a", "type": "chat_template", "field_messages": "talk"}, {"columns": {"messages": "talk"}}, ""),
        ({"path": "a", "type": "alpaca"}, {"assistant_only_loss": None}, "type alpaca of a"),
        ({"path": "a", "type": "completion", "field": "body"}, {"dataset_text_field": "body"}, ""),
        ({"path": "a", "type": {"field_instruction": "q", "field_output": "r", "format": "{instruction}"}},
         {"columns": {"prompt": "q", "completion": "r"}}, "type of a"),
        ({"path": "a", "roles_to_train": ["assistant", "tool"]}, {"roles_to_train": ["assistant", "tool"]}, ""),
        ({"path": "a", "shards": 10}, {"dataset": "a"}, "shards (10) of a"),
    ],
)  # fmt: skip
def test_rows_of_axolotl(entry, expected, named, tmp_path):
    _, values, lacks = of({"base_model": "M", "datasets": [entry]}, tmp_path)
    assert {name: values.get(name) for name in expected} == expected
    assert lacks == named


def test_a_file_of_llama_factory_finds_its_datasets(tmp_path):
    (tmp_path / "data").mkdir()
    info = {"pairs": {"file_name": "pairs.json", "ranking": True,
                      "columns": {"prompt": "question", "chosen": "better", "rejected": "worse"}}}  # fmt: skip
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps(info))
    method, values, lacks = of(LLAMA_FACTORY, tmp_path)
    assert method == "dpo"
    assert lacks == "template (llama3)"
    assert values == {
        "model": "org/model", "dataset": str(tmp_path / "data" / "pairs.json"), "dataset_split": "train[:1000]",
        "columns": {"prompt": "question", "chosen": "better", "rejected": "worse"}, "output_dir": "saves",
        "loss_type": "sigmoid", "use_peft": True, "lora_target_modules": ["q_proj", "v_proj"], "max_length": 512,
        "dataset_num_proc": 4, "lora_r": 8, "lora_alpha": 16, "lora_dropout": 0.0, "beta": 0.2, "warmup_steps": 0.1,
        "per_device_train_batch_size": 1, "gradient_accumulation_steps": 8, "num_train_epochs": 3.0,
        "learning_rate": 5e-6, "lr_scheduler_type": "cosine", "logging_steps": 10, "bf16": True,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("more", "method", "expected"),
    [
        ({"stage": "sft"}, "sft", {"assistant_only_loss": True, "learning_rate": 5e-6}),
        ({"stage": "sft", "train_on_prompt": True, "mask_history": True}, "sft", {"train_on_last_turn_only": True}),
        ({"stage": "pt", "packing": True}, "pretrain", {}),
        ({"stage": "rm"}, "reward", {}),
        ({"pref_loss": "orpo"}, "orpo", {"beta": 0.2}),
        ({"pref_loss": "simpo"}, "cpo", {"loss_type": "simpo"}),
        ({"pref_ftx": 0.5}, "dpo", {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]}),
        ({"stage": "kto", "kto_chosen_weight": 2.0}, "kto", {"desirable_weight": 2.0}),
        ({"quantization_bit": 4}, "dpo", {"load_in_4bit": True, "use_bnb_nested_quant": True}),
        ({"finetuning_type": "full", "pure_bf16": True}, "dpo", {"use_peft": None, "dtype": "bfloat16"}),
        ({"disable_gradient_checkpointing": True}, "dpo", {"gradient_checkpointing": False}),
    ],
)
def test_methods_and_options_of_llama_factory(more, method, expected, tmp_path):
    found, values, lacks = of(LLAMA_FACTORY, tmp_path, **more)
    assert found == method
    assert {name: values.get(name) for name in expected} == expected
    assert "dataset (pairs)" in lacks


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("model: M\n", "is of neither Axolotl"),
        ("- a\n", "is no mapping of options"),
        ("a: [1\n", "theirs.yaml"),
        ("base_model: M\nrl: bco2\n", "bco2 is no method of lowtide"),
        ("base_model: M\ndatasets: [[1]]\n", "is not as Axolotl has it"),
        (
            "stage: sft\ndataset: a\ninterleave_probs: x\n",
            "not as LLaMA-Factory",
        ),
    ],
)
def test_other_files_are_refused(text, said, tmp_path, capsys):
    source = tmp_path / "theirs.yaml"
    source.write_text(text)
    assert main(["convert", str(source), "--output", str(tmp_path / "ours.yaml")]) == 2
    assert said in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "ours.yaml").exists()


def test_nothing_is_overwritten(tmp_path, capsys):
    source = tmp_path / "theirs.yaml"
    source.write_text(yaml.safe_dump(AXOLOTL))
    (tmp_path / "ours.yaml").write_text("mine")
    assert main(["convert", str(source), "--output", str(tmp_path / "ours.yaml")]) == 2
    assert (tmp_path / "ours.yaml").read_text() == "mine"
    assert "is there already" in " ".join(capsys.readouterr().err.split())
