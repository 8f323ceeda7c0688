"""Weights as they are counted before a plan, against those that a trace finds; and what a count refuses."""

from __future__ import annotations

from typing import Any

import pytest
from datasets import Dataset
from peft import LoraConfig
from transformers import BitsAndBytesConfig, LlamaConfig

import lowtide
import lowtide.planner.plan as of_plan
from lowtide.demo.model import make_model, make_tokenizer
from lowtide.methods import METHODS
from lowtide.planner.candidate import PlannedRun, counted_weights
from lowtide.planner.devices import device_named
from lowtide.planner.estimate import estimate_run
from lowtide.planner.plan import COMPUTING, BelowWeights, make_plan
from lowtide.trainers import budget

ROWS = Dataset.from_list([{"input_ids": list(range(3, 23)), "labels": list(range(3, 23))}] * 4)
SIZES: dict[str, Any] = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
LORA = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")


def described(*, tied: bool = False) -> LlamaConfig:
    return LlamaConfig(**SIZES, num_attention_heads=2, num_key_value_heads=2, tie_word_embeddings=tied)


def planned(*, tied: bool = False, peft_config=None, quantization_config=None, **options) -> PlannedRun:
    return PlannedRun(
        METHODS["sft"],
        described(tied=tied),
        {"save_strategy": "no", "use_cpu": True, **options},
        device_named("cpu"),
        peft_config=peft_config,
        quantization_config=quantization_config,
        prepared=True,
    )


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"tied": True},
        {"model_init_kwargs": {"dtype": "bfloat16"}},
        {"optim": "adamw_stochastic"},
        {"peft_config": LORA},
    ],
    ids=lambda given: ", ".join(given) or "plain",
)
def test_weights_are_counted_as_they_are_traced(given):
    run = planned(**given)
    counted = counted_weights(run, ROWS)
    phases = estimate_run(run.faked(ROWS, {}), run.device).phases
    assert counted is not None
    assert counted.whole == pytest.approx(min(phases[name]["weights"] for name in COMPUTING), rel=0.01)
    assert 0 < counted.layer < counted.whole / 2


def test_weights_of_4_bits_are_counted_as_such():
    pytest.importorskip("bitsandbytes")
    whole, in_4_bits = (
        counted_weights(planned(peft_config=LORA, quantization_config=each), ROWS)
        for each in (None, BitsAndBytesConfig(load_in_4bit=True))
    )
    assert whole is not None
    assert in_4_bits is not None
    assert in_4_bits.layer < whole.layer / 4


def test_streamed_weights_are_left_to_a_trace():
    assert counted_weights(planned(trained_weights="stream", optimizer_in_backward="two_pass"), ROWS) is None


def test_a_plan_below_the_weights_is_refused_before_its_rows_are_prepared(monkeypatch):
    monkeypatch.setattr(of_plan, "prepared_rows", lambda *_: pytest.fail("rows were prepared"))
    with pytest.raises(BelowWeights, match=r"the budget of 10 B is below the weights, which take .* by themselves"):
        make_plan(planned(), ROWS, 10)


def test_a_training_below_its_weights_starts_no_process(tmp_path, monkeypatch):
    monkeypatch.setattr(budget, "in_tracing_process", lambda *_, **__: pytest.fail("a process was started"))
    tokenizer = make_tokenizer()
    args = lowtide.SFTConfig(output_dir=str(tmp_path), use_cpu=True, report_to="none", memory_budget="1KiB")
    with pytest.raises(BelowWeights, match=r"the budget of 1.0 KiB is below the weights"):
        lowtide.SFTTrainer(make_model(tokenizer, seed=0), args, train_dataset=ROWS, processing_class=tokenizer)
