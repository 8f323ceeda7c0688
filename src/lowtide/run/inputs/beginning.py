"""Where pretraining begins without a model: a folder with a config and a tokenizer, made once for a run."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import PretrainedConfig, PreTrainedTokenizerBase
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)

from lowtide.compat.datasets import fingerprint_of
from lowtide.data.byte_pairs import learn_tokenizer
from lowtide.data.cache.fingerprint import tokenizer_fingerprint
from lowtide.data.documents import documents_of, texts_of
from lowtide.engine.heads.head import Head
from lowtide.engine.weights.loading import load_tokenizer
from lowtide.engine.weights.new_model import BEGINNING, described_config
from lowtide.own_files import folder_beside, remove_files
from lowtide.parsing import parse_json
from lowtide.process.ways_out import in_python

FOLDER = "beginning"
"""Its name in the output folder."""
LEARNED_FROM = 100_000
"""The most documents that a tokenizer is learned from."""
UNUSED = 2
"""Positions that RoBERTa and its kin leave out before the first."""
OPTIONS = (
    *("config_name", "model_type", "config_overrides", "tokenizer_name", "train_tokenizer"),
    *("dataset_text_field", "document_separator"),
)
"""What it depends on."""


def beginning_of(args: Any, rows: Any, tokenizer: PreTrainedTokenizerBase | None = None) -> str:
    """The folder of the model that `args` asks for, in the output folder; one that was made before, of the same options
    and rows, is taken again.

    Args:
        args: a config with `methods.pretrain.BeginningOptions`.
        rows: a tokenizer may be learned from them.
        tokenizer: one that is there, in place of those that the options name.

    Raises:
        ValueError: the options name no tokenizer, or none that goes with the config.
    """
    folder = Path(args.output_dir, FOLDER)
    asked = {name: getattr(args, name, None) for name in OPTIONS}
    asked["method"] = args.method.name
    asked["rows"] = fingerprint_of(rows) if args.train_tokenizer and isinstance(rows, Dataset) else None
    asked["tokenizer"] = None if tokenizer is None else tokenizer_fingerprint(tokenizer)
    with args.main_process_first(desc="making the model's folder"):
        record = _record(folder)
        if record is None or {**record, "files": None} != {**asked, "files": None}:
            _make(folder, args, rows, tokenizer, asked)
    return str(folder)


def _record(folder: Path) -> dict | None:
    """What a run wrote of the folder that it made; None where there is no folder.

    Raises:
        ValueError: no run made it, or it holds more than a run wrote.
    """
    if not os.path.lexists(folder):
        return None
    try:
        record = parse_json((folder / BEGINNING).read_text(encoding="utf-8"))
        strangers = {path.name for path in folder.iterdir()} - {*record["files"]}
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        record, strangers = {}, {BEGINNING}
    if strangers or folder.is_symlink() or not isinstance(record, dict):
        raise ValueError(
            f"{folder} is where the model that a run begins with is made, and no run made what lies there: move it "
            "away, or name another output_dir"
        )
    return record


def _make(folder: Path, args: Any, rows: Any, tokenizer: PreTrainedTokenizerBase | None, asked: dict) -> None:
    """Writes the folder beside its place, and moves it there when it is whole, in place of one that a run made."""
    config = described_config(
        args.config_name, args.model_type, args.config_overrides or {}, trust_remote_code=args.trust_remote_code
    )
    _check_kind(config, args.method.head)
    tokenizer = tokenizer or _tokenizer(args, rows)
    _fit(config, tokenizer, args)
    with folder_beside(folder) as made:
        config.save_pretrained(made)
        tokenizer.save_pretrained(made)
        files = sorted([BEGINNING, *(path.name for path in made.iterdir())])
        record = {**asked, "files": files}
        (made / BEGINNING).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        if (earlier := _record(folder)) is not None:
            remove_files(folder, earlier["files"])
        made.rename(folder)


def _check_kind(config: PretrainedConfig, head: type[Head]) -> None:
    """Refuses models that the method does not train.

    Raises:
        ValueError: says which method does.
    """
    kind = config.model_type
    masked = kind in MODEL_FOR_MASKED_LM_MAPPING_NAMES
    causal = kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and not masked  # encoders are listed there too, as decoders
    if masked if head.hides_tokens else causal:
        return
    way = "`lowtide masked-lm` does" if masked else "`lowtide pretrain` does" if causal else "take another type"
    raise ValueError(f"model type {kind} does not begin with random weights as one of the {head.models} here: {way}")


def _tokenizer(args: Any, rows: Any) -> PreTrainedTokenizerBase:
    if args.train_tokenizer is not None:
        field = args.dataset_text_field
        apart = documents_of(rows, field, getattr(args, "document_separator", None))
        texts = texts_of(apart, field, LEARNED_FROM)
        return learn_tokenizer(texts, args.train_tokenizer, masks=args.method.head.hides_tokens)
    name = args.tokenizer_name or args.config_name
    if name is None or os.path.isfile(name):
        raise ValueError(
            "a model that begins with random weights needs a tokenizer: name one by tokenizer_name, learn one by "
            f"train_tokenizer{in_python(', or pass it as `processing_class`')}"
        )
    return load_tokenizer(name, trust_remote_code=args.trust_remote_code)


def _fit(config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase, args: Any) -> None:
    """Gives a config the tokenizer's vocabulary and special tokens, and as many positions as rows have."""
    text: Any = config.get_text_config()
    overrides, size = args.config_overrides or {}, len(tokenizer)
    if overrides.get("vocab_size", size) < size:
        raise ValueError(
            f"config_overrides says vocab_size={overrides['vocab_size']}, and the tokenizer has {size} tokens: leave "
            "vocab_size out, or name at least as many"
        )
    text.vocab_size = overrides.get("vocab_size", size)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id", "cls_token_id", "sep_token_id"):
        if hasattr(text, name):
            setattr(text, name, getattr(tokenizer, name))
    if "max_position_embeddings" not in overrides and args.max_length is not None:
        positions = getattr(text, "max_position_embeddings", None)
        if positions is not None and positions < args.max_length + UNUSED:
            text.max_position_embeddings = args.max_length + UNUSED
