"""A plan in the settings of other trainers."""

from __future__ import annotations

import ast
import dataclasses
import importlib

import pytest
import yaml

from lowtide.planner.answers.elsewhere import TRAINERS, settings_for
from lowtide.planner.answers.translations import OF_TRL, OF_TRL_MODEL
from lowtide.planner.cluster import Cluster
from lowtide.planner.plan import Alternative, Plan, Spread
from lowtide.ranks.sharding import Sharding

ASKED = {"model": "Qwen/Qwen2.5-7B", "dataset": "pairs.jsonl", "use_peft": True, "lora_r": 8, "learning_rate": 1e-4}
CHOSEN = {"tokens_per_microbatch": 2048, "activation_offloading": True, "mlp_tile_tokens": 1024, "max_length": 1024}
AXOLOTL = {
    "base_model", "sequence_len", "micro_batch_size", "gradient_accumulation_steps", "num_epochs", "lr_scheduler",
    "rl_beta", "output_dir", "learning_rate", "max_steps", "seed", "warmup_steps", "bf16", "fp16", "weight_decay",
    "max_grad_norm", "gradient_checkpointing", "activation_offloading", "optimizer", "datasets", "adapter",
    "load_in_4bit", "load_in_8bit", "lora_r", "lora_alpha", "lora_dropout", "lora_target_linear", "tiled_mlp",
    "selective_checkpointing", "rl", "reward_model", "lora_target_modules", "fsdp_version",
    "fsdp_config", "precompute_ref_log_probs", "sample_packing", "batch_flattening", "dp_shard_size",
    "dp_replicate_size", "context_parallel_size", "orpo_alpha", "trl", "excess_length_strategy",
}  # fmt: skip
"""Of axolotl's `utils/schemas`, and transformers' where it passes them on."""
LLAMA_FACTORY = {
    "stage", "do_train", "model_name_or_path", "dataset", "template", "cutoff_len", "pref_beta", "pref_loss",
    "finetuning_type", "lora_rank", "lora_alpha", "lora_dropout", "lora_target", "quantization_bit",
    "quantization_method", "pure_bf16", "disable_gradient_checkpointing", "use_unsloth_gc", "optim",
    "double_quantization",
}  # fmt: skip
"""Of LLaMA-Factory's `hparams`; the others are transformers'."""


def plan(method: str = "dpo", **changes) -> Plan:
    chosen = Alternative({**CHOSEN, **changes}, 20 << 30, 1.0)
    return Plan(method, ASKED, chosen, 24 << 30, "RTX-4090", None)


def asked(method: str, settings: dict, devices: str = "", nodes: int = 1, **own) -> Plan:
    """A plan of which all is given: the user's own options, what was chosen, and the devices."""
    spread = None
    if devices:
        cluster = Cluster.of(devices, nodes)
        spread = Spread(Sharding(kind="fsdp2", devices=cluster.devices, nodes=nodes), cluster, 0, 0, 1.0)
    device = "H100-80GB" if devices else "RTX-4090"
    return Plan(method, own, Alternative(settings, 20 << 30, 1.0), 24 << 30, device, None, spread=spread)


def parts(text: str) -> tuple[str, str]:
    """What a file says in comments, and the rest."""
    lines = text.splitlines()
    comments = [line for line in lines if line.startswith("#")]
    return "\n".join(comments), "\n".join(line for line in lines if not line.startswith("#"))


def test_trl_takes_all_that_is_written_for_it():
    pytest.importorskip("trl")
    from trl import DatasetMixtureConfig, DPOConfig, ModelConfig, ScriptArguments

    written = yaml.safe_load(settings_for("trl", plan(optimizer_in_backward="two_pass")))
    kinds = (DPOConfig, ModelConfig, ScriptArguments, DatasetMixtureConfig)
    known = {each.name for kind in kinds for each in dataclasses.fields(kind)}
    assert written.keys() <= known
    assert (written["model_name_or_path"], written["use_peft"], written["lora_r"]) == ("Qwen/Qwen2.5-7B", True, 8)
    assert (written["per_device_train_batch_size"], written["gradient_accumulation_steps"]) == (1, 8), "of two sides"
    assert written["activation_offloading"] is True


