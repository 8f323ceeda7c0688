"""A file of LLaMA-Factory's as a method and options of lowtide's; names are those of its `hparams`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lowtide.cli.converting.rows import named_rows
from lowtide.parsing import read_object
from lowtide.planner.answers.translated import Translated

STAGES = {"sft": "sft", "pt": "pretrain", "rm": "reward", "dpo": "dpo", "kto": "kto", "ppo": "ppo"}
LOSSES = {"orpo": "orpo", "simpo": "cpo"}
"""Of `pref_loss`, those that are methods of their own here."""
DEFAULTS: Mapping[str, Any] = {
    "cutoff_len": 2048,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "num_train_epochs": 3.0,
    "learning_rate": 5e-5,
    "lr_scheduler_type": "linear",
    "output_dir": "trainer_output",
}
"""Where a file says nothing; lowtide's are others."""
RENAMED = {
    "model_name_or_path": "model",
    "cutoff_len": "max_length",
    "preprocessing_num_workers": "dataset_num_proc",
    "neat_packing": "packing",
    "mask_history": "train_on_last_turn_only",
    "lora_rank": "lora_r",
    "pref_beta": "beta",
    "dpo_label_smoothing": "label_smoothing",
    "kto_chosen_weight": "desirable_weight",
    "kto_rejected_weight": "undesirable_weight",
    "reward_model": "reward_model_path",
    "max_new_tokens": "max_completion_length",
    "quantization_type": "bnb_4bit_quant_type",
    "warmup_ratio": "warmup_steps",  # a share, below 1
}
NEEDLESS = (
    *("do_train", "do_eval", "do_predict", "overwrite_output_dir", "overwrite_cache", "plot_loss"),
    *("enable_liger_kernel", "quantization_method", "disable_shuffling", "use_fast_tokenizer", "reward_model_type"),
    *("predict_with_generate", "use_unsloth", "shift_attn", "upcast_layernorm", "finetuning_type", "cache_dir"),
    *("tokenized_path", "ddp_timeout", "include_num_input_tokens_seen", "flash_attn", "group_by_length"),
)
"""Without a word here, and without need of one."""


def llama_factory(given: Translated, folder: Path) -> str:
    """Translates what lowtide has a word for; the method.

    Args:
        folder: of the file, which `dataset_dir` is looked for in.
    """
    given.left = {**DEFAULTS, **{name: value for name, value in given.left.items() if value is not None}}
    method = STAGES.get(stage := str(given.take("stage", "sft")), stage)
    loss = given.take("pref_loss") if method == "dpo" else None
    method = LOSSES.get(str(loss), method)
    if loss == "simpo" or (method == "dpo" and loss is not None):
        given.written["loss_type"] = loss
    if method == "dpo" and (share := given.take("pref_ftx")):
        given.written |= {"loss_type": [loss or "sigmoid", "sft"], "loss_weights": [1.0, share]}
    _rows(given, folder)
    if name := given.take("template"):
        given.lacks[f"template ({name})"] = "the tokenizer's own chat template writes the rows, or chat_template_path"
    if method == "sft":
        given.written["assistant_only_loss"] = not given.take("train_on_prompt", False)
    _weights(given)
    if given.take("packing") and "neat_packing" not in given.left:
        given.written["packing"] = True  # and rows that are packed together do not see each other
    if given.take("disable_gradient_checkpointing", False):
        given.written["gradient_checkpointing"] = False
    if given.take("use_unsloth_gc", False):
        given.written["activation_offloading"] = True
    if share := given.take("val_size"):
        given.written["test_split_size"] = share
    given.rename(RENAMED)
    for name in NEEDLESS:
        given.take(name)
    return method


def _rows(given: Translated, folder: Path) -> None:
    """Datasets by their names in `dataset_info.json`."""
    where = Path(str(given.take("dataset_dir", "data")))
    infos = [place / where / "dataset_info.json" for place in (Path(), folder)]
    known = next((read_object(info) for info in infos if info.is_file()), {})
    most, shares = given.take("max_samples"), given.take("interleave_probs")
    given.take("mix_strategy")
    found = []
    for name in _names(given.take("dataset", "")):
        entry = known.get(name)
        if entry is None:
            given.lacks[f"dataset ({name})"] = f"not found in {where}/dataset_info.json: name its file or its place"
        found.append(_entry(name, entry, where if (Path() / where).is_dir() else folder / where, most))
    for one, share in zip(found, _names(shares or ""), strict=False):
        one["fraction"] = float(share)
    given.written |= named_rows(found)
    others = _names(given.take("eval_dataset", ""))
    if others:
        given.written["eval_dataset"] = _entry(others[0], known.get(others[0]), where, None)["path"]
    if len(others) > 1:
        given.lacks["eval_dataset"] = "one dataset is evaluated on: the first"


def _names(listed: Any) -> list[str]:
    """Of a list with commas, or of YAML's."""
    return [str(each).strip() for each in (listed if isinstance(listed, list) else str(listed).split(",")) if each]


def _entry(name: str, entry: Mapping[str, Any] | None, folder: Path, most: int | None) -> dict[str, Any]:
    """A dataset of `dataset_info.json`, in TRL's words."""
    entry = entry or {}
    file = entry.get("file_name")
    found = {"path": str(folder / file) if file else entry.get("hf_hub_url", name)}
    found |= {"name": entry["subset"]} if "subset" in entry else {}
    split = entry.get("split", "train")
    most = entry.get("num_samples", most)
    if split != "train" or most:
        found["split"] = f"{split}[:{most}]" if most else split
    columns = entry.get("columns", {})
    sides = ("chosen", "rejected") if entry.get("ranking") else ("completion",) if "response" in columns else ()
    names = {side: columns.get(side if len(sides) == 2 else "response") for side in sides}
    if entry.get("formatting") != "sharegpt" and "query" not in columns:
        names["prompt"] = columns.get("prompt")
    elif "messages" in columns and not sides:
        names["messages"] = columns["messages"]
    renames = {ours: theirs for ours, theirs in names.items() if theirs and ours != theirs}
    return found | ({"columns": renames} if renames else {})


def _weights(given: Translated) -> None:
    kind = given.left.get("finetuning_type", "lora")
    if kind not in ("lora", "full"):
        given.lacks[f"finetuning_type ({kind})"] = "all weights are trained"
    if kind == "lora":
        given.written["use_peft"] = True
        rank = given.left.setdefault("lora_rank", 8)
        given.left.setdefault("lora_alpha", 2 * rank)
        given.left.setdefault("lora_dropout", 0.0)
        layers = _names(given.take("lora_target", "all"))
        given.written["lora_target_modules"] = "all-linear" if layers == ["all"] else layers
        if saved := given.take("additional_target"):
            given.written["lora_modules_to_save"] = _names(saved)
    bits = given.take("quantization_bit")
    if bits in (4, 8):
        given.written[f"load_in_{bits}bit"] = True
        double = given.take("double_quantization", True)
        given.written |= {"use_bnb_nested_quant": double} if bits == 4 else {}
    elif bits is not None:
        given.lacks[f"quantization_bit ({bits})"] = "weights are stored in 4 or 8 bits, or whole"
    if given.take("pure_bf16", False):
        given.written |= {"dtype": "bfloat16", "bf16": False}
