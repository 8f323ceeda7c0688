"""Sequence classification in its trainer: labels of the model, weights of classes, metrics, and ways to run it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset, IterableDataset, Value
from peft import LoraConfig
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, mse_loss
from transformers import AutoModelForSequenceClassification, BertConfig, BertForMaskedLM, pipeline

from lowtide import SequenceClassificationConfig, SequenceClassificationTrainer
from lowtide.cli.main import main
from lowtide.methods.sequence_classification import macro_f1, pearson
from tests.support.marks import slow_but
from tests.support.models.classifying import CLASSES, NO_DROPOUT, SIZES, classifier, dataset, tokenizer, trainer

OTHER_WAYS: dict[str, dict[str, Any]] = {
    "micro-batches": {"tokens_per_microbatch": 40},
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
    return {name: each for name, each in made.model.state_dict().items() if "key" not in name}


CASES = {way: (way, "bert") for way in OTHER_WAYS}
CASES |= {
    f"{way}, {family}": (way, family) for way in ("micro-batches", "padded") for family in ("modernbert", "llama")
}


@pytest.mark.parametrize("case", slow_but(["micro-batches"], CASES))
def test_a_step_is_the_same_whatever_way_it_is_run(case: str, tmp_path: Path):
    way, family = CASES[case]
    options = {"class_weights": [1.0, 3.0, 0.5], "learning_rate": 1e-3}
    plain = {"max_grad_norm": 0.0} if way == "in backward" else {}
    rows = dataset(24, pairs=True)
    given = [{"model": classifier(family), "processing_class": tokenizer(types=family == "bert")} for _ in range(2)]
    expected = weights_after(trainer(tmp_path, rows, given[0], **options, **plain))
    found = weights_after(trainer(tmp_path, rows, given[1], **options, **OTHER_WAYS[way]))
    for name, each in expected.items():
        torch.testing.assert_close(found[name], each, rtol=1e-4, atol=2e-5, msg=lambda text, name=name: name + text)


def logits_of(model: Any, rows: Dataset) -> torch.Tensor:
    """By transformers' own forward, a row at a time."""
    with torch.no_grad():
        return torch.cat([model(**tokenizer()(text, return_tensors="pt")).logits for text in rows["text"]])


WEIGHTS: dict[str, Any] = {"list": [1.0, 3.0, 0.5], "mapping": {"warm": 3.0, "hot": 0.25}, "balanced": "balanced"}


def weights_of(given: str, counts: torch.Tensor) -> torch.Tensor:
    if given == "balanced":
        return counts.sum() / (3 * counts.clamp_min(1))
    return torch.tensor([1.0, 3.0, 0.5] if given == "list" else [1.0, 3.0, 0.25])


@pytest.mark.parametrize("given", WEIGHTS)
def test_the_loss_is_the_weighted_mean_over_the_whole_batch(given: str, tmp_path: Path):
    rows = dataset(8)
    made = trainer(tmp_path, rows, class_weights=WEIGHTS[given], max_steps=1, label_smoothing_factor=0.1)
    labels, logits = torch.tensor(rows["label"]), logits_of(classifier(), rows)
    weights = weights_of(given, torch.bincount(labels, minlength=3))
    expected = cross_entropy(logits, labels, weights, label_smoothing=0.1)
    made.train()
    assert made.state.log_history[0]["loss"] == pytest.approx(expected.item(), rel=1e-4)
    assert made.state.log_history[0]["accuracy"] == pytest.approx((logits.argmax(-1) == labels).float().mean().item())


@pytest.mark.parametrize("given", WEIGHTS)
def test_each_label_that_may_hold_has_its_weight(given: str, tmp_path: Path):
    rows = dataset(8, kind="set")
    made = trainer(tmp_path, rows, class_weights=WEIGHTS[given], max_steps=1, tokens_per_microbatch=30)
    held = torch.tensor([[float(name in each) for name in CLASSES] for each in rows["label"]])
    logits = logits_of(classifier(), rows)
    weights = weights_of(given, held.sum(0))
    each = binary_cross_entropy_with_logits(logits, held, reduction="none")
    expected = (each * weights).sum() / (len(rows) * weights.sum())
    made.train()
    assert made.state.log_history[0]["loss"] == pytest.approx(expected.item(), rel=1e-4)
    assert made.model.config.problem_type == "multi_label_classification"


