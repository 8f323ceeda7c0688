"""A plan's settings in the words of each other trainer."""

from __future__ import annotations

from pathlib import PurePath
from typing import Any

from lowtide.planner.answers.given_settings import INHERITED, LENGTH, STEPS, Given
from lowtide.planner.answers.row_lengths import BATCH
from lowtide.run.optimizers import NAMES

DATASET, TEMPLATE, REWARD_MODEL = "DATASET", "TEMPLATE", "REWARD_MODEL"
"""Placeholders of what a plan does not know."""
READERS = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv"}
"""By a file's suffix, how the library `datasets` reads it."""
NOT_INHERITED = ("fsdp", "fsdp_config", "parallelism_config", "optim", "gradient_checkpointing")
"""Options of `transformers.TrainingArguments` that are translated one by one."""
OF_TRL_MODEL = (
    *("model_revision", "dtype", "attn_implementation", "use_peft", "lora_r", "lora_alpha", "lora_dropout"),
    *("lora_target_modules", "lora_target_parameters", "lora_modules_to_save", "lora_task_type", "use_rslora"),
    *("use_dora", "load_in_4bit", "load_in_8bit", "bnb_4bit_quant_type", "use_bnb_nested_quant"),
    *("dataset_config", "dataset_streaming"),
)
OF_PAIRS = ("disable_dropout", "router_aux_loss_coef", "beta", "loss_type", "precompute_ref_log_probs",
            "precompute_ref_batch_size", "sync_ref_model", "ref_model_sync_steps", "ref_model_mixup_alpha")  # fmt: skip
OF_COMPLETIONS = (
    *("beta", "max_completion_length", "num_generations", "num_iterations", "steps_per_generation", "temperature"),
    *("top_p", "top_k", "min_p", "repetition_penalty", "generation_batch_size", "use_vllm", "vllm_mode"),
    *("vllm_gpu_memory_utilization", "vllm_enable_sleep_mode", "vllm_tensor_parallel_size", "vllm_server_host"),
    *("vllm_server_port", "vllm_server_base_url", "disable_dropout", "router_aux_loss_coef", "log_completions"),
    *("sync_ref_model", "ref_model_sync_steps", "ref_model_mixup_alpha", "reward_weights", "epsilon"),
    *("mask_truncated_completions", "shuffle_dataset", "model_init_kwargs", "trust_remote_code"),
)
COMMON = (LENGTH, "model_init_kwargs", "trust_remote_code", "dataset_num_proc", "activation_offloading")
OF_TRL = {
    "sft": (*COMMON, "packing", "packing_strategy", "loss_type", "assistant_only_loss",
            "completion_only_loss", "chat_template_path", "dataset_text_field", "dataset_kwargs", "eos_token",
            "eval_packing", "pad_token", "router_aux_loss_coef", "shuffle_dataset", "truncation_mode"),
    "dpo": (*COMMON, *OF_PAIRS, "label_smoothing", "loss_weights", "ld_alpha", "use_weighting",
            "f_divergence_type", "f_alpha_divergence_coef", "discopop_tau", "pad_token", "truncation_mode"),
    "kto": (*COMMON, *OF_PAIRS, "desirable_weight", "undesirable_weight"),
    "reward": (*COMMON, "center_rewards_coefficient", "chat_template_path", "disable_dropout", "eos_token",
               "pad_token"),
    "grpo": (*OF_COMPLETIONS, "loss_type", "scale_rewards", "epsilon_high", "delta", "importance_sampling_level",
             "top_entropy_quantile", "cast_lm_head_to_fp32", "max_tool_calling_iterations"),
    "rloo": (*OF_COMPLETIONS, "normalize_advantages", "reward_clip_range"),
    "orpo": (LENGTH, "beta", "disable_dropout", "dataset_num_proc"),
}  # fmt: skip
"""Options of the configs of TRL 1.16 that lowtide has under the same names."""


