"""Causal models that have layers of their own between the body and the vocabulary, as encoders used as decoders do: all
that reads their logits goes through these layers. And what configs say of logits by other names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lowtide.engine.forward import install, score, vocabulary
from lowtide.engine.heads.head_parts import head_parts, head_terms
from lowtide.engine.heads.next_token import NextToken
from lowtide.engine.heads.own_head import VALUE_HEAD, layers_before_head
from lowtide.engine.probe import probe
from lowtide.engine.reference import teacher_states
from lowtide.ragged import RaggedBatch
from tests.support.models.causal_families import tiny_causal
from tests.support.references.reference import reference_logprobs

ROWS = [[5, 9, 7, 20, 33, 8], [40, 6, 12], [11, 13, 17, 19, 23]]
WITH_LAYERS = ("bert", "roberta", "electra", "modernbert-decoder", "rembert")


def own_logits(model: Any) -> Tensor:
    """[scores, vocab]: of all tokens but each row's last, by the model's own forward."""
    with torch.no_grad():
        return torch.cat([model(input_ids=torch.tensor([row])).logits[0, :-1] for row in ROWS])


@pytest.mark.parametrize("kind", WITH_LAYERS)
def test_all_that_is_read_of_logits_goes_through_the_layers(kind: str) -> None:
    model: Any = tiny_causal(kind)
    assert layers_before_head(model)
    logits, logprobs = own_logits(model), torch.cat(reference_logprobs(model, ROWS))
    install(model, padding_free=False)
    batch = RaggedBatch.from_segments(ROWS)
    found = score(model, batch, padding_free=False).scored
    torch.testing.assert_close(found, logprobs, atol=1e-5, rtol=0)
    with torch.no_grad():
        read: Any = score(model, batch, padding_free=False, head=NextToken, read=lambda rows, _: rows.T)
        terms, bias = head_terms(head_parts(model), teacher_states(model, batch, padding_free=False))
    torch.testing.assert_close(read.stats["read"].T, logits, atol=1e-4, rtol=0)
    taught = sum(term.x @ term.weight.T for term in terms) + (0 if bias is None else bias)
    torch.testing.assert_close(taught, logits, atol=1e-4, rtol=0)


def test_a_value_head_beside_is_no_layer_before_the_head() -> None:
    model: Any = tiny_causal("llama")
    model.add_module(VALUE_HEAD, torch.nn.Linear(32, 1))
    assert not layers_before_head(model)


@pytest.mark.parametrize(("kind", "name"), [("recurrent_gemma", "logits_soft_cap"), ("xlstm", "output_logit_soft_cap")])
def test_a_cap_of_logits_is_known_by_each_of_its_names(kind: str, name: str) -> None:
    model: Any = tiny_causal(kind)
    assert getattr(model.config, name) == 30.0
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(10)
    wanted = torch.cat(reference_logprobs(model, ROWS))
    install(model, padding_free=False)
    found = score(model, RaggedBatch.from_segments(ROWS), padding_free=False).scored
    torch.testing.assert_close(found, wanted, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize(("kind", "tokens"), [("mllama", 101), ("moshi", 101), ("inkling_text", 96), ("llama", 101)])
def test_the_vocabulary_is_what_is_both_read_and_predicted(kind: str, tokens: int) -> None:
    assert vocabulary(tiny_causal(kind)) == tokens


@pytest.mark.parametrize(
    ("kind", "why"),
    [("cpmant", "padding after a row changes"), ("prophetnet", "makes its logits of something else")],
)
def test_the_reason_of_a_refusal_is_the_true_one(kind: str, why: str) -> None:
    with pytest.raises(ValueError, match=f"model type {kind} cannot be trained by lowtide: .*{why}"):
        probe(tiny_causal(kind))
