"""Replaced-token detection: the plain padded computation, what does not change its numbers, resuming, ranks, saving."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from datasets import Dataset
from peft import LoraConfig
from torch import nn
from transformers import AutoModelForPreTraining, ElectraConfig, ElectraForMaskedLM, ElectraForPreTraining

from lowtide import ReplacedTokenDetectionConfig, ReplacedTokenDetectionTrainer
from lowtide.data.batches.values import DRAW
from lowtide.ranks.sharding import Sharding
from tests.support.marks import slow_but
from tests.support.masked_texts import COMMON, PAD, SIZES, losses, texts, tokenizer
from tests.support.processes import run_ranks

ROWS = 22  # no multiple of the batch
PLAIN: dict[str, Any] = {"per_device_train_batch_size": 8, "max_steps": 5}
SAME: dict[str, dict[str, Any]] = {
    "padded": {"padding_free": False},
    "one row at a time": {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8},
    "token budget": {"tokens_per_microbatch": 60},
    "checkpointed": {"gradient_checkpointing": True},
    "offloaded": {"gradient_checkpointing": True, "activation_offloading": True},
    "stepped in backward": {"optimizer_in_backward": "two_pass"},
}
NO_GRADIENT = "key.bias"
"""It moves all scores of a query alike: its gradient is rounding, which the optimizer makes large."""


def build(**more: Any) -> ElectraForPreTraining:
    """Seeded weights, large enough for attention to be far from uniform."""
    torch.manual_seed(0)
    config = ElectraConfig(**{**SIZES, "embedding_size": 16, "vocab_size": len(tokenizer()), **more})
    return sharpened(ElectraForPreTraining(config))


def sharpened(model: Any) -> Any:
    for p in model.parameters():
        if p.ndim > 1:
            nn.init.normal_(p, std=0.1)
    return model


def make(folder: Any, rows: Dataset, **options: Any) -> ReplacedTokenDetectionTrainer:
    names = ("eval_dataset", "peft_config", "model")
    arguments = {"model": build(), "processing_class": tokenizer()}
    arguments |= {name: options.pop(name) for name in names if name in options}
    settings = {**COMMON, "generator_size": 0.5, **options}
    args = ReplacedTokenDetectionConfig(output_dir=str(folder), **settings)
    trainer = ReplacedTokenDetectionTrainer(args=args, train_dataset=rows, **arguments)
    torch.manual_seed(1)
    for name, p in trainer.model.generator.named_parameters():
        if p.ndim > 1 and "embeddings." not in name:
            nn.init.normal_(p, std=0.3)
    return trainer


def run(folder: Path, rows: int = ROWS, **options: Any) -> Any:
    trainer = make(folder, texts(rows), **{**PLAIN, **options})
    trainer.train()
    return trainer


def weights(trainer: Any) -> dict[str, torch.Tensor]:
    named = trainer.model.named_parameters()
    return {name: p.detach().clone() for name, p in named if not name.endswith(NO_GRADIENT)}


def assert_near(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, p in expected.items():
        assert (found[name] - p).norm() <= 1e-3 * p.norm() + 1e-4, name


def plain_loss(model: Any, batch: Any) -> torch.Tensor:
    """By transformers' own models, on padded rows with all logits."""
    spans = [(part.start, part.stop) for part in batch.segments]
    longest = max(stop - start for start, stop in spans)
    ids = torch.full((len(spans), longest), PAD)
    mask, place = torch.zeros_like(ids), torch.zeros(batch.tokens, dtype=torch.long)
    for line, (start, stop) in enumerate(spans):
        ids[line, : stop - start] = batch.token_ids[start:stop]
        mask[line, : stop - start] = 1
        place[start:stop] = line * longest + torch.arange(stop - start)
    masked = place[batch.score_index]
    logits = ElectraForMaskedLM.forward(model.generator, ids, attention_mask=mask).logits.flatten(0, 1)[masked]
    with torch.no_grad():
        sums = torch.softmax(logits, -1).double().cumsum(-1)
        drawn = torch.searchsorted(sums, batch.score_values[DRAW][:, None], right=True)[:, 0]
    text = ids.flatten().index_copy(0, masked, drawn).view_as(ids)
    labels = torch.zeros(ids.numel()).index_copy(0, masked, (drawn != batch.score_target).float()).view_as(ids)
    detected = ElectraForPreTraining.forward(model, text, attention_mask=mask, labels=labels)
    return F.cross_entropy(logits, batch.score_target) + 50 * detected.loss


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
    assert min(part.scores for part in batch.split(max_rows=1)) == 0 < batch.scores
    found = trainer.runner.gradients(batch)
    torch.testing.assert_close(found, plain_loss(trainer.model, batch).detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", slow_but(["padded", "one row at a time"], SAME))
def test_how_a_step_is_run_changes_no_number(name: str, tmp_path: Path):
    one, other = run(tmp_path / "a", **SAME[name]), run(tmp_path / "b")
    torch.testing.assert_close(losses(one), losses(other), rtol=1e-5, atol=0.0)
    assert_near(weights(one), weights(other))


def test_a_run_resumed_in_the_middle_of_an_epoch_goes_on_bit_by_bit(tmp_path: Path):
    settings = {"max_steps": 6, "per_device_train_batch_size": 3, "save_strategy": "steps", "save_steps": 2}
    whole = make(tmp_path / "whole", texts(ROWS), **settings)
    whole.train()
    resumed = make(tmp_path / "whole", texts(ROWS), **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    expected = weights(whole)
    assert all(torch.equal(p, expected[name]) for name, p in weights(resumed).items())


def rank_main(rank: int, folder: str) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1")
    from tests.support.sharded_training import rank_of

    with rank_of(Path(folder), rank, 2):
        trainer = run(Path(folder) / "out", 24, per_device_train_batch_size=4, eval_dataset=texts(9, seed=1))
        evaluated = trainer.evaluate()
        if rank == 0:
            torch.save((weights(trainer), losses(trainer), evaluated), Path(folder) / "found.pt")


@pytest.mark.slow
def test_two_ranks_learn_what_one_does(tmp_path: Path):
    from tests.support.sharded_training import meeting_place

    run_ranks(rank_main, str(meeting_place(tmp_path)))
    found, found_losses, evaluated = torch.load(tmp_path / "found.pt")
    alone = run(tmp_path / "alone", 24, eval_dataset=texts(9, seed=1))
    torch.testing.assert_close(found_losses, losses(alone), rtol=1e-5, atol=0.0)
    for name in ("eval_generator_loss", "eval_discriminator_loss"):
        assert evaluated[name] == pytest.approx(alone.evaluate()[name], rel=1e-4)
    assert_near(found, weights(alone))


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


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"peft_config": LoraConfig(target_modules=["query"])}, "leave peft_config out"),
        ({"generator_size": 2.0}, "generator_size"),
    ],
)
def test_what_is_refused(options: dict[str, Any], says: str, tmp_path: Path):
    with pytest.raises(ValueError, match=says):
        make(tmp_path, texts(4), **options)


def test_weights_are_not_cut(tmp_path: Path):
    sharded = mock.PropertyMock(return_value=Sharding(kind="fsdp2", devices=2))
    with (
        mock.patch.object(ReplacedTokenDetectionConfig, "sharding", sharded),
        pytest.raises(ValueError, match="leave fsdp and deepspeed out"),
    ):
        make(tmp_path, texts(4))


def test_labels_are_refused(tmp_path: Path):
    rows = Dataset.from_list([{"input_ids": [5, 6, 7], "labels": [-100, 6, -100]}])
    with pytest.raises(ValueError, match="leave 'labels' out"):
        make(tmp_path, rows)
