"""Sequence to sequence in its trainer: what changes no number, resuming, adapters, what is written, what is refused."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import (
    AutoModelForCausalLM,
    DataCollatorForSeq2Seq,
    LlamaConfig,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
)

from lowtide import Seq2SeqConfig
from tests.support.marks import slow_but
from tests.support.models.pairs_of_texts import (
    COMMON,
    END,
    PAD,
    build,
    losses,
    make,
    multilingual,
    rows,
    tokenized,
    tokenizer,
)

ROWS = 22  # no multiple of the batch
PLAIN = {"per_device_train_batch_size": 8, "max_steps": 4}
SAME: dict[str, dict[str, Any]] = {
    "padded": {"padding_free": False},
    "accumulated": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4},
    "one row at a time": {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8},
    "token budget": {"tokens_per_microbatch": 60},
    "checkpointed": {"gradient_checkpointing": True},
    "offloaded": {"activation_offloading": True},
    "workers that load": {"dataloader_num_workers": 2},
    "moved states": {"optim": "adamw_torch", "optimizer_in_backward": "two_pass"},
    "tiled MLP": {"mlp_tile_tokens": 8},
    "everything": {
        **{"gradient_checkpointing": True, "checkpointing_every": 2, "activation_offloading": True},
        **{"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "tokens_per_microbatch": 60},
    },
}


def weights(trainer: Any) -> dict[str, torch.Tensor]:
    """But for biases of keys, whose gradients are rounding."""
    named = trainer.model.named_parameters()
    return {name: p.detach().clone() for name, p in named if not name.endswith("k_proj.bias")}


def run(folder: Path, count: int = ROWS, **options: Any) -> Any:
    trainer = make(folder, rows(count), **{**PLAIN, **options})
    trainer.train()
    return trainer


def assert_near(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, p in expected.items():
        assert (found[name] - p).norm() <= 1e-3 * p.norm() + 1e-4, name


@pytest.mark.parametrize("family", slow_but(["bart"], ["bart", "t5"]))
@pytest.mark.parametrize("name", slow_but(["padded"], SAME))
def test_how_a_step_is_run_changes_no_number(name: str, family: str, tmp_path: Path):
    if (name, family) == ("tiled MLP", "bart"):
        pytest.skip("its MLP is no module of its own, which is refused")
    one = run(tmp_path / "a", family=family, label_smoothing_factor=0.1, **SAME[name])
    other = run(tmp_path / "b", family=family, label_smoothing_factor=0.1)
    torch.testing.assert_close(losses(one), losses(other), rtol=1e-5, atol=0.0)
    assert_near(weights(one), weights(other))


@pytest.mark.slow
@pytest.mark.parametrize("options", slow_but([{}], [{}, {"gradient_accumulation_steps": 2}]))
def test_a_run_resumed_in_the_middle_of_an_epoch_goes_on_bit_by_bit(options: dict[str, Any], tmp_path: Path):
    settings = {"max_steps": 6, "per_device_train_batch_size": 3, "save_strategy": "steps", "save_steps": 2, **options}
    model = {"family": "t5", "dropout_rate": 0.1}
    whole = make(tmp_path / "whole", rows(ROWS), model=build(**model), **settings)
    whole.train()
    resumed = make(tmp_path / "whole", rows(ROWS), model=build(**model), **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    expected = weights(whole)
    assert all(torch.equal(p, expected[name]) for name, p in weights(resumed).items())


@pytest.mark.slow
@pytest.mark.parametrize("family", ["bart", "t5"])
def test_adapters_learn(family: str, tmp_path: Path):
    targets = ["q_proj", "v_proj"] if family == "bart" else ["q", "v"]
    adapters = LoraConfig(r=4, target_modules=targets, lora_dropout=0.0)
    trainer = run(tmp_path, family=family, peft_config=adapters, max_steps=12, learning_rate=3e-2)
    assert {"lora_A" in n or "lora_B" in n for n, p in trainer.model.named_parameters() if p.requires_grad} == {True}
    found = losses(trainer)
    assert sum(found[-3:]) < 0.98 * sum(found[:3])


@pytest.mark.slow
def test_what_is_logged(tmp_path: Path):
    trainer = run(tmp_path, max_steps=30, learning_rate=3e-3)
    first, last = trainer.state.log_history[0], trainer.state.log_history[-2]
    assert {"loss", "mean_token_accuracy", "entropy", "num_tokens"} <= first.keys()
    assert last["loss"] < 0.9 * first["loss"]
    prepared = trainer.train_dataset
    both = sum(len(row["source_ids"]) + len(row["target_ids"]) for row in prepared)
    assert trainer.state.log_history[2]["num_tokens"] == both  # an epoch of three steps


def test_a_stream_is_trained_on(tmp_path: Path):
    trainer = make(tmp_path, rows(ROWS).to_iterable_dataset(), **PLAIN)
    trainer.train()
    assert len(losses(trainer)) == 4


@pytest.mark.slow
def test_a_collator_that_only_pads_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    collator = DataCollatorForSeq2Seq(tokenizer())
    trainer = make(tmp_path / "a", rows(ROWS), data_collator=collator, **PLAIN)
    assert "DataCollatorForSeq2Seq is not used" in caplog.text
    trainer.train()
    assert losses(trainer) == losses(run(tmp_path / "b"))


# -- what is written ----------------------------------------------------------------------------------------------


def tokens_of(prediction: Any) -> dict[str, float]:
    """A metric that depends on every token of both."""
    written, labels = np.asarray(prediction.predictions), np.asarray(prediction.label_ids)
    written, labels = np.where(written < 0, PAD, written), np.where(labels < 0, PAD, labels)
    weigh = [np.cumsum(each != PAD, axis=1) * each for each in (written, labels)]
    return {"written": float(weigh[0].sum()), "labels": float(weigh[1].sum())}


@pytest.mark.parametrize("beams", slow_but([1], [1, 2]))
@pytest.mark.parametrize("family", slow_but(["bart"], ["bart", "t5"]))
def test_compute_metrics_gets_what_transformers_writes(family: str, beams: int, tmp_path: Path):
    options = {"predict_with_generate": True, "generation_max_length": 9, "generation_num_beams": beams}
    held_out = tokenized(9, seed=1)
    model = build(family)
    args = {name: value for name, value in COMMON.items() if name != "rehearsal"}
    reference = Seq2SeqTrainer(
        model,
        Seq2SeqTrainingArguments(output_dir=str(tmp_path / "theirs"), **args, **options, per_device_eval_batch_size=4),
        data_collator=DataCollatorForSeq2Seq(tokenizer(), model),
        eval_dataset=held_out,
        processing_class=tokenizer(),
        compute_metrics=tokens_of,
    )
    ours = make(
        tmp_path / "ours",
        tokenized(8),
        family=family,
        eval_dataset=held_out,
        compute_metrics=tokens_of,
        per_device_eval_batch_size=4,
        **options,
    )
    expected, found = reference.evaluate(), ours.evaluate()
    for name in ("eval_written", "eval_labels"):
        assert found[name] == pytest.approx(expected[name], rel=1e-4), name
    assert expected["eval_written"] > 9 * PAD
    shorter = ours.evaluate(max_length=3)
    assert shorter["eval_written"] == reference.evaluate(max_length=3)["eval_written"]
    assert ours.predict(held_out, max_new_tokens=1).predictions.shape == (9, 2)


@pytest.mark.slow
def test_writing_leaves_training_as_it_was(tmp_path: Path):
    options = {"per_device_train_batch_size": 4, "max_steps": 4, "eval_strategy": "steps", "eval_steps": 1}
    model = {"family": "t5", "dropout_rate": 0.1}
    sampled = {"do_sample": True, "max_length": 6}
    runs = []
    for writes in (False, True):
        model_of_run = build(**model)
        model_of_run.generation_config.update(**sampled)
        more = {"predict_with_generate": writes, "compute_metrics": tokens_of if writes else None}
        trainer = make(tmp_path / str(writes), rows(16), model=model_of_run, eval_dataset=rows(4), **options, **more)
        trainer.train()
        runs.append(losses(trainer))
    assert runs[0] == runs[1]


def test_metrics_of_the_package_evaluate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The package is not needed for tests: in its place is one that says what it was given."""
    seen: dict[str, Any] = {}

    class Metric:
        def __init__(self, name: str):
            self.name = name

        def compute(self, predictions: list[str], references: list) -> dict[str, float]:
            seen[self.name] = (predictions, references)
            return {"score": 12.5} if self.name == "sacrebleu" else {"rouge1": 0.5, "rougeL": 0.25}

    package = types.ModuleType("evaluate")
    package.load = Metric  # type: ignore[attr-defined]
    package.__spec__ = types.SimpleNamespace(name="evaluate")  # type: ignore[assignment]
    monkeypatch.setitem(sys.modules, "evaluate", package)
    held_out = rows(5, seed=1)
    trainer = make(
        tmp_path,
        rows(8),
        eval_dataset=held_out,
        predict_with_generate=True,
        generation_max_length=6,
        generation_metrics=["rouge", "sacrebleu"],
    )
    found = trainer.evaluate()
    assert (found["eval_rouge1"], found["eval_rougeL"], found["eval_sacrebleu"]) == (0.5, 0.25, 12.5)
    assert 1 <= found["eval_written_tokens"] <= 6
    assert seen["rouge"][1] == list(held_out["target"])
    assert seen["sacrebleu"][1] == [[text] for text in held_out["target"]]


