"""What a run holds before its first forward: counted by hand from weights, adapters and states, beside the trace."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import LlamaConfig

import lowtide
from lowtide.memory.optimizers.compressed_adamw import CompressedAdamW
from lowtide.planner.allocators.replay import peaks, start_of
from lowtide.planner.answers.row_lengths import rows_of
from lowtide.planner.devices import device_named
from lowtide.planner.estimate import estimate_run
from lowtide.planner.tracing.fake_run import FakeRun
from lowtide.ranks.sharding import Sharding
from lowtide.run.options.configs import method_of

LORA = LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
CPU = device_named("cpu")
MODELS = {
    "untied": {"tie_word_embeddings": False},
    "tied": {"tie_word_embeddings": True},
    "tied, of many layers": {"tie_word_embeddings": True, "num_hidden_layers": 24},  # of which some are traced
}


def described(*, tie_word_embeddings: bool = False, num_hidden_layers: int = 2) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=1_000,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=num_hidden_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tie_word_embeddings,
    )


def run_of(
    tmp_path,
    name: str = "SFTConfig",
    lengths: Any = (40, 30),
    adapters: Any = None,
    model: Any = MODELS["untied"],
    **options: Any,
) -> FakeRun:
    config = getattr(lowtide, name)(output_dir=str(tmp_path), use_cpu=True, report_to="none", **options)
    rows = Dataset.from_list(rows_of(lengths))
    return FakeRun(method_of(config), config, described(**model), rows, peft_config=adapters, prepared=True)


def start_bytes(run: FakeRun) -> int:
    """The most that tensors hold before the first forward."""
    return max(sum(held.values()) for held in peaks(start_of(run.traced(CPU).events)).values())


def weights(run: FakeRun) -> int:
    return sum(p.nbytes for p in run.model.on_meta(run.model.layers).parameters())


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize(
    ("adapters", "options"),
    [(None, {}), (LORA, {"model_init_kwargs": {"dtype": "bfloat16"}})],
    ids=["float32", "adapters over bfloat16"],
)
def test_a_start_holds_the_weights_and_the_adapters(tmp_path, adapters, options, model):
    run = run_of(tmp_path, adapters=adapters, model=model, **options)
    assert weights(run) <= start_bytes(run) <= 1.02 * weights(run)  # buffers, such as rotary tables, come on top


@pytest.mark.slow
@pytest.mark.parametrize("shape", MODELS.values(), ids=MODELS)
def test_masters_that_are_split_leave_their_files_one_by_one(tmp_path, shape):
    """A weight is there in float32 and in the form that it gets, and all others in one of the two."""
    run = run_of(tmp_path, optim="adamw_flash", model=shape)
    model: Any = run.model.on_meta(run.model.layers).to_empty(device="cpu")
    model.tie_weights()  # which emptying undoes
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    optimizer = CompressedAdamW(model.parameters(), remainder="8bit", moment_bits=8)
    least = most = live = sum(p.nbytes for p in model.parameters())
    for parameter in model.parameters():
        master, passing = parameter.nbytes, 16 * parameter.numel()  # numbers that are split, of a block of a weight
        optimizer.compress_([parameter])
        made = [parameter, *(each for each in optimizer.state[parameter].values() if isinstance(each, torch.Tensor))]
        live += sum(each.nbytes for each in made)
        least, most = max(least, live), max(most, live + passing)
        live -= master
    assert least <= start_bytes(run) <= most


@pytest.mark.slow
def test_a_reference_beside_split_masters_is_never_in_float32(tmp_path):
    alone = start_bytes(run_of(tmp_path, optim="adamw_flash"))
    both = start_bytes(run_of(tmp_path, "DPOConfig", [(10, 20, 20)] * 2, optim="adamw_flash"))
    bfloat16 = weights(run_of(tmp_path)) // 2
    assert both - alone <= 1.02 * bfloat16


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "lengths", "adapters", "options"),
    [
        ("SFTConfig", (40, 30), None, {}),
        ("SFTConfig", (40, 30), LORA, {"model_init_kwargs": {"dtype": "bfloat16"}}),
        ("DPOConfig", [(10, 20, 20)] * 2, None, {"optim": "adamw_flash"}),
    ],
)
def test_a_start_is_predicted_and_never_above_the_peak(tmp_path, name, lengths, adapters, options):
    run = run_of(tmp_path, name, lengths, adapters, **options)
    found = estimate_run(run, CPU, beside=0)
    assert start_bytes(run) <= found.start_bytes <= 1.2 * start_bytes(run)  # whole pages, and no workspaces yet
    assert found.start_bytes <= found.peak_bytes
    assert found.to_dict()["start_bytes"] == found.start_bytes
    assert estimate_run(run, CPU, beside=1000).start_bytes == found.start_bytes + 1000


@pytest.mark.slow
def test_each_of_equal_copies_starts_as_one_device_does(tmp_path):
    run = run_of(tmp_path, optim="adamw_flash")
    two = Sharding.read("ddp", devices=2)
    assert estimate_run(run, CPU, sharding=two, beside=0).start_bytes == estimate_run(run, CPU, beside=0).start_bytes
