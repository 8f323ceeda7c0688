"""The weight of the load-balancing loss: an option that is neutral or left out refuses no run, on any family."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from lowtide.engine.forward import install, score
from lowtide.ranks.sharding import Sharding
from lowtide.run.engine import router_coefficient
from tests.support.models.architectures import COMMON, RAGGED
from tests.support.models.architectures import build as build_known
from tests.support.models.tiny_models import separate

ALONE = Sharding.read(None, devices=1)
WITHOUT: dict[str, dict[str, Any]] = {"llama": {}, "doge": {}, "llama4_text": RAGGED["llama4"][1], "mimo_v2_flash": {}}
"""Families of which some have experts, and none a load-balancing loss that is known."""


def tiny(model_type: str, **more: Any) -> PreTrainedModel:
    config = AutoConfig.for_model(model_type, **{**COMMON, **WITHOUT.get(model_type, {}), **more})
    return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("name", WITHOUT)
def test_families_without_such_a_loss_train_unless_it_is_weighed(name: str):
    model = tiny(name, router_aux_loss_coef=0.5)
    assert router_coefficient(model, None, ALONE) == router_coefficient(model, 0.0, ALONE) == 0.0
    with pytest.raises(ValueError, match=f"router_aux_loss_coef=0.1 needs .* model type {name} has none: leave it out"):
        router_coefficient(model, 0.1, ALONE)


def test_routers_of_another_form_are_refused():
    """Doge's product keys, whose loss transformers computes from other numbers."""
    model = tiny("doge", is_moe=True, num_experts=16)
    assert router_coefficient(model, None, ALONE) == 0.0
    with pytest.raises(ValueError, match="model type doge has none"):
        router_coefficient(model, 0.1, ALONE)


def test_the_coefficient_of_the_config_counts_where_none_is_given():
    model = build_known("mixtral", router_aux_loss_coef=0.25)
    assert router_coefficient(model, None, ALONE) == 0.25
    assert router_coefficient(model, 0.1, ALONE) == 0.1
    assert router_coefficient(model, 0.0, ALONE) == 0.0


def test_stages_leave_out_what_nobody_asked_for(caplog: pytest.LogCaptureFixture):
    model, stages = build_known("mixtral", router_aux_loss_coef=0.25), replace(ALONE, pipeline_parallel=2)
    with caplog.at_level(logging.WARNING):
        assert router_coefficient(model, None, stages) == 0.0
    assert "is left out: the model's config has router_aux_loss_coef=0.25" in caplog.text
    assert router_coefficient(tiny("llama"), 0.0, stages) == 0.0
    with pytest.raises(ValueError, match=r"router_aux_loss_coef=0\.1 weighs a loss of the experts of all layers"):
        router_coefficient(model, 0.1, stages)


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "gpt_oss", "granitemoe"])
def test_the_loss_is_that_of_transformers(name: str):
    """Of segments laid end to end and of the model's own forward over the same rows, one at a time as one batch."""
    model = build_known(name).eval()
    batch = separate()
    longest = max(part.length for part in batch.segments)
    ids = torch.zeros(len(batch.segments), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for line, part in enumerate(batch.segments):
        ids[line, : part.length] = batch.token_ids[part.start : part.stop]
        mask[line, : part.length] = 1
    wanted = model(input_ids=ids, attention_mask=mask, output_router_logits=True, use_cache=False).aux_loss
    install(model)
    torch.testing.assert_close(score(model, batch, aux_loss=True).aux_loss, wanted, atol=1e-5, rtol=1e-5)
