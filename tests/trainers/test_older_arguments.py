"""What notebooks for an older TRL pass to a trainer, and what they do with it after training."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import TrainingArguments

from lowtide import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer
from tests.support.matrix.matrix import COMMON, build, folder, rows, tokenizer

PLAIN = {name: value for name, value in COMMON.items() if name != "rehearsal"} | {"output_dir": "run", "max_steps": 1}


def plain(**options) -> TrainingArguments:
    return TrainingArguments(**{**PLAIN, "output_dir": str(folder()), **options})


def test_arguments_of_an_older_trainer_are_options_of_the_config(caplog):
    texts = rows("SFT").rename_column("text", "body")
    trainer = SFTTrainer(
        model=build("SFT", 64),
        args=plain(),
        train_dataset=texts,
        tokenizer=tokenizer(),
        dataset_text_field="body",
        max_seq_length=20,
        dataset_num_proc=1,
        packing=True,
        dataset_batch_size=10,
    )
    assert isinstance(trainer.args, SFTConfig)
    assert (trainer.args.max_length, trainer.args.packing, trainer.args.dataset_text_field) == (20, True, "body")
    assert max(map(len, trainer.train_dataset["input_ids"])) <= 20
    assert "seq_lengths" in trainer.train_dataset.column_names
    assert "max_seq_length=20 is taken as max_length of SFTConfig" in caplog.text
    assert "dataset_batch_size=10 has no effect" in caplog.text
    trainer.train()


def test_arguments_go_beside_a_config_which_is_left_alone():
    args = DPOConfig(**{**PLAIN, "output_dir": str(folder())})
    options = {"beta": 0.5, "max_length": 64, "max_prompt_length": 8, "label_pad_token_id": -100}
    trainer = DPOTrainer(
        build("DPO", 64),
        args=args,
        train_dataset=rows("DPO"),
        tokenizer=tokenizer(),
        is_encoder_decoder=False,
        **options,
    )
    assert (trainer.args.beta, trainer.args.max_length, trainer.args.max_prompt_length) == (0.5, 64, 8)
    assert (args.beta, args.max_length, args.max_prompt_length) == (0.1, 1024, None)
    assert max(map(len, trainer.train_dataset["prompt_ids"])) <= 8


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"max_seq_length": 8}, ValueError, r"max_seq_length=8 contradicts max_length=16 of its SFTConfig"),
        ({"max_sequence": 8}, TypeError, r"SFTTrainer has no argument 'max_sequence', and SFTConfig no such option"),
        ({"packing": True, "packing_strategy": "tight"}, ValueError, r"packing_strategy"),
        ({"generate_during_eval": True}, ValueError, r"generate_during_eval=True is not supported"),
        ({"processing_class": object()}, ValueError, r"two names for one argument"),
    ],
)
def test_what_contradicts_is_refused(given, error, message):
    args = SFTConfig(**{**PLAIN, "output_dir": str(folder()), "max_length": 16})
    with pytest.raises(error, match=message):
        SFTTrainer(build("SFT", 64), args, train_dataset=rows("SFT"), tokenizer=tokenizer(), **given)


def test_no_training_set_is_refused_at_construction():
    with pytest.raises(ValueError, match="SFTTrainer: `train_dataset` is required, and it is None"):
        SFTTrainer(build("SFT", 64), plain(), processing_class=tokenizer())


@pytest.mark.parametrize("kind", ["SFT", "DPO"])
def test_predict_takes_rows_that_are_not_prepared(kind):
    trainers = {"SFT": SFTTrainer, "DPO": DPOTrainer}
    trainer = trainers[kind](build(kind, 64), args=plain(), train_dataset=rows(kind), processing_class=tokenizer())
    found = trainer.predict(rows(kind))
    assert found.metrics["test_loss"] == pytest.approx(trainer.evaluate(rows(kind))["eval_loss"])
    assert found.predictions.shape == found.label_ids.shape == (len(found.predictions),)
    if kind == "SFT":
        assert found.metrics["test_loss"] == pytest.approx(-float(np.mean(found.predictions)), rel=1e-5)


def test_prompts_stay_beside_the_rows_of_the_evaluation_set():
    held_out = Dataset.from_list([{"prompt": f"{n}+{n}=", "completion": f"{2 * n}"} for n in range(6)])
    args = plain(eval_strategy="steps", eval_steps=1)
    trainer = SFTTrainer(
        build("SFT", 64), args, train_dataset=held_out, eval_dataset=held_out, processing_class=tokenizer()
    )
    assert trainer.eval_dataset["prompt"][:2] == ["0+0=", "1+1="]
    trainer.train()
    assert torch.isfinite(torch.tensor(trainer.evaluate()["eval_loss"]))
    pairs = rows("DPO")
    several = DPOTrainer(
        build("DPO", 64), args=args, train_dataset=pairs, eval_dataset={"a": pairs}, processing_class=tokenizer()
    )
    assert several.eval_dataset["a"]["prompt"][3] == pairs["prompt"][3]
    several.evaluate()
