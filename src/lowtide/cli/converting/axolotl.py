"""A file of Axolotl's as a method and options of lowtide's; names are those of its `utils/schemas`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lowtide.cli.converting.rows import named_rows
from lowtide.planner.answers.translated import Translated

RL = {"ipo": "dpo", "simpo": "cpo"}
"""What Axolotl's `rl` calls otherwise than lowtide's methods."""
DEFAULTS: Mapping[str, Any] = {
    "sequence_len": 512,
    "micro_batch_size": 1,
    "gradient_accumulation_steps": 1,
    "num_epochs": 1.0,
    "lr_scheduler": "cosine",
    "optimizer": "adamw_torch_fused",
    "output_dir": "./model-out",
}
"""Where a file says nothing; lowtide's are others."""
RENAMED = {
    "base_model": "model",
    "sequence_len": "max_length",
    "micro_batch_size": "per_device_train_batch_size",
    "eval_batch_size": "per_device_eval_batch_size",
    "num_epochs": "num_train_epochs",
    "lr_scheduler": "lr_scheduler_type",
    "revision_of_model": "model_revision",
    "sample_packing": "packing",
    "eval_sample_packing": "eval_packing",
    "tiled_mlp": "mlp_tile_tokens",
    "wandb_name": "run_name",
    "peft_use_rslora": "use_rslora",
    "peft_use_dora": "use_dora",
    "rl_beta": "beta",
    "orpo_alpha": "beta",
    "dpo_loss_type": "loss_type",
    "dpo_loss_weights": "loss_weights",
    "dpo_label_smoothing": "label_smoothing",
    "dpo_padding_free": "padding_free",
    "kto_desirable_weight": "desirable_weight",
    "kto_undesirable_weight": "undesirable_weight",
    "dataset_processes": "dataset_num_proc",
    "warmup_ratio": "warmup_steps",  # a share, below 1
}
OPTIMIZERS = {"adamw_bnb_8bit": "adamw_8bit", "ao_adamw_8bit": "adamw_torch_8bit", "ao_adamw_4bit": "adamw_torch_4bit"}
NEEDLESS = (
    *("flash_attention", "xformers_attention", "sdp_attention", "flex_attention", "s2_attention", "eager_attention"),
    *("pad_to_sequence_len", "group_by_length", "strict", "dataset_prepared_path", "model_type", "tokenizer_type"),
    *("is_llama_derived_model", "sample_packing_eff_est", "total_num_tokens", "sample_packing_group_size"),
    *("excess_length_strategy", "remove_unused_columns", "local_rank", "debug", "fsdp_version", "batch_flattening"),
    *("shuffle_merged_datasets", "fix_untrained_tokens", "plugins", "special_tokens_added", "lora_model_dir"),
)
"""Without a word here, and without need of one where they are not the cause of other numbers."""
TEMPLATES = {name: name for name in ("chatml", "gemma", "llama3")} | {"phi_3": "phi3"}
"""Chat templates by their names there, and here."""
PROMPTED = ("alpaca", "context_qa", "explainchoice", "gpteacher", "oasst", "reflection", "summarizetldr")
"""Kinds of rows that are a prompt and a completion; the others are conversations."""


def axolotl(given: Translated) -> str:
    """Translates what lowtide has a word for; the method."""
    given.left = {**DEFAULTS, **{name: value for name, value in given.left.items() if value is not None}}
    asked = given.take("rl")
    method = "reward" if given.take("reward_model") else RL.get(str(asked), str(asked or "sft"))
    if asked in RL:
        given.written["loss_type"] = asked
    _rows(given, method)
    given.rename({"val_set_size": "test_split_size"} if given.left.get("val_set_size") else {})
    given.take("val_set_size")
    _adapters(given)
    _saving(given)
    _tokens(given)
    optimizer = given.take("optimizer")
    given.written["optim"] = OPTIMIZERS.get(optimizer, optimizer)
    given.rename(RENAMED)
    if given.written.pop("mlp_tile_tokens", False):
        given.written["mlp_tile_tokens"] = given.take("tiled_mlp_original_mlp") or 4096
        given.lacks["tiled_mlp"] = "tiles of 4096 tokens"
    if given.left.get("bf16") in ("auto", "full"):
        given.take("bf16")  # on a GPU that has it, lowtide's default
    if given.left.get("selective_checkpointing"):
        given.written["checkpointing_policy"] = given.take("selective_checkpointing") and "attention"
    if given.left.get("gradient_checkpointing") in ("offload", "unsloth"):
        given.take("gradient_checkpointing")
        given.written |= {"gradient_checkpointing": True, "activation_offloading": True}
    for name, value in given.take("trl", {}).items():
        given.left.setdefault(name, value)
    if any(given.left.get(name) for name in ("wandb_project", "wandb_entity")):
        names = {"wandb_project": "WANDB_PROJECT", "wandb_entity": "WANDB_ENTITY"}
        given.written["env"] = {there: given.take(here) for here, there in names.items() if given.left.get(here)}
        given.written["report_to"] = "wandb"
    _devices(given)
    for name in [name for name in given.left if name in NEEDLESS or name.startswith(("liger_", "cut_cross_entropy"))]:
        given.take(name)
    return method