@pytest.mark.parametrize("method", ["sft", "dpo", "kto", "reward", "grpo"])
def test_trl_has_the_options_of_each_method(method):
    trl = pytest.importorskip("trl")
    name = {"sft": "SFT", "dpo": "DPO", "kto": "KTO", "reward": "Reward", "grpo": "GRPO"}[method]
    kinds = (getattr(trl, f"{name}Config"), trl.ModelConfig, trl.ScriptArguments, trl.DatasetMixtureConfig)
    known = {each.name for kind in kinds for each in dataclasses.fields(kind)}
    changes = {} if method != "grpo" else {"max_length": None}
    assert yaml.safe_load(settings_for("trl", plan(method, **changes))).keys() <= known


@pytest.mark.parametrize("method", TRAINERS["trl"].methods)
def test_trl_has_all_options_that_are_passed_on(method):
    trl = pytest.importorskip("trl")
    name = {"reward": "Reward"}.get(method, method.upper())
    kinds = (getattr(trl, f"{name}Config"), trl.ModelConfig, trl.ScriptArguments)
    known = {each.name for kind in kinds for each in dataclasses.fields(kind)}
    assert {*OF_TRL[method], *OF_TRL_MODEL} <= known


def test_axolotl_has_words_for_tiles_and_offloading():
    text = settings_for("axolotl", plan(load_in_4bit=True))
    written = yaml.safe_load(text)
    assert written.keys() <= AXOLOTL
    assert (written["rl"], written["adapter"], written["tiled_mlp"]) == ("dpo", "qlora", True)
    assert (written["micro_batch_size"], written["sequence_len"]) == (1, 1024)
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
    assert given["per_device_train_batch_size"] == 2, "2,048 tokens in rows of 1,024"
    assert "use_peft" not in given


@pytest.mark.parametrize("other", ["trl", "axolotl", "llama-factory", "unsloth"])
def test_what_is_lacking_is_named(other):
    text = settings_for(other, plan(optimizer_in_backward="two_pass", optim="adamw_stochastic"))
    comments = "".join(line for line in text.splitlines() if line.startswith("#"))
    for name in ("tokens_per_microbatch", "optimizer_in_backward", "adamw_stochastic is lowtide's", "prefix_sharing"):
        assert name in comments, name
    assert "optimizer_in_backward:" not in text.split("Run it")[1]


LLAMA_8B = "meta-llama/Llama-3.1-8B"
DISTINCT = {
    "attention_head_chunks": 7, "activation_offloading_max_bytes": 123_457, "base_weights": "stream",
    "trained_weights": "stream", "chain_storage": "host", "lora_r": 13, "warmup_steps": 17, "seed": 1234,
    "save_steps": 333, "adam_beta2": 0.987, "truncation_mode": "keep_end", "stop_grace": 11.5,
    "max_completion_length": 77, "checkpointing_every": 3, "ref_model_storage": "8bit", "optim_args": "a=5",
    "ref_model": "other/reference", "parallelism_config": {"sp_size": 19}, "pipeline_parallel_size": 23,
    "not_an_option_yet": 29, "model": LLAMA_8B, "optim": "adamw_stochastic",
}  # fmt: skip
"""Options whose values can be found in a file."""


@pytest.mark.parametrize("method", ["sft", "dpo", "kto", "grpo"])
@pytest.mark.parametrize("other", ["trl", "axolotl", "llama-factory", "unsloth"])
def test_what_is_not_translated_is_named(other, method):
    if method not in TRAINERS[other].methods:
        pytest.skip("it has no such method")
    comments, rest = parts(settings_for(other, asked(method, {}, use_peft=True, **DISTINCT)))
    for name, value in DISTINCT.items():
        said = next(iter(value.values())) if isinstance(value, dict) else value
        assert f"- {name}" in comments or str(said) in rest or name in rest, name


