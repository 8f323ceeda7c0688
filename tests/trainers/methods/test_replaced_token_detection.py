"""Replaced-token detection: the plain padded computation, what does not change its numbers, resuming, saving."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForPreTraining, ElectraConfig, ElectraForMaskedLM

from lowtide import ReplacedTokenDetectionConfig, ReplacedTokenDetectionTrainer
from lowtide.step.cut import split
from lowtide.step_plan import Limits
from tests.support.marks import slow_but
from tests.support.models.masked_texts import COMMON, SIZES, losses, texts, tokenizer
from tests.support.models.replaced_tokens import (
    NO_GRADIENT,
    ROWS,
    assert_near,
    build,
    make,
    plain_loss,
    run,
    sharpened,
    weights,
)

SAME: dict[str, dict[str, Any]] = {
    "padded": {"padding_free": False},
    "one row at a time": {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8},
    "token budget": {"tokens_per_microbatch": 60},
    "checkpointed": {"gradient_checkpointing": True},
    "offloaded": {"gradient_checkpointing": True, "activation_offloading": True},
    "stepped in backward": {"optimizer_in_backward": "two_pass"},
}


@pytest.mark.parametrize("shared", [True, False])
def test_the_loss_and_its_gradients_are_those_of_the_plain_padded_computation(shared: bool, tmp_path: Path):
    trainer = make(tmp_path, texts(ROWS), share_embeddings=shared, mlm_probability=0.4)
    model = trainer.model.train()
    batch = trainer.drawn(trainer.data_collator([trainer.train_dataset[row] for row in range(9)]), 0)
    found = trainer.runner.gradients(batch)
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    expected = plain_loss(model, batch)
    expected.backward()
    torch.testing.assert_close(found, expected.detach(), rtol=1e-5, atol=1e-6)
    assert any("generator" in name for name in gradients)
    for name, p in model.named_parameters():
        if name.endswith(NO_GRADIENT):
            continue
        scale = p.grad.abs().max() + 1e-5
        assert (gradients[name] - p.grad).abs().max() <= 1e-4 * scale, name


def test_a_row_in_which_nothing_is_masked_counts_for_the_discriminator(tmp_path: Path):
    trainer = make(tmp_path, texts(ROWS), mlm_probability=0.05, per_device_train_batch_size=1)
    batch = trainer.drawn(trainer.data_collator([trainer.train_dataset[row] for row in range(9)]), 0)
    assert min(part.scores for part in split(batch, Limits(rows=1))) == 0 < batch.scores
    found = trainer.runner.gradients(batch)
    torch.testing.assert_close(found, plain_loss(trainer.model, batch).detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_but(["padded"], SAME))
def test_how_a_step_is_run_changes_no_number(name: str, tmp_path: Path):
    one, other = run(tmp_path / "a", **SAME[name]), run(tmp_path / "b")
    torch.testing.assert_close(losses(one), losses(other), rtol=1e-5, atol=0.0)
    assert_near(weights(one), weights(other))


@pytest.mark.slow
def test_a_run_resumed_in_the_middle_of_an_epoch_goes_on_bit_by_bit(tmp_path: Path):
    settings = {"max_steps": 6, "per_device_train_batch_size": 3, "save_strategy": "steps", "save_steps": 2}
    whole = make(tmp_path / "whole", texts(ROWS), **settings)
    whole.train()
    resumed = make(tmp_path / "whole", texts(ROWS), **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    expected = weights(whole)
    assert all(torch.equal(p, expected[name]) for name, p in weights(resumed).items())


def test_what_is_saved_is_the_discriminator_and_goes_on_with_its_generator(tmp_path: Path):
    trainer = run(tmp_path / "run", max_steps=2)
    trainer.save_model(str(tmp_path / "saved"))
    tokenizer().save_pretrained(tmp_path / "saved")
    plain = AutoModelForPreTraining.from_pretrained(tmp_path / "saved")
    trained = trainer.model.state_dict()
    assert all(torch.equal(value, trained[name]) for name, value in plain.state_dict().items())
    again = ReplacedTokenDetectionTrainer(
        model=str(tmp_path / "saved"),
        args=ReplacedTokenDetectionConfig(output_dir=str(tmp_path / "again"), **COMMON),
        train_dataset=texts(4),
    )
    assert weights(again).keys() == weights(trainer).keys()
    assert all(torch.equal(value, trained[name]) for name, value in again.model.state_dict().items())


@pytest.mark.slow
def test_it_learns_to_tell_tokens_apart(tmp_path: Path):
    trainer = run(tmp_path, max_steps=40, learning_rate=1e-2, mlm_probability=0.3, discriminator_weight=10.0)
    first, last = trainer.state.log_history[0], trainer.state.log_history[-2]
    names = {"generator_loss", "discriminator_loss", "discriminator_accuracy", "generator_accuracy"}
    assert names <= first.keys()
    assert last["generator_loss"] < 0.9 * first["generator_loss"]
    assert last["loss"] < first["loss"]


def test_the_generator_may_be_named(tmp_path: Path):
    config = ElectraConfig(**{**SIZES, "hidden_size": 16, "embedding_size": 16, "vocab_size": len(tokenizer())})
    torch.manual_seed(3)
    named = sharpened(ElectraForMaskedLM(config))
    named.save_pretrained(tmp_path / "generator")
    options = {"generator_model_name_or_path": str(tmp_path / "generator"), "generator_size": None}
    args = ReplacedTokenDetectionConfig(output_dir=str(tmp_path), **COMMON, **options)
    trainer = ReplacedTokenDetectionTrainer(build(), args, train_dataset=texts(4), processing_class=tokenizer())
    generator, expected = trainer.model.generator, named.electra.encoder.state_dict()
    found = generator.electra.encoder.state_dict()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert generator.electra.embeddings is trainer.model.electra.embeddings


def test_a_generator_that_there_is_not_is_said_by_its_option(tmp_path: Path):
    with pytest.raises(ValueError, match=r"generator_model_name_or_path='/no/such' cannot be loaded: "):
        make(tmp_path, texts(4), generator_model_name_or_path="/no/such", generator_size=None)


def test_a_generator_wider_than_the_discriminator_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="generator_size"):
        make(tmp_path, texts(4), generator_size=2.0)


def test_labels_are_refused(tmp_path: Path):
    rows = Dataset.from_list([{"input_ids": [5, 6, 7], "labels": [-100, 6, -100]}])
    with pytest.raises(ValueError, match="leave 'labels' out"):
        make(tmp_path, rows)
