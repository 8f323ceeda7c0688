"""Families whose attention chooses which keys a token sees run padded, where their own attention does it."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from lowtide.engine.attention import OWN_MASK
from lowtide.engine.forward import install, score
from lowtide.engine.probe import probe
from lowtide.ragged import RaggedBatch
from tests.support.models.architectures import COMMON, build, randomize
from tests.support.models.causal_families import tiny_causal, tiny_config
from tests.support.references.reference import reference_logprobs

FAMILIES: dict[str, dict[str, Any]] = {
    "minimax_m3_vl_text": {
        "head_dim": 8,
        "layer_types": ["minimax_m3_sparse", "full_attention"],
        "index_block_size": 4,
        "index_topk_blocks": 2,
        "index_n_heads": 2,
        "index_head_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
}


def tiny(family: str) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**COMMON, "max_position_embeddings": 512, **FAMILIES[family]})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    randomize(model, 0, 0.1)
    return model.eval()


def test_an_indexer_is_seen_before_a_row_is_long_enough_for_it():
    """The probe's rows have 19 tokens at most, of which this indexer leaves out none."""
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(
            "minimax_m3_vl_text", **{**COMMON, **FAMILIES["minimax_m3_vl_text"], "index_block_size": 64}
        ),
        attn_implementation="eager",
    )
    found = probe(model)
    assert not found.isolated
    assert "MiniMaxM3VLIndexer" in str(found.error)


def test_rows_beyond_what_it_chooses_are_the_models_own():
    model = tiny("minimax_m3_vl_text")
    rows = [torch.randint(3, 100, (length,)).tolist() for length in (40, 7, 70)]
    wanted = torch.cat(reference_logprobs(model, rows))
    install(model, padding_free=False)
    got = score(model, RaggedBatch.from_segments(rows), padding_free=False).scored
    torch.testing.assert_close(got, wanted, atol=1e-5, rtol=0)


INDEXED = ("axk2", "deepseek_v32", "glm_moe_dsa", "hy_v4", "dots3_note_text")


@pytest.mark.parametrize("kind", INDEXED)
def test_padding_changes_nothing_where_an_indexer_scores_no_keys_alike(kind: str) -> None:
    model = tiny_causal(kind)
    rows = [torch.randint(3, 100, (length,)).tolist() for length in (40, 7, 70)]
    alone = torch.cat([each for row in rows for each in reference_logprobs(model, [row])])
    install(model, padding_free=False)
    found = score(model, RaggedBatch.from_segments(rows), padding_free=False).scored
    torch.testing.assert_close(found, alone, atol=1e-5, rtol=0)


def test_which_of_keys_that_score_alike_are_seen_depends_on_a_batchs_length() -> None:
    """It is so in the model's own forward, whose padded batch is what runs."""
    config = tiny_config("deepseek_v32")
    config.index_n_heads = 2  # of which each second key has none above zero, so that many score zero
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    rows = [torch.randint(3, 100, (length,)).tolist() for length in (40, 7, 70)]
    padded = torch.cat(reference_logprobs(model, rows))
    alone = torch.cat([each for row in rows for each in reference_logprobs(model, [row])])
    assert (padded - alone).abs().max() > 1e-3
    install(model, padding_free=False)
    found = score(model, RaggedBatch.from_segments(rows), padding_free=False).scored
    torch.testing.assert_close(found, padded, atol=1e-5, rtol=0)


def test_a_mask_that_a_layer_makes_is_not_passed_over():
    model = build("llama")
    layer = model.model.layers[0].self_attn
    layer.forward = partial(_with_mask, layer.forward)
    install(model)
    with pytest.raises(ValueError, match=OWN_MASK):
        score(model, RaggedBatch.from_segments([[5, 6, 7], [8, 9]]))


def test_positions_that_run_on_through_a_batch_are_seen_under_small_weights():
    torch.manual_seed(0)
    sizes = {"d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 48, "dropout": 0.0}
    config = AutoConfig.for_model("blenderbot-small", vocab_size=101, is_decoder=True, use_cache=False, **sizes)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    assert not probe(model).isolated


def _with_mask(forward: Any, hidden_states: torch.Tensor, **kwargs: Any) -> Any:
    tokens = hidden_states.shape[1]
    return forward(
        hidden_states, **{**kwargs, "attention_mask": torch.ones(1, 1, tokens, tokens, dtype=torch.bool).tril(-1)}
    )
