"""PEFT's prompt learning runs padded, and gives the values and gradients of the plain PEFT forward."""

from __future__ import annotations

import pytest
import torch
from peft import (
    MultitaskPromptTuningConfig,
    PrefixTuningConfig,
    PromptEncoderConfig,
    PromptTuningConfig,
    get_peft_model,
)

from lowtide.engine.forward import install, pad, score
from lowtide.ragged import RaggedBatch
from lowtide.trainers.reports.start import StartReport
from tests.support.matrix.matrix import build, make, tokenizer
from tests.support.matrix.matrix import watched as run

KINDS = {
    "prompt tuning": PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
    "prompt encoder": PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=3, encoder_hidden_size=16),
    "prefix tuning": PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5),
}


@pytest.mark.parametrize("config", KINDS.values(), ids=KINDS)
def test_values_and_gradients_are_those_of_the_plain_forward(config):
    torch.manual_seed(1)
    model = get_peft_model(build("SFT", 64), config).train()
    batch = RaggedBatch.from_segments([[5, 6, 7, 8, 9], [10, 11], [12, 13, 14, 15, 16, 17, 18]])
    inputs, index = pad(batch)
    longest = inputs["input_ids"].shape[1]
    logits = model(**inputs).logits[:, -longest:]
    wanted = torch.log_softmax(logits.flatten(0, 1)[index], -1).gather(-1, batch.score_target[:, None])[:, 0]
    trained = [p for p in model.parameters() if p.requires_grad]
    expected = torch.autograd.grad(wanted.mean(), trained)
    install(model, padding_free=False)
    found = score(model, batch, padding_free=False).scored
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    for got, each in zip(torch.autograd.grad(found.mean(), trained), expected, strict=True):
        torch.testing.assert_close(got, each, rtol=1e-3, atol=1e-6)
        assert each.abs().max() > 0
    with model.disable_adapter():
        off = score(model, batch, padding_free=False).scored
    plain = build("SFT", 64)
    install(plain)
    torch.testing.assert_close(off, score(plain, batch).scored, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["SFT", "DPO", "KTO"])
@pytest.mark.parametrize("config", KINDS.values(), ids=KINDS)
def test_a_trainer_trains_them_and_says_how(config, kind):
    trainer = make(kind, peft_config=config, max_steps=2)
    trained = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}
    (report,) = [each for each in trainer.callback_handler.callbacks if isinstance(each, StartReport)]
    assert f"puts {config.num_virtual_tokens} virtual tokens before each padded row" in dict(report.lines())["path"]
    assert torch.isfinite(torch.tensor(run(trainer).losses)).all()
    after = dict(trainer.model.named_parameters())
    assert all(not torch.equal(each, after[name]) for name, each in trained.items())


def test_checkpointing_is_off_with_a_prefix_and_refused_where_it_is_asked_for(caplog, tmp_path):
    from lowtide import SFTConfig, SFTTrainer
    from tests.support.matrix.matrix import rows

    def made(**more) -> SFTTrainer:
        args = SFTConfig(output_dir=str(tmp_path), use_cpu=True, report_to="none", **more)
        parts = {"train_dataset": rows("SFT"), "processing_class": tokenizer(), "peft_config": KINDS["prefix tuning"]}
        return SFTTrainer(build("SFT", 64), args, **parts)

    assert not made().args.gradient_checkpointing
    assert "gradient_checkpointing is off" in caplog.text
    with pytest.raises(ValueError, match="set gradient_checkpointing=False"):
        made(gradient_checkpointing=True)


def test_prompts_of_several_tasks_are_refused():
    config = MultitaskPromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2, num_tasks=2)
    with pytest.raises(ValueError, match="MultitaskPromptTuningConfig puts virtual tokens before each row by"):
        make("SFT", peft_config=config)