def trl(given: Given) -> None:
    """TRL: options of its configs, of `ModelConfig` and of `ScriptArguments`."""
    given.rename({"model": "model_name_or_path", "dataset_split": "dataset_train_split"})
    given.rename({"eval_split": "dataset_test_split"})
    rows = given.take("dataset", DATASET)
    reader = reader_of(rows)
    given.written |= {"datasets": [{"path": reader, "data_files": rows}]} if reader else {"dataset_name": rows}
    if given.left.get("eval_dataset") or reader:
        given.drop_evaluation("rows to evaluate on are a split of a dataset by name")
    if reader:
        given.rename({"dataset_streaming": "streaming"})
    given.same([*OF_TRL_MODEL, *OF_TRL[given.method]])
    given.same(["gradient_checkpointing", *sorted(INHERITED.difference(NOT_INHERITED))])
    if LENGTH in OF_TRL[given.method] and LENGTH in given.left:
        given.written[LENGTH] = given.take(LENGTH)  # None is no limit
    given.take_optimizer("optim", _transformers_optimizer)
    _take_fsdp(given)
    given.take("num_processes")
    if all("." in name for name in given.left.get("reward_funcs") or ()):
        given.same(["reward_funcs"])
    _trl_padding(given)


def _take_fsdp(given: Given) -> None:
    """transformers' `fsdp`, which TRL takes; copies of shards become shards over all devices."""
    sizes = given.left.get("parallelism_config") or {}
    if not (given.left.get("fsdp") or "dp_shard_size" in sizes):
        return
    asked, how = given.take("fsdp", True), given.take("fsdp_config", {})
    if isinstance(how, dict):
        how = {"version": 2, "reshard_after_forward": True, **how}
        if how.pop("offload_params", False):
            how["cpu_offload"] = True
    given.written |= {"fsdp": asked, "fsdp_config": how}


def _trl_padding(given: Given) -> None:
    """TRL 1.16 has rows without padding in SFT alone, with packing or without a limit on their length."""
    whole = given.written.get(LENGTH, 0) is None
    if given.method == "sft" and given.left.get("padding_free") and (given.written.get("packing") or whole):
        given.same(["padding_free"])
    _name_padding(given)


def _name_padding(given: Given) -> None:
    if given.take("padding_free"):
        given.lacks["padding_free"] = "rows of a micro-batch are padded to the longest"


def _transformers_optimizer(name: str) -> str | None:
    return None if name in NAMES else name


def _axolotl_optimizer(name: str) -> str | None:
    return AXOLOTL_OPTIMIZERS.get(name, _transformers_optimizer(name))


def reader_of(rows: str) -> str | None:
    """What `datasets.load_dataset` calls the format of a file; None of a dataset by name or a folder."""
    return READERS.get(PurePath(rows).suffix.lower())


def axolotl(given: Given) -> None:
    """Axolotl: of its `utils/schemas`."""
    given.rename({"model": "base_model", LENGTH: "sequence_len", BATCH: "micro_batch_size"})
    given.rename({"num_train_epochs": "num_epochs", "lr_scheduler_type": "lr_scheduler"})
    given.rename({"model_revision": "revision_of_model", "per_device_eval_batch_size": "eval_batch_size"})
    given.same([STEPS, *OF_AXOLOTL])
    given.take_optimizer("optimizer", _axolotl_optimizer)
    rows: dict[str, Any] = {"path": given.take("dataset", DATASET), "type": "chat_template"}
    for ours, theirs in {"dataset_split": "split", "dataset_config": "name"}.items():
        rows |= {theirs: value} if (value := given.take(ours)) else {}
    given.written["datasets"] = [rows]
    _axolotl_evaluation(given, rows)
    _axolotl_method(given)
    _axolotl_adapters(given)
    _axolotl_devices(given)
    if given.take("mlp_tile_tokens"):
        given.written["tiled_mlp"] = True
    if given.left.get("checkpointing_policy") == "attention":
        given.written["selective_checkpointing"] = bool(given.take("checkpointing_policy"))
    elif given.left.get("checkpointing_policy", "full") != "full":
        given.lacks["checkpointing_policy"] = "a checkpointed layer keeps attention at most"
    if given.left.get("dtype"):
        given.lacks["dtype"] = "bf16 and fp16 say how weights are stored as well"
    _name_padding(given)
    if given.method == "sft":
        without = "unless a plugin (Cut Cross-Entropy, Liger) is set"
        given.lacks["the head"] = f"logits of all tokens, and their gradient, are held whole, {without}"


