"""Token classification in its trainer: labels of the model, weights of classes, metrics, and whatever way it is run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from torch.nn.functional import cross_entropy
from transformers import BertConfig, BertModel, pipeline

from lowtide import TokenClassificationConfig
from lowtide.engine.heads.head import ScoreOutput
from lowtide.methods.method import Labels
from lowtide.methods.shared.class_weights import class_weights
from lowtide.objectives.entities import entity_scores
from tests.support.marks import slow_but
from tests.support.models.tagging import SIZES, TAGS, dataset, tagger, tokenizer, trainer, words_and_tags

OTHER_WAYS: dict[str, dict[str, Any]] = {
    "micro-batches": {"tokens_per_microbatch": 60},
    "accumulation": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4},
    "padded": {"padding_free": False},
    "checkpointing": {"gradient_checkpointing": True},
    "offloading": {"activation_offloading": True},
    "recomputed products": {"gradient_checkpointing": True, "checkpointing_policy": "matmul"},
    "moved states": {"optim": "adamw_torch", "optimizer_in_backward": "two_pass"},
    "in backward": {"optimizer_in_backward": True, "max_grad_norm": 0.0},
}


def weights_after(made: Any) -> dict[str, torch.Tensor]:
    made.train()
    return {name: each for name, each in made.model.state_dict().items() if "key" not in name and "k_lin" not in name}


@pytest.mark.slow
@pytest.mark.parametrize("way", slow_but(["micro-batches", "accumulation"], OTHER_WAYS))
def test_a_step_is_the_same_whatever_way_it_is_run(way: str, tmp_path: Path):
    options = {"class_weights": "balanced", "label_all_tokens": True, "max_length": 20, "learning_rate": 1e-3}
    plain = {"max_grad_norm": 0.0} if way == "in backward" else {}
    expected = weights_after(trainer(tmp_path, **options, **plain))
    found = weights_after(trainer(tmp_path, **options, **OTHER_WAYS[way]))
    for name, each in expected.items():
        torch.testing.assert_close(found[name], each, rtol=1e-4, atol=2e-5, msg=lambda text, name=name: name + text)


@pytest.mark.parametrize("given", [[1.0, 3.0, 0.5, 2.0, 0.0], {"B-PER": 3.0, "I-LOC": 0.25}, "balanced"])
def test_the_loss_is_the_weighted_mean_over_the_whole_batch(given: Any, tmp_path: Path):
    rows = dataset(8)
    made = trainer(tmp_path, rows, class_weights=given, max_steps=1, label_smoothing_factor=0.1)
    encoded = tokenizer()(list(rows["tokens"]), is_split_into_words=True, padding=True, return_tensors="pt")
    labels = torch.full_like(encoded["input_ids"], -100)
    for n, tags in enumerate(rows["ner_tags"]):
        words = encoded.word_ids(n)
        for place, word in enumerate(words):
            if word is not None and word != words[place - 1]:
                labels[n, place] = tags[word]
    counts = torch.bincount(labels[labels >= 0], minlength=5)
    weights = {
        list: lambda: torch.tensor(given),
        dict: lambda: torch.tensor([given.get(tag, 1.0) for tag in TAGS]),
        str: lambda: counts.sum() / (5 * counts.clamp_min(1)),
    }[type(given)]()
    with torch.no_grad():
        logits = tagger()(encoded["input_ids"], attention_mask=encoded["attention_mask"]).logits
    expected = cross_entropy(logits.flatten(0, 1), labels.flatten(), weights, label_smoothing=0.1)
    made.train()
    assert made.state.log_history[0]["loss"] == pytest.approx(expected.item(), rel=1e-4)
    right = (logits.argmax(-1) == labels)[labels >= 0].float().mean()
    assert made.state.log_history[0]["accuracy"] == pytest.approx(right.item())


def predicted_by_pipeline(model: Any, rows: Dataset) -> list[list[str]]:
    """The label of each word's first piece, by transformers' own forward, a row at a time."""
    pieces, found = tokenizer(), []
    for words in rows["tokens"]:
        encoded = pieces(words, is_split_into_words=True, return_tensors="pt")
        with torch.no_grad():
            labels = model(encoded["input_ids"], attention_mask=encoded["attention_mask"]).logits[0].argmax(-1)
        ids = encoded.word_ids(0)
        first = [n for n, word in enumerate(ids) if word is not None and word != ids[n - 1]]
        found.append([TAGS[labels[n]] for n in first])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("label_all_tokens", [False, True])
def test_entities_of_an_evaluation_are_of_whole_rows(label_all_tokens: bool, tmp_path: Path):
    held_out = dataset(20, seed=3)
    seen = {}

    def metrics(found: Any) -> dict[str, float]:
        seen["predictions"], seen["labels"] = found.predictions, found.label_ids
        return {"own": 1.0}

    made = trainer(
        tmp_path,
        arguments={"eval_dataset": held_out, "compute_metrics": metrics},
        max_steps=15,
        label_all_tokens=label_all_tokens,
        return_entity_level_metrics=True,
    )
    made.train()
    found = made.evaluate()
    truth = [[TAGS[tag] for tag in tags] for tags in held_out["ner_tags"]]
    model = tagger()
    model.load_state_dict(made.model.state_dict())
    scores = entity_scores(zip(truth, predicted_by_pipeline(model.eval(), held_out), strict=True))
    assert {name: found[f"eval_{name}"] for name in ("precision", "recall", "f1")} == pytest.approx(
        {name: scores[""][name] for name in ("precision", "recall", "f1")}
    )
    assert found["eval_PER_number"] == scores["PER"]["number"]
    assert found["eval_own"] == 1.0
    assert seen["predictions"].shape == seen["labels"].shape
    assert seen["predictions"].dtype.kind == "i"
    assert found["eval_accuracy"] == pytest.approx((seen["predictions"] == seen["labels"]).mean())


def test_windows_are_put_together_again_in_evaluation(tmp_path: Path):
    """Every word is right, so every entity is, wherever windows end."""
    long = dataset(10, longest=40, seed=5)
    made = trainer(
        tmp_path, arguments={"eval_dataset": long}, max_length=12, stride=2, return_entity_level_metrics=True
    )
    kept = made.findings()
    batch = made.as_ragged(made.data_collator([made.eval_dataset[n] for n in reversed(range(len(made.eval_dataset)))]))

    right = ScoreOutput(stats={"logits": torch.nn.functional.one_hot(batch.score_target, len(TAGS)).float()})
    found = kept.metrics(kept.keep(batch, right))
    truth = [[TAGS[tag] for tag in tags] for tags in long["ner_tags"]]
    expected = entity_scores((each, each) for each in truth)
    assert found["f1"] == 1.0
    assert {kind: found[f"{kind}_number"] for kind in ("PER", "LOC")} == {
        kind: expected[kind]["number"] for kind in ("PER", "LOC")
    }


def test_labels_without_entities_have_an_accuracy_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    names = ("NOUN", "VERB", "ADJ", "ADV", "X")
    rows = dataset(12).rename_column("ner_tags", "tags")
    made = trainer(
        tmp_path, rows, {"model": tagger(labels=names), "eval_dataset": rows}, tag_names=list(TAGS), max_steps=1
    )
    made.train()
    assert "eval_f1" in made.evaluate()
    words = [{"tokens": row["tokens"], "tags": [names[n % 5] for n, _ in enumerate(row["tokens"])]} for row in rows]
    other = Dataset.from_list(words)
    given = {"model": tagger(labels=names), "eval_dataset": other}
    made = trainer(tmp_path, other, given, max_steps=1, return_entity_level_metrics=True)
    made.train()
    assert "eval_f1" not in (found := made.evaluate())
    assert "eval_accuracy" in found
    assert "return_entity_level_metrics=True has no effect: none of the labels begins with B-" in caplog.text


@pytest.mark.slow
def test_a_model_by_name_gets_the_labels_of_the_rows(tmp_path: Path):
    BertModel(BertConfig(**SIZES)).save_pretrained(tmp_path / "base")
    tokenizer().save_pretrained(tmp_path / "base")
    arguments = {"model": str(tmp_path / "base"), "processing_class": None}
    rows = Dataset.from_list(words_and_tags(60))
    made = trainer(tmp_path, rows, arguments, max_steps=30, learning_rate=3e-3)
    assert made.model.config.label2id == {tag: n for n, tag in enumerate(sorted(TAGS))}
    made.train()
    made.save_model(tmp_path / "trained")
    found = pipeline("token-classification", str(tmp_path / "trained"))("a abc c")
    assert {each["entity"] for each in found} <= {*TAGS} - {"O"}
    again = trainer(tmp_path, dataset(), {**arguments, "model": str(tmp_path / "trained")})
    assert list(again.model.config.id2label.values()) == sorted(TAGS)
    first = again.train_dataset[0]
    tags = [sorted(TAGS)[label] for label in first["labels"] if label >= 0]
    assert tags == [TAGS[tag] for tag in dataset()[0]["ner_tags"]]


def test_the_head_is_trained_with_adapters(tmp_path: Path):
    lora = LoraConfig(r=4, target_modules=["query", "value"])
    made = trainer(tmp_path, arguments={"peft_config": lora})
    trained = {name for name, p in made.model.named_parameters() if p.requires_grad}
    assert any("classifier" in name for name in trained)
    assert any("lora_A" in name for name in trained)
    before = {name: p.detach().clone() for name, p in made.model.named_parameters() if p.requires_grad}
    made.train()
    assert all(not torch.equal(p, before[name]) for name, p in made.model.named_parameters() if name in before)
    assert "bert.encoder.layer.0.output.dense.weight" not in str(trained)


@pytest.mark.slow
def test_a_run_goes_on_from_its_checkpoint(tmp_path: Path):
    options = {"save_strategy": "steps", "save_steps": 3, "max_steps": 6, "class_weights": "balanced"}
    whole = trainer(tmp_path / "whole", **options)
    whole.train()
    made = trainer(tmp_path / "parts", **options)
    made.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    for (name, mine), other in zip(made.model.named_parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(mine, other), name


def test_predictions_are_labels(tmp_path: Path):
    made = trainer(tmp_path)
    found = made.predict(dataset(5, seed=9))
    assert found.predictions.shape == found.label_ids.shape == (sum(map(len, dataset(5, seed=9)["tokens"])),)
    assert set(np.unique(found.predictions)) <= set(range(5))


@pytest.mark.slow
def test_the_loss_of_an_evaluation_does_not_depend_on_its_batches(tmp_path: Path):
    given = {"eval_dataset": dataset(30, seed=4)}
    losses = [
        trainer(tmp_path, arguments=given, per_device_eval_batch_size=size, class_weights=[1, 2, 3, 4, 5]).evaluate()
        for size in (1, 7, 30)
    ]
    assert [each["eval_loss"] for each in losses] == pytest.approx([losses[0]["eval_loss"]] * 3, rel=1e-5)


BAD: dict[str, tuple[dict, str]] = {
    "stride": ({"long_rows": "cut", "stride": 8}, "stride=8 is of windows, and long_rows='cut' makes none"),
    "twice": ({"max_length": 32, "max_seq_length": 64}, "max_length=32 and its other name max_seq_length=64 contra"),
    "tags twice": ({"tag_names": ["O", "O"]}, "name each label once"),
    "no weights": ({"class_weights": [0, 0.0]}, "class_weights are all 0, so that nothing would be learned"),
    "weights": ({"class_weights": [1.0, -1.0]}, "weight -1.0: weights are numbers, 0 or above"),
    "word": ({"class_weights": "even"}, "class_weights='even' must be"),
}


@pytest.mark.parametrize("case", BAD)
def test_options_that_cannot_work_are_refused(case: str, tmp_path: Path):
    options, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        TokenClassificationConfig(str(tmp_path), **options)


def test_weights_are_those_of_the_labels(tmp_path: Path):
    with pytest.raises(ValueError, match="class_weights has 2 weights, and there are 5 labels"):
        trainer(tmp_path, class_weights=[1.0, 2.0])
    with pytest.raises(ValueError, match="class_weights names 'B-ORG', and the labels are O"):
        trainer(tmp_path, class_weights={"B-ORG": 2.0})
    assert class_weights("balanced", Labels(TAGS)) is None  # of a plan, whose rows are prepared already


def test_a_model_with_other_labels_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match=r"the model has 3 labels and the rows have 5 .*num_labels=5"):
        trainer(tmp_path, arguments={"model": tagger(labels=("a", "b", "c"))})
    with pytest.raises(ValueError, match="no head for token-classification: load it with AutoModelForToken"):
        trainer(tmp_path, arguments={"model": BertModel(tagger().config)})