@pytest.mark.parametrize("other", TRAINERS)
def test_layers_that_a_gpu_runs_fused_are_named_but_for_unsloth_s_own(other):
    said = "layers run operation by operation, and keep more"
    assert (said in parts(settings_for(other, plan()))[0]) == (other != "unsloth")
    assert said not in parts(settings_for(other, plan(fused_layers=False)))[0]
    on_cpu = dataclasses.replace(plan(), device="CPU-64GB")
    assert said not in parts(settings_for(other, on_cpu))[0]


@pytest.mark.parametrize("other", ["trl", "axolotl", "llama-factory", "unsloth"])
def test_weights_that_a_plan_streams_are_named(other):
    comments, _ = parts(settings_for(other, asked("sft", {"base_weights": "stream"}, model=LLAMA_8B, use_peft=True)))
    assert "- base_weights (stream): weights that are not trained are on the device" in comments


def test_a_run_over_devices_is_spread_there_too():
    found = asked("sft", {"fsdp": True}, "8xH100", model=LLAMA_8B)
    text = settings_for("trl", found, "f.yaml")
    assert yaml.safe_load(text)["fsdp_config"] == {"version": 2, "reshard_after_forward": True}
    assert "# Run it: trl sft --config f.yaml --num_processes 8\n" in text
    text = settings_for("axolotl", found, "f.yaml")
    assert yaml.safe_load(text).keys() <= AXOLOTL
    assert yaml.safe_load(text)["fsdp_config"]["reshard_after_forward"] is True
    assert "axolotl train f.yaml --launcher torchrun -- --nproc_per_node=8 " in text
    text = settings_for("llama-factory", found, "f.yaml")
    assert yaml.safe_load(text)["deepspeed"] == "examples/deepspeed/ds_z3_config.json"
    assert "FORCE_TORCHRUN=1 NPROC_PER_NODE=8 llamafactory-cli train f.yaml" in text
    comments, _ = parts(settings_for("unsloth", found))
    assert "- num_processes (8)" in comments
    assert "- fsdp (true)" in comments


def test_several_nodes_and_host_memory_have_their_words():
    how = {"fsdp": True, "fsdp_config": {"offload_params": True}}
    found = asked("sft", how, "8xH100", 2, model=LLAMA_8B)
    assert yaml.safe_load(settings_for("trl", found))["fsdp_config"]["cpu_offload"] is True
    assert "--num_processes 16 --num_machines 2 --machine_rank RANK" in settings_for("trl", found)
    assert yaml.safe_load(settings_for("axolotl", found))["fsdp_config"]["offload_params"] is True
    assert "--nproc_per_node=8 --nnodes=2 --rdzv_backend=c10d" in settings_for("axolotl", found)
    assert "ds_z3_offload_config" in yaml.safe_load(settings_for("llama-factory", found))["deepspeed"]
    assert "NPROC_PER_NODE=8 NNODES=2 NODE_RANK=RANK" in settings_for("llama-factory", found)


def test_copies_of_shards_and_split_rows_are_axolotls_too():
    sizes = {"dp_replicate_size": 2, "dp_shard_size": 4, "sp_size": 2}
    found = asked("sft", {"parallelism_config": sizes}, "8xH100", 2, model=LLAMA_8B)
    written = yaml.safe_load(settings_for("axolotl", found))
    names = ("dp_replicate_size", "dp_shard_size", "context_parallel_size", "fsdp_version")
    assert [written[name] for name in names] == [2, 4, 2, 2]
    comments, _ = parts(settings_for("trl", found))
    assert "- parallelism_config (" in comments
    layers = asked("sft", {"parallelism_config": {"tp_size": 8}}, "8xH100", model=LLAMA_8B)
    assert '- parallelism_config ({"tp_size": 8})' in settings_for("axolotl", layers)


