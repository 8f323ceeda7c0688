"""What a plan for a GPU knows to be in host memory, and no more on the device."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from peft import LoraConfig
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

import lowtide
from lowtide.memory.optimizers.host_states import HostStates
from lowtide.planner.estimate import Estimate
from lowtide.planning import estimate
from lowtide.step.rehearsal import reserved_for_states
from lowtide.step.runner import StepRunner
from lowtide.step.updaters.updater import Updater

SIZES: dict[str, Any] = {
    "vocab_size": 8_000,
    "hidden_size": 192,
    "intermediate_size": 768,
    "num_hidden_layers": 8,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
}
ROWS, TOKENS = 4, 500


def predicted(
    folder: Path, kind: str = "SFT", peft_config: Any = None, beside: str = "cpu", **options: Any
) -> Estimate:
    """An estimate for a GPU, where the config finds the device `beside` on this machine."""
    args = getattr(lowtide, f"{kind}Config")(
        str(folder), use_cpu=True, bf16=False, report_to="none", per_device_train_batch_size=ROWS, **options
    )
    vars(args)["_setup_devices"] = torch.device(beside)
    lengths = [(100, 200, 200) if kind == "DPO" else TOKENS] * ROWS
    return estimate(args, LlamaConfig(**SIZES), lengths=lengths, device="H100-80GB", peft_config=peft_config)


def sizes() -> list[int]:
    """Bytes of each parameter."""
    return [p.nbytes for p in AutoModelForCausalLM.from_config(LlamaConfig(**SIZES)).parameters()]


def power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()


def copied(found: Estimate) -> int:
    """What the rows of a step take on the host while they are copied to the device."""
    return power_of_two(found.phases["backward"]["rows"])


@pytest.mark.slow
def test_the_rows_of_a_step_lie_on_the_device_and_are_copied_from_the_host(tmp_path):
    few, many = (predicted(tmp_path, gradient_accumulation_steps=steps) for steps in (1, 8))
    # ids and places of tokens, and of scores the place, the target and the segment, 8 bytes each; the row of a segment
    of_a_row = 8 * (2 * TOKENS + 3 * (TOKENS - 1) + 1)
    assert few.phases["backward"]["rows"] == ROWS * of_a_row
    assert many.phases["backward"]["rows"] == 8 * ROWS * of_a_row
    assert many.host_bytes == power_of_two(8 * ROWS * of_a_row) == copied(many)


@pytest.mark.slow
def test_an_optimizers_states_leave_the_device(tmp_path):
    plain, away = predicted(tmp_path), predicted(tmp_path, optimizer_states_on_host=True)
    assert plain.host_bytes == copied(plain)
    assert plain.phases["backward"]["optimizer"] >= 2 * sum(sizes())
    assert away.phases["backward"].get("optimizer", 0) < 1_000  # the counts of steps
    assert away.host_bytes == 2 * sum(map(power_of_two, sizes())) + copied(away)
    assert away.peak_bytes < plain.peak_bytes - sum(sizes())
    assert away.tokens_per_second < plain.tokens_per_second


@pytest.mark.parametrize("fused", [False, True])
def test_offloaded_activations_are_the_inputs_of_layers(tmp_path, fused):
    found = predicted(tmp_path, activation_offloading=True, fused_layers=fused)
    each = power_of_two(ROWS * TOKENS * SIZES["hidden_size"] * 4)
    rotary = 2 * power_of_two(ROWS * TOKENS * 32 * 4) if fused else 0  # cosines and sines, once for all layers
    assert (found.host_bytes - rotary) % each == 0
    assert 0 <= found.host_bytes // each - SIZES["num_hidden_layers"] <= 2  # and what comes before and after them


@pytest.mark.slow
def test_keys_of_rows_in_pieces_and_their_gradients_wait_on_the_host(tmp_path):
    here, away = (predicted(tmp_path, tokens_per_microbatch=TOKENS // 2, chain_storage=at) for at in ("device", "host"))
    of_a_piece = power_of_two(TOKENS // 2 * SIZES["num_key_value_heads"] * 32 * 4)
    assert here.host_bytes == copied(here)
    assert away.host_bytes == SIZES["num_hidden_layers"] * 4 * of_a_piece  # the first piece's alone: none reads others
    assert here.phases["backward"]["keys"] > of_a_piece
    assert not away.phases["backward"].get("keys")
    assert away.peak_bytes <= here.peak_bytes


@pytest.mark.slow
@pytest.mark.parametrize("technique", ["activation_offloading", "optimizer_states_on_host"])
def test_beside_a_gpu_the_same_is_predicted(tmp_path, technique):
    here, there = (predicted(tmp_path, beside=device, **{technique: True}) for device in ("cpu", "cuda:0"))
    assert there.host_bytes == here.host_bytes > copied(here)
    assert there.phases == here.phases


@pytest.mark.slow
def test_what_a_policy_keeps_of_layers_is_offloaded_too(tmp_path):
    inputs = predicted(tmp_path, activation_offloading=True)
    found = predicted(tmp_path, activation_offloading=True, checkpointing_policy="matmul")
    inner = ROWS * TOKENS * SIZES["intermediate_size"] * 4
    gates_and_what_they_gate = 2 * SIZES["num_hidden_layers"] * power_of_two(inner)
    assert found.host_bytes - inputs.host_bytes > gates_and_what_they_gate
    # on the device it is in backward alone, of one layer
    assert found.peak_bytes - inputs.peak_bytes < 2 * inner


@pytest.mark.slow
def test_a_reference_is_brought_a_module_at_a_time(tmp_path):
    same, away = predicted(tmp_path, "DPO"), predicted(tmp_path, "DPO", ref_model_storage="cpu")
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES))
    layers = sum(p.nbytes for p in model.model.layers.parameters())
    assert away.host_bytes == layers + copied(away)
    whole, rest = same.phases["backward"]["reference"], away.phases["backward"]["reference"]
    assert whole - rest == layers
    assert away.peak_bytes < same.peak_bytes


@pytest.mark.slow
def test_a_reference_in_four_bits(tmp_path):
    same, small = predicted(tmp_path, "DPO"), predicted(tmp_path, "DPO", ref_model_storage="4bit")
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES))
    weights = [m.weight for m in model.model.layers.modules() if isinstance(m, nn.Linear)]
    saved = sum(w.nbytes - w.numel() // 2 - 4 * -(-w.numel() // 64) for w in weights)
    assert same.phases["backward"]["reference"] - small.phases["backward"]["reference"] == saved


@pytest.mark.slow
def test_new_adapters_are_not_said_to_be_trained(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        predicted(tmp_path, "DPO", LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM"))
    assert "trained already" not in caplog.text


def test_a_rehearsal_holds_no_room_for_states_in_host_memory():

    model = nn.Linear(4, 4)
    optimizer: Any = torch.optim.AdamW(model.parameters())
    runner = StepRunner(model, cast(Any, None), updater=Updater(optimizer))
    runner.optimizer_name = "adamw_torch"
    assert sum(piece.nbytes for piece in reserved_for_states(runner)) == 2 * 4 * 20
    optimizer.host_states = HostStates(optimizer)
    assert reserved_for_states(runner) == []
