"""The trace on fake tensors against what torch's profiler sees the same step allocate on real ones."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, LlamaConfig, Qwen2Config

import lowtide
from lowtide.planning import estimate, prepared_rows, trainer_on

SIZES = {
    "vocab_size": 8_000,
    "hidden_size": 192,
    "intermediate_size": 768,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
}
TEXTS, PAIRS, SINGLES = [300, 200, 250, 120], [(60, 120, 200)] * 4, [(60, 160)] * 4
CASES: dict[str, tuple[str, dict[str, Any], list, type, Any]] = {
    "sft": ("SFTConfig", {}, TEXTS, LlamaConfig, None),
    "sft without checkpointing": ("SFTConfig", {"gradient_checkpointing": False}, TEXTS, LlamaConfig, None),
    "sft, tied": ("SFTConfig", {}, TEXTS, Qwen2Config, None),
    "sft, several micro-batches": ("SFTConfig", {"tokens_per_microbatch": 400}, TEXTS, LlamaConfig, None),
    "sft, in backward": ("SFTConfig", {"optimizer_in_backward": True, "max_grad_norm": 0.0}, TEXTS, LlamaConfig, None),
    "sft, tiled": ("SFTConfig", {"mlp_tile_tokens": 128}, TEXTS, LlamaConfig, None),
    "dpo": ("DPOConfig", {}, PAIRS, LlamaConfig, None),
    "kto": ("KTOConfig", {}, SINGLES, LlamaConfig, None),
    "reward": ("RewardConfig", {}, PAIRS, LlamaConfig, None),
    "orpo": ("ORPOConfig", {}, PAIRS, LlamaConfig, None),
}


def config_of(name: str, options: dict[str, Any], folder: str) -> Any:
    settings = {
        "output_dir": folder,
        "per_device_train_batch_size": 4,
        "max_steps": 2,
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "save_strategy": "no",
        "rehearsal": False,
    }
    return getattr(lowtide, name)(**settings, **options)


def allocated(case: str, folder: str) -> int:
    """The most bytes that the tensors of a run's second step hold, weights and states among them."""
    torch.set_num_threads(1)
    name, options, lengths, kind, peft_config = CASES[case]
    args = config_of(name, options, folder)
    rewards = name == "RewardConfig"
    made = AutoModelForSequenceClassification if rewards else AutoModelForCausalLM
    trace = Path(folder) / "trace.json"
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        model = made.from_config(kind(**SIZES, **({"num_labels": 1} if rewards else {})))
        rows = prepared_rows(args, lengths) * 2
        trainer_on(model, args, rows, peft_config).train()
    profiler.export_chrome_trace(str(trace))
    events = json.loads(trace.read_text())["traceEvents"]
    return max(event["args"]["Total Allocated"] for event in events if event["name"] == "[memory]")


@pytest.mark.parametrize("case", CASES)
def test_the_trace_is_what_tensors_take(case, tmp_path):
    name, options, lengths, kind, peft_config = CASES[case]
    found = estimate(config_of(name, options, str(tmp_path)), kind(**SIZES), lengths=lengths, peft_config=peft_config)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        measured = pool.apply(allocated, (case, str(tmp_path)))
    assert found.tensor_bytes == pytest.approx(measured, rel=0.06)
