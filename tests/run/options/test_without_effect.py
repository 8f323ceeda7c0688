"""Options of other trainers' scripts that change nothing here: the numbers are the same, and the report says why."""

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from lowtide import SFTConfig, SFTTrainer
from lowtide.trainers.reports.start import StartReport
from tests.support.matrix.matrix import build, folder, make, rows, tokenizer
from tests.support.matrix.matrix import watched as run


def said(trainer) -> dict[str, str]:
    (report,) = [each for each in trainer.callback_handler.callbacks if isinstance(each, StartReport)]
    return dict(report.lines())


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("SFT", {"pad_to_multiple_of": 8}),
        ("SFT", {"pad_token": "<pad>"}),
        ("SFT", {"label_names": ["labels"]}),
        ("SFT", {"ddp_find_unused_parameters": False}),
        ("SFT", {"liger_kernel_config": {"rope": False}}),
        ("SFT", {"optim_target_modules": "all-linear"}),
        ("SFT", {"greater_is_better": True}),
        ("DPO", {"label_smoothing_factor": 0.1}),
    ],
)
def test_an_option_without_effect_is_accepted_and_said(kind, options):
    ((name, value),) = options.items()
    with_it = make(kind, max_steps=2, **options)
    assert said(with_it)[name].startswith(f"{value!r} has no effect: ")
    plain = make(kind, max_steps=2)
    assert name not in said(plain)
    assert run(with_it).losses == run(plain).losses


@pytest.mark.parametrize(
    ("more", "has_effect"), [({}, False), ({"packing": True}, True), ({"eval_packing": True}, True)]
)
def test_a_strategy_without_packing_is_said(more, has_effect):
    lines = said(make("SFT", max_steps=2, packing_strategy="wrapped", **more))
    assert ("packing_strategy" not in lines) == has_effect
    assert has_effect or lines["packing_strategy"] == "'wrapped' has no effect: it requires packing=True"


@pytest.mark.parametrize(("kind", "said_so"), [("constant", True), ("constant_with_warmup", False), ("linear", False)])
def test_warmup_of_a_schedule_without_one_is_said(kind, said_so):
    lines = said(make("SFT", max_steps=2, warmup_steps=1, lr_scheduler_type=kind))
    assert ("warmup_steps" in lines) == said_so
    if said_so:
        assert lines["warmup_steps"].startswith("1 has no effect: lr_scheduler_type='constant' has no warmup")


@pytest.mark.parametrize("name", ["packing", "eval_packing"])
@pytest.mark.parametrize("padding_free", [True, False])
def test_packing_of_rows_that_are_padded_again_is_warned_of(name, padding_free, caplog):
    options: dict[str, Any] = {name: True}
    make("SFT", max_steps=2, padding_free=padding_free, **options)
    assert caplog.text.count(f"{name}=True saves no memory in a run that pads (padding_free=False)") == (
        not padding_free
    )


@pytest.mark.parametrize(
    "asked", ["flash_attention_2", "flash_attention_3", "sdpa", "eager", "kernels-community/flash-attn2"]
)
def test_an_attention_that_is_asked_for_without_padding_is_replaced_and_said(asked, tmp_path):
    build("SFT", 64).save_pretrained(tmp_path / "model")
    args = SFTConfig(
        output_dir=str(tmp_path),
        padding_free=True,
        model_init_kwargs={"attn_implementation": asked},
        max_steps=1,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
    )
    trainer = SFTTrainer(str(tmp_path / "model"), args, train_dataset=rows("SFT"), processing_class=tokenizer())
    text = said(trainer)["attention"]
    assert text.startswith("scaled_dot_product_attention on segments of equal length together. ")
    assert f"{asked!r} is not used" in text
    trainer.train()


def test_the_padded_path_runs_what_is_asked_for(tmp_path):
    build("SFT", 64).save_pretrained(tmp_path / "model")
    options = {"output_dir": str(tmp_path), "use_cpu": True, "report_to": "none"}
    args = SFTConfig(padding_free=False, model_init_kwargs={"attn_implementation": "eager"}, **options)
    trainer = SFTTrainer(str(tmp_path / "model"), args, train_dataset=rows("SFT"), processing_class=tokenizer())
    assert trainer.model.config._attn_implementation == "eager"
    assert "attention" not in said(trainer)


def test_arguments_of_loading_have_no_effect_on_a_loaded_model(caplog):
    model = AutoModelForCausalLM.from_config(build("SFT", 64).config)
    trainer = make("SFT", model=model, model_init_kwargs={"dtype": "bfloat16"}, output_dir=str(folder()))
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}
    assert "have no effect: the model that was passed is loaded already" in caplog.text


def test_without_a_report_options_without_effect_are_warned_of(caplog):
    make("SFT", max_steps=1, disable_tqdm=True, liger_kernel_config={"nowhere": True}).train()
    assert "liger_kernel_config: {'nowhere': True} has no effect: " in caplog.text
