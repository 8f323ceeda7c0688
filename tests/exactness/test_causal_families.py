"""Every family that transformers lists as causal language models: a step of SFT has the loss and the gradients of the
family's own forward on each row alone, or the family is refused by a message that names it.

Rows alone have no padding, so families that run padded, such as recurrent ones, show that padding changes nothing."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.marks import slow_but
from tests.support.matrix.family_page import layout_of, row_of, row_without_training, rows, rows_of_page, trainer_of
from tests.support.models.causal_families import LISTED, REFUSED, TRAINED, UNTRIED, tiny_causal

TYPICAL = ("bert", "electra", "inkling_text", "mllama", "moshi", "recurrent_gemma", "rembert", "roberta", "xlstm")
STALE = "docs/families.md is stale: `python -m tests.exactness --families` writes it anew"
SHOWN = ("bamba", "gemma2", "gpt_oss", "llama", "mamba", "mpt")
"""Those whose whole row is no part of the sweep alone."""
LOSS, GRADIENT = 1e-4, 2e-3
"""Largest relative differences; a gradient's is of the parameter's norm, or of a hundredth of the largest one."""


def own_step(model: Any, data: list[list[int]]) -> tuple[float, dict[str, Tensor]]:
    """The mean loss of all tokens and its gradients, by the model's own forward, row by row."""
    total, tokens = 0.0, sum(len(row) - 1 for row in data)
    for row in data:
        ids = torch.tensor([row])
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits[0, :-1].float()
        loss = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum") / tokens
        loss.backward()
        total += loss.item()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return total, gradients


@pytest.mark.parametrize("kind", slow_but(TYPICAL, TRAINED))
def test_a_step_is_the_one_of_the_familys_own_forward(kind: str, tmp_path: Any) -> None:
    model, data = tiny_causal(kind), rows()
    wanted, gradients = own_step(model, data)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    trainer = trainer_of(model, data, tmp_path)
    if rows_of_page():
        assert rows_of_page()[kind][:3] == layout_of(trainer)[:3], STALE
    trainer.train()
    loss = next(entry["loss"] for entry in trainer.state.log_history if "loss" in entry)
    assert loss == pytest.approx(wanted, rel=LOSS)
    floor = max(float(gradient.norm()) for gradient in gradients.values()) / 100
    for name, p in trainer.model.named_parameters():
        own = gradients.get(name, torch.zeros_like(p))
        error = float((before[name] - p.detach() - own).norm()) / max(float(own.norm()), floor)
        assert error < GRADIENT, f"{name} moves by other gradients (relative error {error:.1e})"


@pytest.mark.parametrize("kind", REFUSED)
def test_a_family_that_would_have_other_numbers_is_refused(kind: str, tmp_path: Any) -> None:
    with pytest.raises(ValueError, match=REFUSED[kind]) as caught:
        trainer_of(tiny_causal(kind), rows(), tmp_path).train()
    message = str(caught.value)
    assert "\n" not in message
    assert re.search(rf"\b{re.escape(kind)}\b|{type(tiny_causal(kind)).__name__}", message), message


@pytest.mark.parametrize("kind", UNTRIED)
def test_what_keeps_a_family_from_being_tried_is_still_true(kind: str) -> None:
    with pytest.raises(Exception, match=UNTRIED[kind]):
        own_step(tiny_causal(kind), rows())


OF_THIS_VERSION = pytest.mark.skipif(not rows_of_page(), reason="the page is of another version of transformers")


@OF_THIS_VERSION
@pytest.mark.parametrize("kind", slow_but(["llama", "mamba"], TRAINED, swept=[k for k in TRAINED if k not in SHOWN]))
def test_the_page_says_what_a_family_does(kind: str, tmp_path: Any) -> None:
    assert rows_of_page()[kind] == row_of(trainer_of(tiny_causal(kind), rows(), tmp_path)), STALE


@OF_THIS_VERSION
def test_the_page_has_a_row_of_each_family() -> None:
    assert rows_of_page().keys() == {*LISTED}, STALE
    for kind in (*REFUSED, *UNTRIED):
        assert rows_of_page()[kind] == row_without_training(kind), STALE


def test_families_that_are_named_are_listed() -> None:
    assert {*REFUSED, *UNTRIED} <= {*LISTED}
    assert not {*REFUSED} & {*UNTRIED}
