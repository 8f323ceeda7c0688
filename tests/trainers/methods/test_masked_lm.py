"""Masked language modelling in its trainer: what does not change its numbers, resuming, ranks, and what is refused."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, LlamaConfig

from lowtide import MaskedLMConfig
from lowtide.ragged import RaggedBatch
from tests.support.marks import slow_but
from tests.support.models.masked_texts import FAMILIES, build, losses, make, texts, tokenizer
from tests.support.ranks.processes import run_ranks

ROWS = 22  # no multiple of the batch
PLAIN = {"per_device_train_batch_size": 8, "max_steps": 5}
SAME: dict[str, dict[str, Any]] = {
    "padded": {"padding_free": False},
    "accumulated": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4},
    "one row at a time": {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8},
    "token budget": {"tokens_per_microbatch": 60},
    "checkpointed": {"gradient_checkpointing": True},
    "workers that load": {"dataloader_num_workers": 2},
}


NO_GRADIENT = ("key.bias", "k_lin.bias")
"""It moves all scores of a query alike: its gradient is rounding, which the optimizer makes large."""


def weights(trainer: Any) -> dict[str, torch.Tensor]:
    named = trainer.model.named_parameters()
    return {name: p.detach().clone() for name, p in named if not name.endswith(NO_GRADIENT)}


def run(folder: Path, rows: int = ROWS, **options: Any) -> Any:
    trainer = make(folder, texts(rows), **{**PLAIN, **options})
    trainer.train()
    return trainer


def assert_close(one: Any, other: Any) -> None:
    torch.testing.assert_close(losses(one), losses(other), rtol=1e-5, atol=0.0)
    assert_near(weights(one), weights(other))


def assert_near(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, p in expected.items():
        assert (found[name] - p).norm() <= 1e-3 * p.norm() + 1e-4, name


@pytest.mark.parametrize("family", slow_but(["bert"], FAMILIES))
@pytest.mark.parametrize("name", slow_but(["padded", "accumulated"], SAME))
def test_how_a_step_is_run_changes_no_number(name: str, family: str, tmp_path: Path):
    options = {"whole_word_mask": True, "family": family}
    assert_close(run(tmp_path / "a", **options, **SAME[name]), run(tmp_path / "b", **options))


def seen_masks(trainer: Any) -> list[tuple[list[int], list[int]]]:
    """What each step is given, in training and in evaluation."""
    seen: list[tuple[list[int], list[int]]] = []
    drawn = trainer.drawn

    def watched(batch: RaggedBatch, epoch: int) -> RaggedBatch:
        found = drawn(batch, epoch)
        seen.append((found.token_ids.tolist(), found.score_index.tolist()))
        return found

    trainer.drawn = watched
    return seen


def test_masks_are_new_in_each_epoch_and_the_same_in_each_evaluation(tmp_path: Path):
    order = {"train_sampling_strategy": "sequential", "max_steps": -1, "num_train_epochs": 2}
    trainer = make(tmp_path, texts(8), per_device_train_batch_size=8, eval_dataset=texts(8, seed=1), **order)
    seen = seen_masks(trainer)
    trainer.train()
    first, second = trainer.evaluate(), trainer.evaluate()
    assert len(seen) == 4
    assert seen[0] != seen[1]
    assert seen[2] == seen[3]
    assert first["eval_loss"] == second["eval_loss"]
    assert first["eval_perplexity"] == pytest.approx(torch.tensor(first["eval_loss"]).exp().item(), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    slow_but(
        [{"masking": "spans"}],
        [{"masking": "spans"}, {"packing": True, "max_length": 40}, {"gradient_accumulation_steps": 2}],
    ),
)
def test_a_run_resumed_in_the_middle_of_an_epoch_goes_on_bit_by_bit(options: dict[str, Any], tmp_path: Path):
    settings = {"max_steps": 6, "per_device_train_batch_size": 3, "save_strategy": "steps", "save_steps": 2, **options}
    whole = make(tmp_path / "whole", texts(ROWS), **settings)
    whole.train()
    resumed = make(tmp_path / "whole", texts(ROWS), **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    expected = weights(whole)
    assert all(torch.equal(p, expected[name]) for name, p in weights(resumed).items())


def rank_main(rank: int, folder: str) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1")
    from tests.support.ranks.sharded_training import rank_of

    with rank_of(Path(folder), rank, 2):
        trainer = run(Path(folder) / "out", 24, per_device_train_batch_size=4, eval_dataset=texts(9, seed=1))
        evaluated = trainer.evaluate()
        if rank == 0:
            torch.save((weights(trainer), losses(trainer), evaluated["eval_loss"]), Path(folder) / "found.pt")


@pytest.mark.slow
def test_two_ranks_draw_the_masks_of_one(tmp_path: Path):
    from tests.support.ranks.sharded_training import meeting_place

    run_ranks(rank_main, str(meeting_place(tmp_path)))
    found, found_losses, evaluated = torch.load(tmp_path / "found.pt")
    alone = run(tmp_path / "alone", 24, eval_dataset=texts(9, seed=1))
    torch.testing.assert_close(found_losses, losses(alone), rtol=1e-5, atol=0.0)
    assert evaluated == pytest.approx(alone.evaluate()["eval_loss"], rel=1e-5)
    assert_near(found, weights(alone))


@pytest.mark.parametrize("family", slow_but(["bert"], ["bert", "modernbert"]))
def test_adapters_learn(family: str, tmp_path: Path):
    targets = ["query", "value"] if family == "bert" else ["Wqkv"]
    adapters = LoraConfig(r=4, target_modules=targets, lora_dropout=0.0)
    trainer = run(tmp_path, family=family, peft_config=adapters, max_steps=12, learning_rate=3e-2)
    assert {"lora_A" in n or "lora_B" in n for n, p in trainer.model.named_parameters() if p.requires_grad} == {True}
    found = losses(trainer)
    assert sum(found[-3:]) < 0.95 * sum(found[:3])


@pytest.mark.slow
def test_what_is_logged(tmp_path: Path):
    trainer = run(tmp_path, max_steps=30, learning_rate=1e-2)
    first, last = trainer.state.log_history[0], trainer.state.log_history[-2]
    assert {"loss", "mean_token_accuracy", "entropy", "num_tokens"} <= first.keys()
    assert last["loss"] < 0.9 * first["loss"]


def test_a_stream_is_trained_on(tmp_path: Path):
    trainer = make(tmp_path, texts(ROWS).to_iterable_dataset(), **PLAIN)
    trainer.train()
    assert len(losses(trainer)) == 5


def without_mask_token(folder: Path) -> Any:
    return make(folder, texts(4), processing_class=tokenizer(None))


def of_a_causal_model(folder: Path) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=len(tokenizer()), **sizes))
    return make(folder, texts(4), model=model)


def of_rows_too_long(folder: Path) -> Any:
    return make(folder, texts(4, longest=200), max_length=None)


REFUSED = {
    "no mask token": (without_mask_token, r"has no mask token.*add_special_tokens\(\{'mask_token'"),
    "a causal model": (of_a_causal_model, "is no masked language model.*AutoModelForMaskedLM.from_pretrained"),
    "rows beyond the positions": (of_rows_too_long, "positions"),
    "a collator": (lambda folder: make(folder, texts(4), data_collator=list), "data_collator has no use.*mlm_prob"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_work_is_refused(name: str, tmp_path: Path):
    attempt, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        attempt(tmp_path)


def test_without_mask_tokens_none_is_needed(tmp_path: Path):
    options = {"mask_replace_prob": 0.0, "random_replace_prob": 1.0, "processing_class": tokenizer(None)}
    assert make(tmp_path, texts(4), **options).train_dataset


OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "nothing masked": ({"mlm_probability": 0.0}, "mlm_probability=0.0 masks nothing"),
    "share beyond 1": ({"mlm_probability": 1.5}, "mlm_probability"),
    "shares come to more than 1": ({"mask_replace_prob": 0.9, "random_replace_prob": 0.2}, "come to more than 1"),
    "unknown kind": ({"masking": "sentences"}, "masking.*tokens.*spans.*ngrams"),
    "a longest token": ({"max_span_length": 4}, "max_span_length=4 requires masking='spans' or 'ngrams'"),
    "geometric n-grams": ({"masking": "ngrams", "span_geometric_p": 0.3}, "requires masking='spans'"),
    "endless spans": ({"masking": "spans", "span_geometric_p": 0.0}, "span_geometric_p=0.0"),
    "bins of no size": ({"packing": True, "max_length": None}, "packing=True needs max_length"),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_that_cannot_work_are_refused(name: str, tmp_path: Path):
    options, message = OPTIONS[name]
    with pytest.raises(ValueError, match=message):
        MaskedLMConfig(output_dir=str(tmp_path), **options)


def test_masks_that_rows_bring_are_not_drawn(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    row = tokenizer()(texts(1)["text"][0])["input_ids"]
    rows = Dataset.from_dict({"input_ids": [row] * 4, "labels": [row] * 4})
    make(tmp_path, rows)
    assert "has no effect on rows that bring labels" not in caplog.text
    make(tmp_path, rows, masking="spans", mlm_probability=0.3)
    assert "mlm_probability=0.3, masking='spans' has no effect on rows that bring labels" in caplog.text


def test_rows_with_labels_are_scored_as_they_are(tmp_path: Path):
    rows = [tokenizer()(text)["input_ids"] for text in texts(4)["text"]]
    labels = [[token if place % 3 == 1 else -100 for place, token in enumerate(row)] for row in rows]
    trainer = make(tmp_path, Dataset.from_dict({"input_ids": rows, "labels": labels}))
    seen = seen_masks(trainer)
    trainer.train()
    assert len({str(each) for each in seen}) <= 4
    assert {len(scores) for _, scores in seen} == {sum(label != -100 for row in labels for label in row)}
    assert build().config.vocab_size == len(tokenizer())
