"""The adapters of a trace, on few layers, against those of the whole model that PEFT makes."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig

import lowtide
from lowtide.methods import METHODS
from lowtide.planner.allocators.replay import run_of
from lowtide.planner.answers.row_lengths import rows_of
from lowtide.planner.devices import device_named
from lowtide.planner.sharding.layout import byte_sum
from lowtide.planner.tracing.fake_run import FakeRun
from lowtide.planner.tracing.trace import Event
from tests.support.marks import slow_but

LAYERS = 7
DESCRIBED = LlamaConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=176,
    num_hidden_layers=LAYERS,
    num_attention_heads=4,
    num_key_value_heads=2,
)
LINEAR: dict[str, Any] = {"target_modules": "all-linear"}
QUERIES: dict[str, Any] = {"target_modules": ["q_proj"]}
ADAPTERS: dict[str, tuple[dict[str, Any], bool]] = {
    "all-linear": (LINEAR, True),
    "explicit names": ({"target_modules": ["q_proj", "down_proj"]}, True),
    "one layer's name": ({"target_modules": ["model.layers.5.self_attn.q_proj"]}, False),
    "layers_to_transform": ({**QUERIES, "layers_to_transform": [1, 5]}, False),
    "layers_pattern": ({**QUERIES, "layers_to_transform": [6], "layers_pattern": "layers"}, False),
    "rank_pattern": ({**LINEAR, "rank_pattern": {"layers.5.mlp.up_proj": 64}}, False),
    "rank_pattern of all layers": ({**LINEAR, "rank_pattern": {"up_proj": 64}}, True),
    "exclude_modules": ({**LINEAR, "exclude_modules": r".*layers\.[56]\..*"}, False),
    "exclude_modules of all layers": ({**LINEAR, "exclude_modules": ["down_proj"]}, True),
    "modules_to_save": ({**QUERIES, "modules_to_save": ["lm_head", "embed_tokens"]}, True),
}
"""By case: the configuration, and whether few layers stand for all."""


def fake_run(folder: Any, adapters: dict[str, Any], **options: Any) -> FakeRun:
    args = lowtide.SFTConfig(output_dir=str(folder), use_cpu=True, report_to="none", rehearsal=False, **options)
    rows = Dataset.from_list(rows_of([24] * 8))
    config = LoraConfig(task_type="CAUSAL_LM", r=4, **adapters)
    return FakeRun(METHODS["sft"], args, DESCRIBED, rows, peft_config=config, prepared=True)


def most_by_category(events: list[Event]) -> Counter[str]:
    """The most bytes of each category at a time; an optimizer's counts of steps left out."""
    live: Counter[str] = Counter()
    most: Counter[str] = Counter()
    for block, born, *_ in events:
        if block is not None and block.size > 4:
            live[block.category] += block.size if born else -block.size
            most |= live
    return most


@pytest.mark.slow
@pytest.mark.parametrize("case", slow_but([*ADAPTERS][:1], ADAPTERS))
def test_weights_gradients_and_states_are_those_of_the_whole_model(case, tmp_path):
    adapters, alike = ADAPTERS[case]
    with torch.device("meta"):
        base = AutoModelForCausalLM.from_config(copy.deepcopy(DESCRIBED))  # PEFT writes into it
        real = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", r=4, **adapters))
    tensors = [*real.parameters(), *real.buffers()]
    trained = sum(p.numel() * 4 for p in real.parameters() if p.requires_grad)
    traced = fake_run(tmp_path, adapters).traced(device_named("cpu"))
    most = most_by_category(list(run_of(traced.events, rehearsal=False)))
    found = {name: most[name] for name in ("weights", "gradients", "optimizer")}
    assert found == {
        "weights": sum(t.numel() * t.element_size() for t in tensors),
        "gradients": trained,
        "optimizer": 2 * trained,
    }
    assert bool(traced.notes) is not alike


def test_what_ranks_share_has_the_adapters_too(tmp_path):
    layout = fake_run(tmp_path, LINEAR).layout()
    with torch.device("meta"):
        base = AutoModelForCausalLM.from_config(DESCRIBED)
        real = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", r=4, **LINEAR))
    assert byte_sum(layout.trained) == sum(p.numel() * 4 for p in real.parameters() if p.requires_grad)
    assert byte_sum(layout.parameters) == sum(p.numel() * 4 for p in real.parameters())


@pytest.mark.slow
def test_adapters_of_experts_make_no_second_stack_of_weights(tmp_path):
    described = Qwen3MoeConfig(
        vocab_size=256,
        hidden_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        moe_intermediate_size=64,
        num_experts=16,
        num_experts_per_tok=2,
    )
    stack = 16 * (2 * 64) * described.hidden_size * 4
    with mock.patch.dict(globals(), DESCRIBED=described):
        run = fake_run(tmp_path, {"target_modules": "all-linear-experts"}, per_device_train_batch_size=4)
    events = list(run_of(run.traced(device_named("cpu")).events, rehearsal=False))
    sizes = [block.size for block, *_ in events if block is not None and block.category != "weights"]
    assert max(block.size for block, *_ in events if block is not None) == stack
    assert max(sizes) < stack / 2


def test_adapters_without_a_place_in_the_model_are_refused(tmp_path):
    with pytest.raises(ValueError, match="not found in the base model"):
        fake_run(tmp_path, {"target_modules": ["c_attn"]}).traced(device_named("cpu"))