def _rows(given: Translated, method: str) -> None:
    """`datasets`, and the rows to evaluate on."""
    entries = given.take("datasets", [])
    entries = entries if isinstance(entries, list) else [entries]
    entries = [{"path": each} if isinstance(each, str) else dict(each) for each in entries]
    found = [_entry(given, each, method) for each in entries]
    if method == "sft" and not given.take("train_on_inputs", False) and not given.written.get("completion_only_loss"):
        given.written["assistant_only_loss"] = True
    given.written.pop("completion_only_loss", None)  # is the default of a prompt with a completion
    given.written |= named_rows(found)
    tests = given.take("test_datasets", [])
    if tests:
        given.written["eval_dataset"] = tests[0].get("path")
        given.written |= {"eval_split": tests[0]["split"]} if "split" in tests[0] else {}
    if len(tests) > 1:
        given.lacks["test_datasets"] = "one dataset is evaluated on: the first"


def _entry(given: Translated, entry: dict[str, Any], method: str) -> dict[str, Any]:
    """One of `datasets`, in TRL's words."""
    path, reader, files = entry.pop("path", None), entry.pop("ds_type", None), entry.pop("data_files", None)
    found = {"path": (reader or path) if files else path} | ({"data_files": files} if files else {})
    found |= {name: entry.pop(name) for name in ("name", "split", "data_dir") if entry.get(name)}
    kind = entry.pop("type", None)
    if isinstance(kind, dict):
        columns = {"prompt": kind.get("field_instruction"), "completion": kind.get("field_output")}
        found["columns"] = {ours: theirs for ours, theirs in columns.items() if theirs}
        given.written["completion_only_loss"] = True
        given.lacks[f"type of {path}"] = "its format is not repeated: the columns are the prompt and the completion"
    elif str(kind).split(".")[0].split(":")[0] in PROMPTED:
        given.written["completion_only_loss"] = True
        given.lacks[f"type {kind} of {path}"] = "the model's chat template writes the rows, and not that format"
    elif kind == "completion":
        given.written["completion_only_loss"] = True
        field = entry.pop("field", "text")
        given.written |= {} if field == "text" else {"dataset_text_field": field}
    elif method == "sft" and (messages := entry.pop("field_messages", None)) not in (None, "messages", "conversations"):
        found["columns"] = {"messages": messages}
    if roles := entry.pop("roles_to_train", None):
        given.written |= {} if roles == ["assistant"] else {"roles_to_train": roles}
    for name in ("conversation", "message_property_mappings", "message_field_role", "message_field_content", "roles"):
        entry.pop(name, None)  # read off the rows
    if entry.pop("train_on_eos", "turn") not in ("turn", "all"):
        given.lacks[f"train_on_eos of {path}"] = "the end of each turn that is trained is scored"
    for name, value in entry.items():
        given.lacks[f"{name} ({value}) of {path}"] = "no word for it"
    return found


def _adapters(given: Translated) -> None:
    adapter = given.take("adapter")
    if adapter is None:
        return
    given.written["use_peft"] = True
    if adapter == "qlora":
        given.written["load_in_4bit"] = given.take("load_in_4bit", True)
    elif adapter != "lora":
        given.lacks[f"adapter ({adapter})"] = "LoRA stands in its place"
    layers = given.take("lora_target_modules")
    linear = given.take("lora_target_linear", False)
    if linear or layers:
        given.written["lora_target_modules"] = "all-linear" if linear else layers
    given.same(["lora_r", "lora_alpha", "lora_dropout", "lora_modules_to_save"])


def _saving(given: Translated) -> None:
    """`saves_per_epoch` and `evals_per_epoch`, as a share of all steps."""
    for kind, there in (("saves", "save"), ("evals", "eval")):
        often = given.take(f"{kind}_per_epoch")
        if often:
            share = 1 / (often * given.left["num_epochs"])
            given.written |= {f"{there}_strategy": "steps", f"{there}_steps": share} if share < 1 else {}
    if "save_steps" not in given.written and "save_steps" not in given.left and "save_strategy" not in given.left:
        given.written["save_strategy"] = "epoch"
    asks = {"eval_steps", "eval_strategy"} & {*given.written, *given.left}
    if not asks and ("test_split_size" in given.written or "eval_dataset" in given.written):
        given.written["eval_strategy"] = "epoch"
    elif "eval_steps" in given.left:
        given.written["eval_strategy"] = "steps"


def _tokens(given: Translated) -> None:
    tokens = given.take("special_tokens", {})
    given.written |= {name: tokens.pop(name) for name in ("pad_token", "eos_token") if name in tokens}
    if tokens:
        given.lacks[f"special_tokens {tokens}"] = "put them into the tokenizer"
    given.rename({"chat_template_jinja": "chat_template_path"})
    name = given.take("chat_template", "jinja")
    if name in TEMPLATES:
        given.written["chat_template_path"] = TEMPLATES[name]
    elif name not in ("tokenizer_default", "jinja"):
        given.lacks[f"chat_template ({name})"] = "the tokenizer's own writes the rows, or chat_template_path"


def _devices(given: Translated) -> None:
    names = {
        "context_parallel_size": "sp_size",
        "sequence_parallel_degree": "sp_size",
        "tensor_parallel_size": "tp_size",
    }
    names |= {name: name for name in ("dp_shard_size", "dp_replicate_size")}
    sizes = {there: given.take(here) for here, there in names.items() if (given.left.get(here) or 1) > 1}
    if sizes:
        given.written["parallelism_config"] = sizes
    how = given.take("fsdp_config")
    if given.take("fsdp") or how:
        offload = (how or {}).get("offload_params") or (how or {}).get("fsdp_offload_params")
        given.written["fsdp"] = True
        given.written |= {"fsdp_config": {"offload_params": True}} if offload else {}
