"""Values that run, and cannot be meant, are warned of once; those that mean nothing are refused in a sentence."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from transformers import CLIPConfig, LlamaConfig, LlamaForCausalLM

import lowtide
from lowtide.engine.weights.load_errors import check_dropouts
from tests.support.runs.on_a_cpu import ON_A_CPU
from tests.support.runs.online_runs import online
from tests.support.runs.preference_runs import trainer
from tests.support.texts.byte_tokenizer import byte_tokenizer


def warned(caplog: pytest.LogCaptureFixture, words: str) -> int:
    return sum(words in record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING)


def sft(folder: Path, *, config: dict, **options) -> lowtide.SFTTrainer:
    """Over rows of 20 and 40 letters, with an end token each."""
    sizes: dict[str, Any] = {"vocab_size": 260, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, **sizes))
    for name, value in config.items():  # which LlamaConfig may look at
        setattr(model.config, name, value)
    args = lowtide.SFTConfig(output_dir=str(folder), max_steps=1, **{**ON_A_CPU, **options})
    data = Dataset.from_list([{"text": "a" * 20}, {"text": "b" * 40}])
    return lowtide.SFTTrainer(model, args, train_dataset=data, processing_class=byte_tokenizer())


@pytest.mark.parametrize(("decay", "times"), [(1e10, 1), (0.1, 0)])
def test_a_decay_that_turns_signs_is_warned_of(decay, times, tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        trainer("dpo", tmp_path, weight_decay=decay)
    assert warned(caplog, f"weight_decay={decay:g} is 1e+08, above 1") == times


@pytest.mark.parametrize(("temperature", "times"), [(1e-30, 1), (0.7, 0)])
def test_a_temperature_near_zero_is_warned_of(temperature, times, tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        online(tmp_path, temperature=temperature)
    assert warned(caplog, f"temperature={temperature:g} multiplies logits by") == times


@pytest.mark.parametrize(("factor", "times"), [(1, 1), (0.1, 0)])
def test_smoothing_that_leaves_no_label_is_warned_of(factor, times, tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        sft(tmp_path, config={}, label_smoothing_factor=factor)
    assert warned(caplog, "label_smoothing_factor=1 leaves nothing of the labels") == times


@pytest.mark.parametrize(("options", "times"), [({"max_length": None}, 1), ({"max_length": 32}, 0)])
def test_rows_behind_the_positions_of_a_model_are_warned_of(options, times, tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        sft(tmp_path, config={"max_position_embeddings": 32}, **options)
    assert warned(caplog, "of up to 41 tokens, go past the 32 positions that the model was made for") == times


def test_a_dropout_that_is_no_share_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"attention_dropout=2, and it is a share of activations, from 0 to 1"):
        sft(tmp_path, config={"attention_dropout": 2})


def test_dropouts_of_a_part_are_looked_at():
    check_dropouts(CLIPConfig())
    with pytest.raises(ValueError, match="attention_dropout=-1"):
        check_dropouts(CLIPConfig(vision_config={"attention_dropout": -1}))


@pytest.mark.parametrize("saves", ["no", "steps"])
def test_an_output_folder_that_cannot_be_made_is_refused(saves):
    with pytest.raises(
        ValueError, match=r"output_dir='/proc/x/y' cannot be written: no folder can be made in '/proc' \(No such file"
    ):
        trainer("dpo", Path("/proc/x/y"), save_strategy=saves)


def test_an_output_folder_that_can_be_made_is_not_made_by_a_refused_run(tmp_path):
    with pytest.raises(ValueError, match="Rename the columns"):
        trainer("dpo", tmp_path / "a" / "b", dataset=Dataset.from_list([{"words": "a"}]), save_strategy="steps")
    assert not [*tmp_path.iterdir()]