DEFAULTS = {
    "trl": {"gradient_checkpointing": True, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1,
            "max_length": 1024, "bf16": True, "learning_rate": 2e-5, "optim": "adamw_torch_fused"},
    "axolotl": {"gradient_checkpointing": True, "micro_batch_size": 8, "gradient_accumulation_steps": 1,
                "sequence_len": 1024, "bf16": True, "learning_rate": 2e-5, "optimizer": "adamw_torch_fused"},
    "llama-factory": {"disable_gradient_checkpointing": False, "per_device_train_batch_size": 8, "cutoff_len": 1024,
                      "gradient_accumulation_steps": 1, "bf16": True, "learning_rate": 2e-5,
                      "optim": "adamw_torch_fused"},
}  # fmt: skip


@pytest.mark.parametrize("other", DEFAULTS)
def test_defaults_that_matter_for_memory_are_written(other):
    written = yaml.safe_load(settings_for(other, asked("sft", {}, model=LLAMA_8B)))
    assert DEFAULTS[other].items() <= written.items()


def test_float16_and_old_gpus_are_no_bfloat16():
    assert yaml.safe_load(settings_for("trl", asked("sft", {}, model=LLAMA_8B, fp16=True)))["bf16"] is False
    old = dataclasses.replace(asked("sft", {}, model=LLAMA_8B), device="T4-16GB")
    assert yaml.safe_load(settings_for("trl", old))["bf16"] is False


@pytest.mark.parametrize("layers", [["q_proj", "v_proj"], "all-linear", None])
def test_adapted_layers_are_the_same(layers):
    own = {"model": LLAMA_8B, "use_peft": True} | ({} if layers is None else {"lora_target_modules": layers})
    found, named = asked("sft", {}, **own), layers or ["q_proj", "v_proj"]  # which PEFT chooses for a Llama
    every = named == "all-linear"
    assert yaml.safe_load(settings_for("llama-factory", found))["lora_target"] == ("all" if every else ",".join(named))
    written = yaml.safe_load(settings_for("axolotl", found))
    assert written.get("lora_target_modules") == (None if every else named)
    assert written.get("lora_target_linear") is (True if every else None)
    assert ("target_modules" in settings_for("unsloth", found)) is not every
    assert yaml.safe_load(settings_for("trl", found)).get("lora_target_modules") == layers


def test_peft_s_choice_for_a_model_that_is_not_known_is_named():
    comments, _ = parts(settings_for("llama-factory", asked("sft", {}, model="no/such", use_peft=True)))
    assert "- lora_target_modules: PEFT chooses the layers" in comments


@pytest.mark.parametrize("own", [{}, {"packing": True}, {"max_length": None}])
def test_rows_without_padding_are_asked_for_where_trl_takes_them(own):
    comments, rest = parts(settings_for("trl", asked("sft", {}, model=LLAMA_8B, **own)))
    assert yaml.safe_load(rest).get("padding_free") == (True if own else None)
    assert ("- padding_free: rows" in comments) is not bool(own)
    assert "- padding_free: rows" in parts(settings_for("trl", asked("dpo", {}, model=LLAMA_8B, **own)))[0]


def test_a_precomputed_reference_is_written_or_named():
    found = asked("dpo", {"precompute_ref_log_probs": True}, model=LLAMA_8B)
    for other in ("trl", "axolotl"):
        assert yaml.safe_load(settings_for(other, found))["precompute_ref_log_probs"] is True
    assert "- precompute_ref_log_probs (true)" in parts(settings_for("llama-factory", found))[0]
    found = asked("kto", {"precompute_ref_log_probs": True}, model=LLAMA_8B)
    assert "- precompute_ref_log_probs (true)" in parts(settings_for("axolotl", found))[0]