def test_a_forced_token_begins_what_is_written(tmp_path: Path):
    options = {"predict_with_generate": True, "generation_max_length": 5, "forced_bos_token": "de_DE"}
    trainer = make(tmp_path, rows(8), compute_metrics=tokens_of, **options)
    written = trainer.predict(rows(3, seed=1)).predictions
    forced = tokenizer().get_vocab()["de_DE"]
    assert written[:, :2].tolist() == [[END, forced]] * 3
    trainer.save_model(str(tmp_path / "saved"))
    assert type(trainer.model).from_pretrained(tmp_path / "saved").generation_config.forced_bos_token_id == forced


def test_what_is_written_begins_as_targets_do_in_training(tmp_path: Path):
    options = {"source_lang": "en_XX", "target_lang": "de_DE", "predict_with_generate": True}
    arguments = {"family": "mbart", "processing_class": multilingual(), "compute_metrics": tokens_of}
    given = Dataset.from_list([{"translation": {"en_XX": "w1 w2", "de_DE": "w3"}}] * 4)
    trainer = make(tmp_path, given, **arguments, **options)
    german = tokenizer().get_vocab()["de_DE"]
    batch = trainer.data_collator([trainer.train_dataset[0]])
    begin = batch.segments[1].start
    assert batch.token_ids[begin : begin + 2].tolist() == [END, german]
    written = trainer.predict(given, max_new_tokens=3).predictions
    assert written[:, :2].tolist() == [[END, german]] * 4


