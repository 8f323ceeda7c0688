"""What to change first: only what is possible, not on yet, and lowers what dominates; exact settings first."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import nn

from lowtide import DPOConfig, SFTConfig
from lowtide.memory.options import MemoryOptions
from lowtide.memory.table import TECHNIQUES
from lowtide.memory.technique import Site
from lowtide.planner.advice import advise, with_settings
from lowtide.planner.profiling.recording import CATEGORIES

ROWS = (400, 300, 200, 100)


def site(config: type = SFTConfig, *, adapters: bool = False, **options: Any) -> Site:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].requires_grad_(not adapters)
    return Site(config("run", use_cpu=True, report_to="none", **options), model, torch.device("cpu"))


def named(where: Site, rows: tuple[int, ...] = ROWS, each: int = 9, **bytes: int) -> dict[str, dict[str, Any]]:
    return {advice.name: dict(advice.settings) for advice in advise(where, bytes, rows, each=each)}


def test_the_table_names_categories_of_a_profile():
    assert {category for each in TECHNIQUES.values() for category in each.lowers} <= set(CATEGORIES)


def test_activations_are_lowered_by_what_is_not_on_yet():
    found = named(site(), activations=9, weights=1)
    assert next(iter(found.items())) == ("activation offloading", {"activation_offloading": True})
    assert found["token budget"] == {"tokens_per_microbatch": 500}
    assert found["tiled MLP"] == {"mlp_tile_tokens": 125}
    assert "gradient checkpointing" not in found
    assert "liger kernels" not in found  # which are a GPU's
    without = named(site(gradient_checkpointing=False), activations=9)
    assert next(iter(without)) == "gradient checkpointing"


def test_a_budget_has_room_for_the_longest_row_and_one_row_cannot_be_cut():
    assert named(site(), (700, 100), activations=1)["token budget"] == {"tokens_per_microbatch": 700}
    assert "token budget" not in named(site(), (700,), activations=1)


def test_clipping_is_not_switched_off_and_steps_of_several_micro_batches_keep_their_gradients():
    assert "optimizer in backward" not in named(site(), gradients=1)
    assert "optimizer in backward, two passes" in named(site(), gradients=1)
    assert "optimizer in backward" in named(site(max_grad_norm=0.0), gradients=1)
    assert "optimizer in backward, two passes" not in named(site(gradient_accumulation_steps=2), gradients=1)


def test_adapters_and_bfloat16_weights_are_for_models_that_are_trained_whole():
    assert {"adapters", "compressed AdamW"} <= set(named(site(), gradients=1))
    assert not {"adapters", "compressed AdamW"} & set(named(site(adapters=True), gradients=1))


def test_a_reference_can_be_computed_before():
    assert named(site(DPOConfig), reference=9) == {"precomputed reference": {"precompute_ref_log_probs": True}}
    assert named(site(DPOConfig, precompute_ref_log_probs=True), reference=9) == {}


def test_small_categories_are_left_alone_and_the_largest_comes_first():
    found = advise(site(), {"weights": 50, "activations": 45, "gradients": 5}, ROWS)
    assert [each.category for each in found] == ["weights", "weights", "activations", "activations"]


def test_with_predictions_the_best_exact_setting_comes_first_and_what_lowers_nothing_is_left_out():
    peaks = {
        (): 100,
        ("activation_offloading",): 98,
        ("mlp_tile_tokens",): 90,
        ("attention_head_chunks",): 98,
        ("tokens_per_microbatch",): 70,
        ("torch_compile",): None,
    }

    def predict(changes) -> list[int | None]:
        return [peaks.get(tuple(settings), 10) for settings in changes]

    found = advise(site(), {"activations": 9}, ROWS, predict, each=9)
    assert [(each.name, each.peak_bytes) for each in found] == [
        ("token budget", 70), ("tiled MLP", 90), ("compiled layers", None), ("bfloat16 mixed precision", 10),
    ]  # fmt: skip


def test_the_largest_category_comes_first_whatever_a_smaller_ones_settings_would_save():
    peaks = {(): 100, ("mlp_tile_tokens",): 50, ("tokens_per_microbatch",): 99}

    def predict(changes) -> list[int | None]:
        return [peaks.get(tuple(settings), 90) for settings in changes]

    found = advise(site(bf16=False), {"head": 80, "activations": 20}, ROWS, predict, each=9)
    assert [(each.category, each.name, each.peak_bytes) for each in found[:2]] == [
        ("head", "bfloat16 mixed precision", 90), ("activations", "tiled MLP", 50),
    ]  # fmt: skip


def test_settings_that_contradict_each_other_are_refused():
    options = site().options
    assert with_settings(options, {"mlp_tile_tokens": 4}).mlp_tile_tokens == 4
    assert options.mlp_tile_tokens is None
    with pytest.raises(ValueError, match="max_grad_norm"):
        with_settings(options, {"optimizer_in_backward": True})
    assert {"mlp_tile_tokens", "optimizer_in_backward"} <= {field.name for field in fields(MemoryOptions)}