def test_several_values_are_predicted_where_that_is_asked_for(tmp_path: Path):
    rows = dataset(8, kind="vector")
    made = trainer(tmp_path, rows, problem_type="regression", max_steps=1)
    expected = mse_loss(logits_of(classifier(), rows), torch.tensor(rows["label"]))
    made.train()
    assert made.state.log_history[0]["loss"] == pytest.approx(expected.item(), rel=1e-4)


SAID = {
    "three values": ("vector", {"labels": 3, "problem_type": "regression"}, mse_loss),
    "three values of whole numbers": ("whole", {"labels": 3, "problem_type": "regression"}, mse_loss),
    "several classes": (
        "vector",
        {"labels": 3, "problem_type": "multi_label_classification"},
        binary_cross_entropy_with_logits,
    ),
    "one value": ("value", {"labels": 1}, mse_loss),
    "one value, of whole numbers": ("number", {"labels": 1}, mse_loss),
    "one value of whole numbers, which the config names": (
        "number",
        {"labels": 1, "problem_type": "regression"},
        mse_loss,
    ),
}


BY_NAME = [name for name, (kind, changes, _) in SAID.items() if kind != "number" or "problem_type" in changes]
"""A model by name gets a head for the classes of whole numbers, unless its config says that these are values."""


@pytest.mark.parametrize(("said", "loaded"), [*((name, True) for name in SAID), *((name, False) for name in BY_NAME)])
def test_the_config_of_the_model_alone_may_say_what_labels_are(said: str, loaded: bool, tmp_path: Path):
    kind, changes, loss = SAID[said]
    rows = dataset(8, kind={"number": "class", "whole": "vector"}.get(kind, kind))
    if kind == "number":
        rows = rows.cast_column("label", Value("int64"))
    if kind == "whole":
        values = [[number % 5, number % 3, -number] for number in range(8)]
        rows = rows.remove_columns("label").add_column("label", values)
    model = classifier(**changes)
    if not loaded:
        model.save_pretrained(tmp_path / "model")
    made = trainer(
        tmp_path, rows, {"model": model if loaded else str(tmp_path / "model")}, max_steps=1, learning_rate=0.1
    )
    plain = classifier(**changes)
    logits = torch.cat([plain(**tokenizer()(text, return_tensors="pt")).logits for text in rows["text"]])
    expected = loss(logits, torch.tensor(rows["label"]).float().reshape(logits.shape))
    expected.backward()
    norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1e9)
    made.train()
    assert made.state.log_history[0]["loss"] == pytest.approx(expected.item(), rel=1e-5)
    assert made.state.log_history[0]["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    assert made.model.config.problem_type == changes.get("problem_type", "regression")


# -- evaluation --------------------------------------------------------------------------------------------------------


def evaluated(folder: Path, kind: str, **options: Any) -> tuple[dict[str, float], torch.Tensor, Dataset, Any]:
    """Metrics of an evaluation, logits of the trained model by transformers, the rows, and what metrics were given."""
    held_out, seen = dataset(20, kind=kind, seed=3), []

    def metrics(found: Any) -> dict[str, float]:
        seen.append(found)
        return {"own": 1.0}

    values = kind == "value"
    given = {
        "eval_dataset": held_out,
        "compute_metrics": metrics,
        "model": classifier(labels=1 if values else 3),
    }
    made = trainer(folder, dataset(40, kind=kind), given, max_steps=15, **options)
    made.train()
    found = made.evaluate()
    model = classifier(labels=1 if values else 3)
    model.load_state_dict(made.model.state_dict())
    return found, logits_of(model.eval(), held_out), held_out, seen[-1]


@pytest.mark.slow
def test_an_evaluation_of_classes(tmp_path: Path):
    found, logits, rows, seen = evaluated(tmp_path, "class", per_device_eval_batch_size=7, tokens_per_microbatch=40)
    target = np.array(rows["label"])
    guess = logits.argmax(-1).numpy()
    of_each = [2 * ((guess == n) & (target == n)).sum() / ((guess == n).sum() + (target == n).sum()) for n in range(3)]
    assert found["eval_f1"] == pytest.approx(np.mean(of_each))
    assert found["eval_accuracy"] == pytest.approx((guess == target).mean())
    assert found["eval_loss"] == pytest.approx(cross_entropy(logits, torch.tensor(target)).item(), rel=1e-4)
    np.testing.assert_allclose(seen.predictions, logits.numpy(), rtol=1e-4, atol=1e-5)  # in the order of the rows
    np.testing.assert_array_equal(seen.label_ids, target)


@pytest.mark.slow
def test_an_evaluation_of_several_labels(tmp_path: Path):
    found, logits, rows, seen = evaluated(tmp_path, "vector")
    target, guess = np.array(rows["label"]) > 0, (logits > 0).numpy()
    assert found["eval_f1"] == pytest.approx(macro_f1(target, guess))
    assert found["eval_accuracy"] == pytest.approx((guess == target).all(-1).mean())
    assert seen.label_ids.shape == seen.predictions.shape == (20, 3)


@pytest.mark.slow
def test_an_evaluation_of_values(tmp_path: Path):
    found, logits, rows, _ = evaluated(tmp_path, "value")
    target, values = np.array(rows["label"]), logits[:, 0].numpy()
    assert found["eval_mse"] == pytest.approx(((target - values) ** 2).mean(), rel=1e-4)
    assert found["eval_pearson"] == pytest.approx(np.corrcoef(target, values)[0, 1], rel=1e-3)
    assert found["eval_loss"] == pytest.approx(found["eval_mse"], rel=1e-4)


def test_metrics_of_nothing_said_are_zero_or_left_out():
    nothing = np.zeros((3, 2), dtype=bool)
    assert macro_f1(nothing, nothing) == 0.0
    assert pearson(np.ones((4, 1)), np.arange(4.0)[:, None]) is None


def test_predictions_are_logits_in_the_order_of_the_rows(tmp_path: Path):
    rows = dataset(9, seed=9)
    found = trainer(tmp_path, tokens_per_microbatch=30).predict(rows)
    np.testing.assert_allclose(found.predictions, logits_of(classifier().eval(), rows).numpy(), rtol=1e-4, atol=1e-5)
    assert found.label_ids.tolist() == rows["label"]


# -- models ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def saved_encoder(tmp_path: Path) -> Path:
    """A language model without a pooler, as pretraining leaves it."""
    folder = tmp_path / "encoder"
    torch.manual_seed(0)
    BertForMaskedLM(BertConfig(**SIZES, **NO_DROPOUT)).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", ["class", "name", "set", "vector", "value"])
def test_a_model_by_name_gets_a_head_for_the_labels(kind: str, saved_encoder: Path, tmp_path: Path):
    rows = dataset(12, kind=kind)
    given = {"model": str(saved_encoder), "processing_class": None}
    made = trainer(tmp_path / "run", rows, given)
    config = made.model.config
    names = {"class": CLASSES, "name": sorted(CLASSES), "set": sorted(CLASSES), "value": ("LABEL_0",)}
    assert list(config.id2label.values()) == list(names.get(kind, [f"LABEL_{n}" for n in range(3)]))
    made.train()
    made.save_model(str(tmp_path / "saved"))
    said = pipeline("text-classification", str(tmp_path / "saved"), device="cpu")("ice and snow")
    assert said[0]["label"] in config.id2label.values()


@pytest.mark.parametrize("family", ["bert", "llama"])
def test_adapters_train_the_head_whole(family: str, tmp_path: Path):
    targets = {"bert": ["query", "value"], "llama": ["q_proj", "v_proj"]}[family]
    head = {"bert": "classifier", "llama": "score"}[family]
    config = LoraConfig(r=4, target_modules=targets)
    given = {"model": classifier(family), "peft_config": config, "processing_class": tokenizer(types=False)}
    made = trainer(tmp_path, arguments=given, max_steps=2)
    trained = {name for name, p in made.model.named_parameters() if p.requires_grad}
    assert any(head in name for name in trained)
    assert all(head in name or "lora" in name for name in trained)
    before = {name: p.clone() for name, p in made.model.named_parameters() if p.requires_grad}
    made.train()
    assert all(not torch.equal(before[name], p) for name, p in made.model.named_parameters() if name in before)


def test_adapters_are_merged_with_their_head(saved_encoder: Path, tmp_path: Path):
    config = LoraConfig(r=4, target_modules=["query", "value"])
    given = {"model": str(saved_encoder), "processing_class": None, "peft_config": config}
    made = trainer(tmp_path / "run", arguments=given, learning_rate=1e-2)
    trained = {name for name, p in made.model.named_parameters() if p.requires_grad}
    assert any("pooler" in name for name in trained)  # new as the head is, and lost if it were not saved
    made.train()
    made.save_model(str(tmp_path / "adapter"))
    assert main(["merge", "--adapter", str(tmp_path / "adapter"), "--output_dir", str(tmp_path / "merged")]) == 0
    rows = dataset(5, seed=9)
    merged = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged").eval()
    np.testing.assert_allclose(made.predict(rows).predictions, logits_of(merged, rows).numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_run_goes_on_bit_by_bit(tmp_path: Path):
    options = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3}
    rows = dataset(40, pairs=True)
    whole = trainer(tmp_path / "whole", rows, **options)
    whole.train()
    again = trainer(tmp_path / "again", rows, **options)
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    for (name, mine), other in zip(again.model.named_parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(mine, other), name


def test_streams_are_trained_on_where_their_labels_are_named(tmp_path: Path):
    rows = list(dataset(24, kind="name"))
    stream = IterableDataset.from_generator(lambda: iter(rows))
    with pytest.raises(ValueError, match="is a stream, whose labels are not known before its end: list them in `class"):
        trainer(tmp_path, stream)
    made = trainer(tmp_path, stream, class_names=list(CLASSES))
    made.train()
    assert made.state.global_step == 3


# -- what cannot work --------------------------------------------------------------------------------------------------

BAD: dict[str, tuple[dict, str]] = {
    "twice": ({"max_length": 32, "max_seq_length": 64}, "max_length=32 and its other name max_seq_length=64 contra"),
    "columns": ({"text_column_names": ["a", "b", "c"]}, "name one column, or the two of a pair"),
    "names": ({"class_names": ["a", "a"]}, "name each label once, and at least two"),
    "weights": ({"class_weights": [1.0, -1.0]}, "weight -1.0: weights are numbers, 0 or above"),
    "problem": ({"problem_type": "classification"}, "problem_type='classification' is not one of single_label"),
    "weights of values": (
        {"problem_type": "regression", "class_weights": [1.0]},
        "a regression has none: leave",
    ),
    "smoothed": (
        {"problem_type": "multi_label_classification", "label_smoothing_factor": 0.1},
        "label_smoothing_factor=0.1 smooths the choice of one class",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_options_that_cannot_work_are_refused(case: str, tmp_path: Path):
    options, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        SequenceClassificationConfig(str(tmp_path), **options)


def test_what_the_labels_do_not_go_with_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="class_weights has 2 weights, and there are 3 labels"):
        trainer(tmp_path, class_weights=[1.0, 2.0])
    with pytest.raises(ValueError, match="class_weights is of classes, and a regression has none"):
        trainer(tmp_path, dataset(kind="value"), {"model": classifier(labels=1)}, class_weights=[1.0])
    with pytest.raises(ValueError, match="smooths the choice of one class"):
        trainer(tmp_path, dataset(kind="set"), label_smoothing_factor=0.1)
    with pytest.raises(ValueError, match=r"the model has 3 labels and the rows have 1 .*num_labels=1"):
        trainer(tmp_path, dataset(kind="value"))
    with pytest.raises(ValueError, match="says problem_type='regression', and the labels of the rows are of single"):
        trainer(tmp_path, arguments={"model": classifier(problem_type="regression")})
    with pytest.raises(ValueError, match="data_collator has no use in sequence classification: rows become a batch"):
        trainer(tmp_path, arguments={"data_collator": lambda rows: rows})


def test_a_model_without_a_head_is_refused(tmp_path: Path):
    model = BertForMaskedLM(BertConfig(**SIZES, num_labels=3))
    with pytest.raises(ValueError, match="no head for text-classification: load it with AutoModelForSequenceClass"):
        SequenceClassificationTrainer(
            model, SequenceClassificationConfig(str(tmp_path)), train_dataset=dataset(), processing_class=tokenizer()
        )
