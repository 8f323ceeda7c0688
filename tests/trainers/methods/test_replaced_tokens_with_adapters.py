"""Replaced-token detection with adapters on the discriminator: the generator is trained whole, and saved beside."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel
from transformers import AutoModelForMaskedLM, AutoModelForPreTraining, ElectraForPreTraining

from lowtide.cli.main import main
from lowtide.engine.forward import causal_model
from tests.support.marks import slow_but
from tests.support.models.masked_texts import losses, texts, tokenizer
from tests.support.models.replaced_tokens import NO_GRADIENT, assert_near, build, make, plain_loss, run, weights

SAME: dict[str, dict[str, Any]] = {
    "padded": {"padding_free": False},
    "one row at a time": {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8},
    "stepped in backward": {"optimizer_in_backward": "two_pass"},
}


def adapters(**more: Any) -> LoraConfig:
    """Whose second matrices do not begin at 0, so that every weight has a gradient."""
    return LoraConfig(**{"r": 4, "target_modules": ["query", "dense"], "init_lora_weights": False, **more})


def test_adapters_and_generator_alone_are_trained(tmp_path: Path):
    trainer = run(tmp_path, peft_config=adapters(), max_steps=2)
    inner: Any = causal_model(trainer.model)
    assert inner.generator.electra.embeddings is inner.electra.embeddings
    assert not any("lora" in name for name, _ in inner.generator.named_parameters())
    own = {name for name, p in inner.generator.named_parameters() if "embeddings." not in name}
    trained = {name for name, p in inner.named_parameters() if p.requires_grad}
    assert trained == {f"generator.{name}" for name in own if name != "generator_lm_head.weight"} | {
        name for name, _ in inner.named_parameters() if "lora_" in name
    }


@pytest.mark.parametrize("shared", [True, False])
def test_the_loss_and_its_gradients_are_those_of_the_plain_padded_computation(shared: bool, tmp_path: Path):
    config = adapters(target_modules=["query", "dense"] if shared else ["query", "word_embeddings"])
    trainer = make(tmp_path, texts(22), peft_config=config, share_embeddings=shared, mlm_probability=0.4)
    model = trainer.model.train()
    batch = trainer.drawn(trainer.data_collator([trainer.train_dataset[row] for row in range(9)]), 0)
    found = trainer.runner.gradients(batch)
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}
    model.zero_grad()
    expected = plain_loss(causal_model(model), batch)
    expected.backward()
    torch.testing.assert_close(found, expected.detach(), rtol=1e-5, atol=1e-6)
    assert any("generator" in name for name in gradients)
    for name, p in model.named_parameters():
        if p.requires_grad and not name.endswith(NO_GRADIENT):
            scale = p.grad.abs().max() + 1e-5
            assert (gradients[name] - p.grad).abs().max() <= 1e-4 * scale, name


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_but(["one row at a time"], SAME))
def test_how_a_step_is_run_changes_no_number(name: str, tmp_path: Path):
    one, other = run(tmp_path / "a", peft_config=adapters(), **SAME[name]), run(tmp_path / "b", peft_config=adapters())
    torch.testing.assert_close(losses(one), losses(other), rtol=1e-5, atol=0.0)
    assert_near(weights(one), weights(other))


@pytest.mark.slow
def test_a_run_resumed_in_the_middle_of_an_epoch_goes_on_bit_by_bit(tmp_path: Path):
    settings = {"max_steps": 6, "per_device_train_batch_size": 3, "save_strategy": "steps", "save_steps": 2}
    whole = run(tmp_path / "whole", peft_config=adapters(), **settings)
    resumed = make(tmp_path / "whole", texts(22), peft_config=adapters(), **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    expected = weights(whole)
    assert all(torch.equal(p, expected[name]) for name, p in weights(resumed).items())
    assert weights(resumed, trained=True).keys() == weights(whole, trained=True).keys()


@pytest.mark.slow
def test_a_checkpoint_without_its_generator_is_not_resumed_from(tmp_path: Path):
    settings = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    run(tmp_path, peft_config=adapters(), **settings)
    file = tmp_path / "checkpoint-1" / "generator" / "model.safetensors"
    file.unlink()
    resumed = make(tmp_path, texts(22), peft_config=adapters(), **settings)
    with pytest.raises(ValueError, match="generator"):
        resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))


@pytest.mark.slow
def test_what_is_saved_are_adapters_that_fit_the_base_and_a_generator_that_loads(tmp_path: Path):
    build().save_pretrained(tmp_path / "base")
    tokenizer().save_pretrained(tmp_path / "base")
    trainer = run(tmp_path / "run", model=str(tmp_path / "base"), peft_config=adapters(), max_steps=2)
    trainer.save_model(str(tmp_path / "saved"))
    inner: Any = causal_model(trainer.model)

    generator = AutoModelForMaskedLM.from_pretrained(tmp_path / "saved" / "generator")
    trained = inner.generator.state_dict()
    assert all(torch.equal(value, trained[name]) for name, value in generator.state_dict().items())

    ids = torch.arange(5, 13)[None]
    with torch.no_grad():
        wanted = ElectraForPreTraining.forward(inner.eval(), ids).logits
        adapted = PeftModel.from_pretrained(
            AutoModelForPreTraining.from_pretrained(tmp_path / "base"), tmp_path / "saved"
        )
        torch.testing.assert_close(adapted(ids).logits, wanted)
        merge = ["merge", "--adapter", str(tmp_path / "saved"), "--output_dir", str(tmp_path / "merged")]
        assert main(merge) == 0
        merged = AutoModelForPreTraining.from_pretrained(tmp_path / "merged")
        assert isinstance(merged, ElectraForPreTraining)
        torch.testing.assert_close(merged(ids).logits, wanted, rtol=1e-4, atol=1e-5)

    again = make(
        tmp_path / "again", texts(4), model=str(tmp_path / "merged"), peft_config=adapters(), generator_size=None,
        generator_model_name_or_path=str(tmp_path / "saved" / "generator"),
    )  # fmt: skip
    own: Any = causal_model(again.model)
    assert torch.equal(own.generator.generator_predictions.dense.weight, trained["generator_predictions.dense.weight"])


@pytest.mark.parametrize("more", [{"target_modules": ["word_embeddings"]}, {"modules_to_save": ["embeddings"]}])
def test_adapters_of_embeddings_are_not_shared(more: dict[str, Any], tmp_path: Path):
    with pytest.raises(ValueError, match=r"share_embeddings=True: .*set share_embeddings=False"):
        make(tmp_path, texts(4), peft_config=adapters(**more))