@pytest.mark.slow
def test_what_is_written_is_in_the_order_of_the_rows_however_a_batch_is_cut(tmp_path: Path):
    given, options = rows(9, seed=3), {"predict_with_generate": True, "per_device_eval_batch_size": 8}
    whole = make(tmp_path, rows(8), **options, generation_max_length=5).predict(given)
    cut = make(tmp_path, rows(8), **options, generation_max_length=5, tokens_per_microbatch=40).predict(given)
    assert len({tuple(row) for row in whole.label_ids.tolist()}) == 9
    assert cut.label_ids.tolist() == whole.label_ids.tolist()
    assert cut.predictions.tolist() == whole.predictions.tolist()


# -- what is refused ----------------------------------------------------------------------------------------------


def causal_model() -> Any:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=len(tokenizer()), **sizes))


def without_start() -> Any:
    model = build()
    model.config.decoder_start_token_id = None
    return model


def pairs(*given: tuple[Any, Any]) -> Dataset:
    return Dataset.from_list([{"source": source, "target": target} for source, target in given])


REFUSED: dict[str, tuple[Any, str]] = {
    "a causal model": (
        lambda folder: make(folder, rows(4), model=causal_model()),
        "is no encoder-decoder, and reads no source.*AutoModelForSeq2SeqLM.from_pretrained",
    ),
    "no start token": (
        lambda folder: make(folder, rows(4), model=without_start()),
        "has no decoder_start_token_id.*set model.config.decoder_start_token_id",
    ),
    "empty targets": (
        lambda folder: make(folder, pairs(("w1", ""), ("w2", " "))),
        r"every row was dropped \(empty target: 2\).*a target with a token that is scored",
    ),
    "no target": (
        lambda folder: make(folder, pairs(("w1", "w2"), ("w1", None))),
        r"row 1 \(the first is 0\): 'target' is .*must be a string",
    ),
    "rows beyond the positions": (
        lambda folder: make(folder, rows(40, longest=200), max_source_length=None),
        "positions",
    ),
    "a collator": (lambda folder: make(folder, rows(4), data_collator=list), "data_collator has no use.*end to end"),
    "other columns": (
        lambda folder: make(folder, Dataset.from_list([{"question": "w1", "answer": "w2"}])),
        "no source with a target is among them.*source_column and target_column",
    ),
    "translations without languages": (
        lambda folder: make(folder, Dataset.from_list([{"translation": {"en": "w1", "de": "w2"}}])),
        "by source_lang and target_lang",
    ),
    "a language that is not there": (
        lambda folder: make(
            folder,
            Dataset.from_list([{"translation": {"en": "w1", "de": "w2"}}]),
            source_lang="en",
            target_lang="fr",
        ),
        "no text in 'fr', only in",
    ),
    "no package for metrics": (
        lambda folder: make(folder, rows(4), predict_with_generate=True, generation_metrics=["rouge"]),
        "requires the package `evaluate`: pip install evaluate",
    ),
    "an unknown metric": (
        lambda folder: make(folder, rows(4), predict_with_generate=True, generation_metrics=["beauty"]),
        "generation_metrics has 'beauty'",
    ),
    "an unknown forced token": (
        lambda folder: make(folder, rows(4), forced_bos_token="fr_XX"),
        "forced_bos_token='fr_XX' is not in the tokenizer's vocabulary",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_work_is_refused(name: str, tmp_path: Path):
    attempt, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        attempt(tmp_path)


def test_options_of_generate_need_it_on(tmp_path: Path):
    with pytest.raises(ValueError, match="max_length: options of `generate` require predict_with_generate=True"):
        make(tmp_path, rows(4)).evaluate(rows(4), max_length=3)


def test_what_is_built_for_one_stack_of_layers_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match=r"neftune_noise_alpha=5\.0 puts noise on one embedding"):
        make(tmp_path, rows(4), neftune_noise_alpha=5.0)


OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "one language": ({"source_lang": "en"}, "source_lang='en' requires target_lang"),
    "another language": ({"target_lang": "en"}, "target_lang='en' requires source_lang"),
    "no length": ({"max_source_length": 0}, "max_source_length"),
    "beams of nothing": ({"generation_num_beams": 2}, "generation_num_beams=2 requires predict_with_generate=True"),
    "metrics of nothing": ({"generation_metrics": ["rouge"]}, "requires predict_with_generate=True"),
    "share beyond 1": ({"label_smoothing_factor": 1.5}, "label_smoothing_factor"),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_that_cannot_work_are_refused(name: str, tmp_path: Path):
    options, message = OPTIONS[name]
    with pytest.raises(ValueError, match=message):
        Seq2SeqConfig(output_dir=str(tmp_path), **options)