def _axolotl_evaluation(given: Given, rows: dict[str, Any]) -> None:
    """The rows that a run is evaluated on: another dataset, or another split of the same."""
    other, split = given.take("eval_dataset"), given.take("eval_split")
    if other:
        given.written["test_datasets"] = [{**rows, "path": other, "split": split or "train"}]
    elif given.written.get("eval_strategy", "no") != "no":
        given.written["test_datasets"] = [{**rows, "split": split or "test"}]


def _axolotl_method(given: Given) -> None:
    if given.method == "grpo":
        names = [*OF_AXOLOTL_TRL]
        if all("." in name for name in given.left.get("reward_funcs") or ()):
            names.append("reward_funcs")
        given.written["trl"] = {name: given.take(name) for name in names if given.left.get(name) is not None}
        return
    given.rename({"beta": "orpo_alpha" if given.method == "orpo" else "rl_beta"})
    if given.method == "dpo":
        if (losses := given.take("loss_type")) is not None:
            given.written["dpo_loss_type"] = [losses] if isinstance(losses, str) else losses
        given.rename({"loss_weights": "dpo_loss_weights"})
        given.rename({"label_smoothing": "dpo_label_smoothing"})
        given.same(["precompute_ref_log_probs"])
    if given.method == "kto":
        given.rename({"desirable_weight": "kto_desirable_weight", "undesirable_weight": "kto_undesirable_weight"})
        given.written["remove_unused_columns"] = False  # which Axolotl asks for
    if given.method == "sft":
        given.rename({"packing": "sample_packing"})
    if given.method == "sft" and "sequence_len" in given.written:
        given.written["excess_length_strategy"] = "truncate"  # longer rows would be left out
    if given.method == "sft" and given.take("padding_free") and not given.written.get("sample_packing"):
        given.written["batch_flattening"] = "auto"
        given.lacks["padding_free"] = "rows are padded to the longest where attention is not flash attention"


def _axolotl_adapters(given: Given) -> None:
    if not given.take("use_peft"):
        return
    four = bool(given.take("load_in_4bit"))
    given.written |= {"adapter": "qlora", "load_in_4bit": True} if four else {"adapter": "lora"}
    given.same(["load_in_8bit", "lora_target_parameters", "lora_modules_to_save"])
    given.written |= {"lora_r": given.take("lora_r", 16), "lora_alpha": given.take("lora_alpha", 32)}
    given.written["lora_dropout"] = given.take("lora_dropout", 0.05)
    layers = given.take_adapted_layers()
    given.written |= {"lora_target_linear": True} if layers in (None, "all-linear") else {"lora_target_modules": layers}
    given.rename({"use_rslora": "peft_use_rslora", "use_dora": "peft_use_dora"})


def _axolotl_devices(given: Given) -> None:
    given.take("num_processes")
    sizes = dict(given.take("parallelism_config", {}))
    names = {"sp_size": "context_parallel_size", "cp_size": "context_parallel_size"}
    names |= {name: name for name in ("dp_shard_size", "dp_replicate_size")}
    given.written |= {there: sizes.pop(here) for here, there in names.items() if here in sizes}
    if sizes:
        given.left["parallelism_config"] = sizes
    how = given.left.get("fsdp_config") or {}
    if not (given.left.get("fsdp") or "dp_shard_size" in given.written) or not isinstance(how, dict):
        return
    given.take("fsdp")
    given.take("fsdp_config")
    offload = bool(how.get("offload_params") or how.get("cpu_offload"))
    shards = {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "state_dict_type": "FULL_STATE_DICT"}
    shards |= {"offload_params": offload, "reshard_after_forward": how.get("reshard_after_forward", True)}
    given.written |= {"fsdp_version": 2, "fsdp_config": shards}


