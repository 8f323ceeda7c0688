"""What is read off a trainer under TRL's names."""

import pytest
import torch
from peft import LoraConfig
from transformers import AutoConfig, AutoModelForCausalLM

from lowtide.trainers.attributes import OPTIONS
from tests.support.matrix.matrix import build, make

OF_SFT = ("loss_type", "max_length", "max_prompt_length", "max_completion_length")


def test_options_are_attributes_of_the_trainers_that_have_them():
    trainer = make("DPO", beta=0.3, max_length=64, label_smoothing=0.2, loss_type="robust", loss_weights=[2.0])
    assert (trainer.beta, trainer.max_length, trainer.label_smoothing) == (0.3, 64, 0.2)
    assert (trainer.loss_types, trainer.loss_weights) == (["robust"], [2.0])
    assert (trainer.is_encoder_decoder, trainer.padding_value) == (False, trainer.processing_class.pad_token_id)
    plain = make("SFT")
    assert [name for name in OPTIONS if hasattr(plain, name)] == sorted(OF_SFT, key=OPTIONS.index)
    with pytest.raises(AttributeError, match=r"beta is an option of .*pass DPOConfig\(beta=0.5\)"):
        trainer.beta = 0.5


def test_the_reference_is_there_where_it_is_resident():
    trainer = make("DPO")
    assert trainer.ref_model is not trainer.model
    wanted = build("DPO", 64).state_dict()
    assert all(torch.equal(wanted[name], each) for name, each in trainer.ref_model.state_dict().items())
    assert make("DPO", precompute_ref_log_probs=True).ref_model is None
    assert make("DPO", precompute_ref_log_probs=True).precompute_ref_logps
    assert make("DPO", peft_config=LoraConfig(r=2, target_modules="all-linear")).ref_model is None


def test_a_mixture_of_experts_says_whether_its_router_is_trained_evenly():
    sizes = {"hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 16, "num_hidden_layers": 1}
    config = AutoConfig.for_model(
        "qwen3_moe", vocab_size=257, num_attention_heads=2, num_key_value_heads=2, num_experts=4,
        num_experts_per_tok=2, head_dim=16, router_aux_loss_coef=0.25, **sizes,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    for coefficient in (None, 0.0):
        trainer = make("SFT", model=model, router_aux_loss_coef=coefficient)
        assert trainer.router_aux_loss_coef == (0.25 if coefficient is None else 0.0)
        assert trainer.aux_loss_enabled == (coefficient is None)
    assert not make("SFT").aux_loss_enabled
