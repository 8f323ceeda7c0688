"""Process reward models: rows as TRL's PRMTrainer had them, and the loss and gradients of transformers' own model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import LlamaConfig, LlamaForTokenClassification

import lowtide
from lowtide.data.batches.token_rows import IGNORED
from lowtide.data.stepwise import StepEncoder
from tests.support.ranks.processes import run_ranks
from tests.support.ranks.sharded_training import meeting_place, rank_of
from tests.support.references.parity_world import SMALL, sums, tokenizer
from tests.support.runs.on_a_cpu import ON_A_CPU


def rows(count: int = 6) -> list[dict[str, Any]]:
    """Sums in two to twelve steps, of which some are wrong."""
    found = []
    for number, (ask, answer) in enumerate(sums(count)):
        steps = answer.split(". ")
        found.append({"prompt": ask, "completions": steps, "labels": [(number + n) % 3 > 0 for n in range(len(steps))]})
    return found


def build() -> LlamaForTokenClassification:
    torch.manual_seed(0)
    config = LlamaConfig(**{**SMALL, "num_labels": 2, "classifier_dropout": 0.0})
    return LlamaForTokenClassification(config).double()


def trainer(folder: Any, peft_config: Any = None, **options: Any) -> Any:
    args = lowtide.PRMConfig(
        **{"output_dir": str(folder), "max_steps": 1, "optim": "sgd", "learning_rate": 1.0, "max_grad_norm": 0.0},
        **{"lr_scheduler_type": "constant", "per_device_train_batch_size": 6, **ON_A_CPU, **options},
    )
    data = Dataset.from_list(rows())
    given: dict[str, Any] = {"processing_class": tokenizer(), "train_dataset": data, "peft_config": peft_config}
    return lowtide.PRMTrainer(model=build(), args=args, **given)


def test_tokens_and_labels_of_steps():
    encoder, ids = StepEncoder(tokenizer(), "\n"), lambda text: tokenizer()(text)["input_ids"]
    row = {"prompt": "ab", "completions": ["c", "de"], "labels": [True, False]}
    line, found = len(ids("\n")), encoder(row, 0)
    assert found["input_ids"] == [*ids("ab"), *ids("c"), *ids("\n"), *ids("de"), *ids("\n")]
    places = {place: label for place, label in enumerate(found["labels"]) if label != IGNORED}
    first = len(ids("ab")) + len(ids("c")) + line - 1
    assert places == {first: 1, len(found["input_ids"]) - 1: 0}
    last = StepEncoder(tokenizer(), "\n", last_alone=True, most_of_prompt=1)(row, 0)
    assert last["input_ids"][0] == ids("ab")[-1]
    assert [label for label in last["labels"] if label != IGNORED] == [0]
    cut = StepEncoder(tokenizer(), "\n", most_of_steps=len(ids("c")) + line)(row, 0)
    assert [label for label in cut["labels"] if label != IGNORED] == [1]


def test_what_cannot_be_used_is_named():
    encoder = StepEncoder(tokenizer(), "\n")
    for change, said in (
        ({"completions": []}, "row 3: 0 steps in `completions` and 2 `labels`"),
        ({"labels": [True]}, "2 steps in `completions` and 1 `labels`"),
        ({"labels": [True, 2]}, "the label 2 is neither true"),
        ({"completions": "c"}, "a list of steps"),
    ):
        with pytest.raises(ValueError, match=said):
            encoder({"prompt": "ab", "completions": ["c", "d"], "labels": [True, False], **change}, 3)
    with pytest.raises(ValueError, match="step_separator='' has no token"):
        lowtide.PRMConfig(output_dir="run", use_cpu=True, step_separator="")


def test_the_head_is_trained_whole_beside_adapters_of_all_linear_layers(tmp_path):
    made = trainer(tmp_path, LoraConfig(r=4, target_modules="all-linear"))
    trained = {name for name, p in made.model.named_parameters() if p.requires_grad}
    assert {name for name in trained if "lora_" not in name} == {
        f"base_model.model.score.modules_to_save.default.{part}" for part in ("weight", "bias")
    }
    assert any("down_proj.lora_A" in name for name in trained)


@pytest.mark.slow
def test_a_step_is_that_of_transformers_model_on_a_padded_batch(tmp_path):
    whole = trainer(tmp_path / "whole")
    whole.train()
    model, encoder = build(), StepEncoder(tokenizer(), "\n")
    encoded = [encoder(row, 0) for row in rows()]
    pad = lambda name, value: torch.nn.utils.rnn.pad_sequence(  # noqa: E731
        [torch.tensor(each[name]) for each in encoded], True, value
    )
    there = pad("labels", -1) != -1
    found = model(input_ids=pad("input_ids", 0), attention_mask=there.long(), labels=pad("labels", IGNORED))
    found.loss.backward()
    assert whole.state.log_history[0]["loss"] == pytest.approx(found.loss.item(), rel=1e-6)
    right = (found.logits.argmax(-1) == pad("labels", IGNORED))[pad("labels", IGNORED) != IGNORED]
    assert whole.state.log_history[0]["accuracy"] == pytest.approx(right.double().mean().item())
    ours = dict(whole.model.named_parameters())
    for name, p in model.named_parameters():
        assert p.grad is not None
        torch.testing.assert_close(ours[name], p - p.grad, rtol=1e-5, atol=1e-7, msg=name)
    parts = trainer(tmp_path / "parts", tokens_per_microbatch=40)
    parts.train()
    for name, p in parts.model.named_parameters():
        torch.testing.assert_close(p, ours[name], rtol=1e-5, atol=1e-7, msg=name)


def rank_main(rank: int, folder: str) -> None:
    with rank_of(Path(folder), rank, 2):
        found = trainer(Path(folder) / "run", per_device_train_batch_size=3)
        found.train()
        if rank == 0:
            torch.save([found.state.log_history[0], dict(found.model.named_parameters())], Path(folder) / "found.pt")


@pytest.mark.slow
def test_two_ranks_learn_what_one_does(tmp_path):
    """Rows of two to twelve steps, so that ranks have unequally many."""
    run_ranks(rank_main, str(meeting_place(tmp_path)), ranks=2)
    logs, found = torch.load(tmp_path / "found.pt", weights_only=False)
    whole = trainer(tmp_path / "whole")
    whole.train()
    assert logs["loss"] == pytest.approx(whole.state.log_history[0]["loss"], rel=1e-6)
    assert logs["accuracy"] == pytest.approx(whole.state.log_history[0]["accuracy"])
    for name, p in whole.model.named_parameters():
        torch.testing.assert_close(found[name], p, rtol=1e-5, atol=1e-7, msg=name)