def llama_factory(given: Given) -> None:
    """LLaMA-Factory: of its `hparams`."""
    given.written |= {"do_train": True, "template": TEMPLATE}
    given.rename({"model": "model_name_or_path", "dataset": "dataset", LENGTH: "cutoff_len", "beta": "pref_beta"})
    given.written.setdefault("dataset", DATASET)
    given.rename({"dataset_num_proc": "preprocessing_num_workers", "use_liger_kernel": "enable_liger_kernel"})
    skipped = (*NOT_INHERITED, "gradient_checkpointing_kwargs", "use_liger_kernel", "liger_kernel_config", "use_cache")
    if given.left.get("eval_dataset") is None:
        given.drop_evaluation("rows to evaluate on are named by eval_dataset")
    given.same(["eval_dataset", "ref_model", "model_revision", "trust_remote_code"])
    given.same(sorted(INHERITED.difference(skipped)))
    given.take_optimizer("optim", _transformers_optimizer)
    given.written["disable_gradient_checkpointing"] = given.take("gradient_checkpointing", True) is False
    _llama_factory_packing(given)
    _llama_factory_method(given)
    _llama_factory_weights(given)
    _llama_factory_devices(given)
    if given.take("activation_offloading"):
        given.written["use_unsloth_gc"] = True  # which moves the inputs of checkpointed layers to the host
    _name_padding(given)
    if given.method != "reward" and not given.written.get("enable_liger_kernel"):
        without = ", unless enable_liger_kernel is set" if given.method in ("sft", "pretrain") else ""
        given.lacks["the head"] = f"logits of all tokens, and their gradient, are held whole{without}"


def _llama_factory_packing(given: Given) -> None:
    """It packs in two stages, and keeps rows apart in one of them."""
    if given.method not in ("sft", "pretrain") or not given.take("packing"):
        return
    given.written["packing"] = True
    if given.method == "sft":
        given.written["neat_packing"] = True
    else:
        given.lacks["packing"] = "documents that are packed together see each other"


def _llama_factory_method(given: Given) -> None:
    losses = given.left.get("loss_type")
    losses = losses if isinstance(losses, list) else [losses]
    if given.method == "dpo" and len(losses) == 1 and losses[0] in ("sigmoid", "hinge", "ipo"):
        given.written["pref_loss"] = losses[0]
        given.take("loss_type")
    if given.method == "dpo":
        given.rename({"label_smoothing": "dpo_label_smoothing", "ld_alpha": "ld_alpha"})
    if given.method == "kto":
        given.rename({"desirable_weight": "kto_chosen_weight", "undesirable_weight": "kto_rejected_weight"})
    if given.method == "ppo":
        given.rename({"reward_model_path": "reward_model", "max_completion_length": "max_new_tokens"})
        given.written.setdefault("reward_model", REWARD_MODEL)
        given.written["reward_model_type"] = "full"


def _llama_factory_weights(given: Given) -> None:
    adapts = bool(given.take("use_peft"))
    given.written["finetuning_type"] = "lora" if adapts else "full"
    if adapts:
        given.written |= {"lora_rank": given.take("lora_r", 16), "lora_alpha": given.take("lora_alpha", 32)}
        given.written["lora_dropout"] = given.take("lora_dropout", 0.05)
        layers = given.take_adapted_layers()
        given.written["lora_target"] = "all" if layers in (None, "all-linear") else ",".join(layers)
        given.same(["use_rslora", "use_dora"])
        if saved := given.take("lora_modules_to_save"):
            given.written["additional_target"] = ",".join(saved)
    four, eight = given.take("load_in_4bit"), given.take("load_in_8bit")
    if four or eight:
        given.written |= {"quantization_bit": 4 if four else 8, "quantization_method": "bnb"}
    if four:
        given.written["double_quantization"] = bool(given.take("use_bnb_nested_quant"))
        given.rename({"bnb_4bit_quant_type": "quantization_type"})
    if given.left.get("dtype") == "bfloat16" and not adapts:
        given.written["pure_bf16"] = given.take("dtype") == "bfloat16"
        given.written.pop("bf16", None)
    elif given.left.get("dtype"):
        given.lacks["dtype"] = "bf16 and fp16 say how weights that are not trained are stored as well"