@pytest.mark.parametrize("other", ["trl", "axolotl", "llama-factory", "unsloth"])
def test_rows_that_nobody_named_have_a_placeholder(other):
    text = settings_for(other, asked("sft", {}, model=LLAMA_8B))
    assert "# DATASET stands for your rows" in text
    assert "DATASET" in parts(text)[1]
    named = settings_for(other, asked("sft", {}, model=LLAMA_8B, dataset="name/rows"))
    assert "DATASET" not in named
    assert "name/rows" in named


def test_a_method_that_a_trainer_lacks_is_refused():
    with pytest.raises(ValueError, match="--for axolotl: Axolotl has no cpo; it has sft, reward, dpo"):
        settings_for("axolotl", plan("cpo"))


@pytest.mark.parametrize(("file", "reader"), [("rows.jsonl", "json"), ("a/rows.parquet", "parquet"), ("b.CSV", "csv")])
def test_rows_of_a_file_are_read_as_the_library_of_datasets_reads_them(file, reader):
    of_trl = yaml.safe_load(settings_for("trl", asked("sft", {}, model=LLAMA_8B, dataset=file)))
    assert of_trl["datasets"] == [{"path": reader, "data_files": file}]
    assert "dataset_name" not in of_trl
    script = settings_for("unsloth", asked("sft", {}, model=LLAMA_8B, dataset=file))
    assert f"dataset = load_dataset({reader!r}, data_files={file!r}, split='train')" in script


EVALUATED = {"eval_strategy": "steps", "eval_steps": 5}


def test_rows_to_evaluate_on_have_their_words():
    def written(other: str, **own) -> tuple[str, dict]:
        text = settings_for(other, asked("sft", EVALUATED, model=LLAMA_8B, **own))
        return text, yaml.safe_load(text) if other != "unsloth" else {}

    other_rows = {"dataset": "name/rows", "eval_dataset": "name/held", "eval_split": "all"}
    assert written("axolotl", **other_rows)[1]["test_datasets"] == [
        {"path": "name/held", "type": "chat_template", "split": "all"}
    ]
    assert written("axolotl", dataset="name/rows")[1]["test_datasets"][0] == {
        "path": "name/rows", "type": "chat_template", "split": "test",
    }  # fmt: skip
    assert written("llama-factory", **other_rows)[1]["eval_dataset"] == "name/held"
    assert written("trl", dataset="name/rows")[1]["eval_strategy"] == "steps"
    script = written("unsloth", **other_rows)[0]
    assert "evaluated = load_dataset('name/held', split='all')" in script
    assert "eval_dataset=evaluated," in script
    for trainer, own in {"llama-factory": {"dataset": "name/rows"}, "trl": other_rows}.items():
        text, found = written(trainer, **own)
        assert "eval_strategy" not in found, trainer
        assert "- eval_strategy: rows to evaluate on are" in text, trainer


def test_what_others_refuse_is_not_written():
    of_kto = yaml.safe_load(settings_for("axolotl", asked("kto", {}, model=LLAMA_8B)))
    assert of_kto["remove_unused_columns"] is False
    of_dpo = yaml.safe_load(settings_for("axolotl", asked("dpo", {"loss_type": "ipo"}, model=LLAMA_8B)))
    assert of_dpo["dpo_loss_type"] == ["ipo"]
    for other in ("axolotl", "llama-factory"):
        text = settings_for(other, asked("dpo", {"packing": True}, model=LLAMA_8B))
        assert not {"packing", "neat_packing", "sample_packing"} & yaml.safe_load(text).keys()
        assert "- packing (true)" in text
    pretraining = settings_for("llama-factory", asked("pretrain", {"packing": True}, model=LLAMA_8B))
    assert "neat_packing" not in yaml.safe_load(pretraining)
    assert "- packing: documents that are packed together see each other" in pretraining
    of_ppo = settings_for("llama-factory", asked("ppo", {}, model=LLAMA_8B))
    assert yaml.safe_load(of_ppo).items() >= {"reward_model": "REWARD_MODEL", "reward_model_type": "full"}.items()
    assert "REWARD_MODEL stands for" in of_ppo
