"""Layers of several kinds in turn: a turn counts as one layer where its layers differ."""

from __future__ import annotations

import pytest
import torch
from datasets import Dataset
from transformers import AutoConfig

import lowtide
from lowtide.methods import METHODS
from lowtide.planner.allocators.replay import peaks, run_of
from lowtide.planner.answers.row_lengths import rows_of
from lowtide.planner.devices import device_named
from lowtide.planner.tracing.described_model import DescribedModel
from lowtide.planner.tracing.fake_run import FakeRun

KINDS = {"qwen2": 1, "gpt_oss": 2, "gemma3_text": 6}


@pytest.mark.parametrize("name", KINDS)
def test_kinds_of_layers_repeat_after_some(name):
    described = AutoConfig.for_model(name, num_hidden_layers=14)
    assert DescribedModel(described, torch.float32).kinds == KINDS[name]


@pytest.mark.slow
def test_layers_of_two_kinds_in_turn_are_traced_as_one():
    """gpt-oss alternates between windows and the whole row."""
    described = AutoConfig.for_model(
        "gpt_oss", vocab_size=256, hidden_size=64, intermediate_size=64, num_hidden_layers=14, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=16,
    )  # fmt: skip
    args = lowtide.SFTConfig(output_dir="run", use_cpu=True, report_to="none", bf16=True, gradient_checkpointing=False)
    rows = Dataset.from_list(rows_of([64] * 2))
    device, run = device_named("H100-80GB"), FakeRun(METHODS["sft"], args, described, rows, prepared=True)
    few, every = run.traced(device), run.traced_layers(14, device)
    assert few.notes == ()
    found, wanted = (peaks(run_of(each.events, rehearsal=False)) for each in (few, every))
    assert found.keys() == wanted.keys()
    for phase, held in wanted.items():
        assert sum(found[phase].values()) == pytest.approx(sum(held.values()), rel=1e-3), phase
    assert few.costs["layers"].dispatched.total() == every.costs["layers"].dispatched.total()
