"""Every family that transformers lists as causal language models: a step of SFT has the loss and the gradients of the
family's own forward on each row alone, or the family is refused by a message that names it.

Rows alone have no padding, so families that run padded, such as recurrent ones, show that padding changes nothing."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import Tensor

from lowtide import SFTConfig, SFTTrainer
from tests.support.marks import slow_but
from tests.support.models.causal_families import LISTED, REFUSED, UNTRIED, tiny_causal

LENGTHS = (9, 17, 5, 70)
"""Of rows: shorter and longer than windows, and than what an indexer chooses."""
TRAINED = [kind for kind in LISTED if kind not in {**REFUSED, **UNTRIED}]
TYPICAL = ("bert", "electra", "inkling_text", "mllama", "moshi", "recurrent_gemma", "rembert", "roberta", "xlstm")
LOSS, GRADIENT = 1e-4, 2e-3
"""Largest relative differences; a gradient's is of the parameter's norm, or of a hundredth of the largest one."""


def rows() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(5, 94, (length,), generator=generator).tolist() for length in LENGTHS]


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


def trainer_of(model: Any, data: list[list[int]], folder: Any) -> SFTTrainer:
    """Of one step of plain SGD with a learning rate of 1, so that weights move by their gradients."""
    routed = hasattr(model.config.get_text_config(), "output_router_logits")
    aux: dict[str, Any] = {"router_aux_loss_coef": 0.0} if routed else {}
    config = SFTConfig(
        output_dir=str(folder),
        per_device_train_batch_size=len(data),
        max_steps=1,
        learning_rate=1.0,
        lr_scheduler_type="constant",
        optim="sgd",
        weight_decay=0.0,
        max_grad_norm=0.0,
        bf16=False,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        logging_steps=1,
        gradient_checkpointing=False,
        dataset_kwargs={"skip_prepare_dataset": True},
        **aux,
    )
    return SFTTrainer(model, config, train_dataset=Dataset.from_dict({"input_ids": data, "labels": data}))


@pytest.mark.parametrize("kind", slow_but(TYPICAL, TRAINED))
def test_a_step_is_the_one_of_the_familys_own_forward(kind: str, tmp_path: Any) -> None:
    model, data = tiny_causal(kind), rows()
    wanted, gradients = own_step(model, data)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    trainer = trainer_of(model, data, tmp_path)
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


def test_families_that_are_named_are_listed() -> None:
    assert {*REFUSED, *UNTRIED} <= {*LISTED}
    assert not {*REFUSED} & {*UNTRIED}
