"""What a loaded model has to be. Other arguments are in `tests/faults/bad_arguments.py`."""

import pytest

from lowtide.engine.heads.value import Value
from lowtide.run.inputs.arguments import check_kind
from tests.support.matrix.matrix import build, make


def test_a_reward_model_as_a_reference_is_refused():
    trainer = make("DPO")
    with pytest.raises(ValueError, match="ref_model is of class LlamaForSequenceClassification"):
        type(trainer)(
            model=trainer.model,
            ref_model=build("Reward", 64),
            args=trainer.args,
            train_dataset=trainer.train_dataset,
            processing_class=trainer.tokenizer,
        )


def test_a_model_on_meta_is_refused():
    with pytest.raises(ValueError, match=r"model is on the meta device \(model.embed_tokens.weight"):
        make("SFT", model=build("SFT", 64).to("meta"))
    check_kind(build("Reward", 64), head=Value)


def test_flash_attention_on_the_padded_path_of_a_cpu_is_refused():
    model = build("SFT", 64)
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match="attn_implementation='flash_attention_2' needs a GPU"):
        make("SFT", model=model, padding_free=False)
