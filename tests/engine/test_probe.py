"""The probe tells apart what runs ragged, what must run padded and what must not run."""

import contextlib

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    GPT2Config,
    LlamaConfig,
    MiniMaxConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import SequenceClassifierOutputWithPast

from lowtide.engine import forward
from lowtide.engine.forward import install, score
from lowtide.engine.layers import mixers
from lowtide.engine.probe import probe
from lowtide.ops.recurrence import chunked
from lowtide.ragged import RaggedBatch
from tests.support.models import architectures
from tests.support.models.tiny_llama import tiny_llama

SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2}
LLAMA = LlamaConfig(**SIZES, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2)


def build(config) -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config)


def test_a_transformer_is_isolated_and_shares_prefixes():
    found = probe(build(LLAMA))
    assert found.isolated
    assert found.shares_prefixes
    assert found.head_error < 1e-5


def test_a_model_that_does_not_run_by_itself_is_named():
    model = build(LLAMA)
    model.forward = lambda *args, **kwargs: torch.zeros(1).image_outputs
    with pytest.raises(ValueError, match=r"the forward of model type llama fails in transformers .*image_outputs"):
        probe(model)


def test_recurrent_layers_that_are_not_given_the_plan_are_found_out(monkeypatch):
    model = architectures.build("bamba")
    assert probe(model).isolated
    monkeypatch.setattr(mixers, "_forward", lambda layer, *args, **given: type(layer).forward(layer, *args, **given))
    found = probe(model)
    assert not found.attends
    assert not found.isolated


def test_a_recurrence_that_forgets_its_state_between_chunks_is_found_out(monkeypatch):
    """The probe's rows are shorter than the chunks of real runs."""
    model, step = architectures.build("qwen3_5"), chunked._step
    monkeypatch.setattr(chunked, "_step", lambda *given: step(*given[:-1], None))
    assert not probe(model).isolated


def test_a_recurrent_model_whose_scan_is_not_known_runs_padded():
    model = build(MiniMaxConfig(**SIZES, num_local_experts=4, block_size=8))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    assert not probe(model).isolated
    batch = RaggedBatch.from_segments([[5, 6, 7, 8], [9, 10]])
    install(model, padding_free=False)
    padded = score(model, batch, padding_free=False).scored
    logits = model(input_ids=torch.tensor([[9, 10]])).logits
    torch.testing.assert_close(padded[-1], torch.log_softmax(logits[0, 0], -1)[10])


def test_a_model_that_leaks_is_found_out(monkeypatch):
    model = build(LLAMA)

    def leaky(batch, sequence):
        """Attention over everything before, as if the batch were one row."""
        return contextlib.nullcontext({"input_ids": batch.token_ids[None]})

    monkeypatch.setattr(forward, "ragged_inputs", leaky)
    assert not probe(model).isolated


def test_unknown_changes_to_the_logits_stop_everything():
    model = build(LLAMA)
    head = model.lm_head

    class Shifted(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x) * 3.0

    shifted = Shifted(head.in_features, head.out_features, bias=False)
    torch.nn.init.normal_(shifted.weight)
    model.lm_head = shifted
    with pytest.raises(ValueError, match="model type llama"):
        probe(model)


def test_a_head_that_cannot_be_fused_is_named():
    model = build(GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=2))
    model.lm_head = torch.nn.Bilinear(2, 2, 2)
    with pytest.raises(ValueError, match="Bilinear"):
        install(model)


def test_a_reward_model_that_reads_elsewhere_is_found_out():
    torch.manual_seed(0)
    config = LlamaConfig(**LLAMA.to_diff_dict() | {"num_labels": 1, "pad_token_id": 5})
    model = AutoModelForSequenceClassification.from_config(config)
    assert probe(model).isolated

    class AtPadding(type(model)):
        """One that reads its value at the last token whatever it is."""

        def forward(self, input_ids, **kwargs):
            hidden = self.model(input_ids, **kwargs)[0]
            return SequenceClassifierOutputWithPast(logits=self.score(hidden[:, -1]))

    with pytest.raises(ValueError, match="cannot be trained by lowtide: it makes its logits of something else"):
        probe(AtPadding(config))


FURTHER = {"intermediate_size": 64, "num_attention_heads": 4, "pad_token_id": 0}
OWN_ATTENTION = {
    "deberta-v2": {
        **{"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_biased_input": False},
        **{"share_att_key": True, "position_buckets": 32},
    },
    "roformer": {"embedding_size": 32},
}


@pytest.mark.parametrize("kind", OWN_ATTENTION)
@pytest.mark.parametrize("loader", [AutoModelForMaskedLM, AutoModelForSequenceClassification])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_small_weights_hide_no_attention_between_segments(kind, loader, dtype):
    """What a new model's segments see of each other moves its numbers by less than rounding would those of others."""
    model = loader.from_config(AutoConfig.for_model(kind, **SIZES, **FURTHER, **OWN_ATTENTION[kind])).to(dtype)
    assert not probe(model).isolated


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_with_experts_is_isolated_to_rounding(dtype):
    experts = {"head_dim": 8, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_moe", **SIZES, **FURTHER, **experts)).to(dtype)
    assert probe(model).isolated


def test_a_config_that_asks_for_attention_weights_can_be_saved(tmp_path, caplog):
    model = tiny_llama()
    vars(model.config)["_output_attentions"] = True  # as a config.json says it
    assert model.config.output_attentions
    install(model)
    assert "output_attentions=True, which has no effect" in caplog.text
    model.save_pretrained(tmp_path)