def _llama_factory_devices(given: Given) -> None:
    given.take("num_processes")
    sizes, how = given.left.get("parallelism_config") or {}, given.left.get("fsdp_config") or {}
    if not (given.left.get("fsdp") or "dp_shard_size" in sizes) or not isinstance(how, dict):
        return
    if "quantization_bit" in given.written:
        given.lacks["fsdp"] = "DeepSpeed's ZeRO-3 takes no quantized weights, so that each device holds all of them"
        return
    given.take("fsdp")
    given.take("fsdp_config")
    offload = how.get("offload_params") or how.get("cpu_offload")
    given.written["deepspeed"] = f"examples/deepspeed/ds_z3_{'offload_' if offload else ''}config.json"
    given.lacks["fsdp"] = "DeepSpeed's ZeRO-3 stands in its place, by a file of LLaMA-Factory's repository"


def unsloth(given: Given) -> None:
    """Unsloth: what `unsloth_script` reads, with the options of TRL's config as `config`."""
    model = {name: given.take(name) for name in OF_UNSLOTH if given.left.get(name) is not None}
    if model.get("use_peft"):
        model["lora_target_modules"] = given.take_adapted_layers()
    model["checkpoints"] = given.take("gradient_checkpointing", True)
    model["offloads"] = bool(given.take("activation_offloading"))  # of layers' inputs, by its own checkpointing
    given.take("fused_layers")  # its own kernels stand for them
    if given.left.get("dtype"):
        given.lacks["dtype"] = "Unsloth chooses how weights are stored"
    inherited = INHERITED.difference(NOT_INHERITED, ("deepspeed", "model_init_kwargs"))
    given.same([name for name in OF_TRL[given.method] if name not in ("model_init_kwargs", "trust_remote_code")])
    given.same(sorted(inherited))
    given.take_optimizer("optim", _transformers_optimizer)
    _trl_padding(given)
    given.written = {**model, "config": given.written}


OF_UNSLOTH = (
    *("model", "dataset", "dataset_split", "eval_dataset", "eval_split", "use_peft", "lora_r", "lora_alpha"),
    *("lora_dropout", "use_rslora", "lora_modules_to_save", "load_in_4bit", "load_in_8bit", "trust_remote_code"),
)
OF_AXOLOTL = (
    *("output_dir", "learning_rate", "max_steps", "seed", "warmup_steps", "weight_decay", "max_grad_norm", "bf16"),
    *("fp16", "tf32", "adam_beta1", "adam_beta2", "adam_epsilon", "optim_args", "lr_scheduler_kwargs", "save_steps"),
    *("eval_steps", "logging_steps", "save_total_limit", "save_strategy", "eval_strategy", "torch_compile"),
    *("resume_from_checkpoint", "deepspeed", "gradient_checkpointing", "gradient_checkpointing_kwargs"),
    *("activation_offloading", "attn_implementation", "trust_remote_code", "dataset_num_proc", "hub_model_id"),
    *("dataloader_num_workers", "dataloader_pin_memory", "dataloader_drop_last", "center_rewards_coefficient"),
)
OF_AXOLOTL_TRL = ("beta", "max_completion_length", "num_generations", "temperature", "top_p", "top_k", "min_p",
                  "repetition_penalty", "num_iterations", "epsilon", "reward_weights", "sync_ref_model",
                  "ref_model_mixup_alpha", "ref_model_sync_steps", "use_vllm", "vllm_server_host",
                  "vllm_server_port", "log_completions")  # fmt: skip
AXOLOTL_OPTIMIZERS = {
    "adamw_8bit": "adamw_bnb_8bit",
    "adamw_torch_8bit": "ao_adamw_8bit",
    "adamw_torch_4bit": "ao_adamw_4bit",
    "muon": "muon",
}
"""Those that it calls otherwise than transformers, or has beside it."""
