"""Encoders without padding: what their heads give, and its gradients, against transformers' own padded forward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForMaskedLM, AutoModelForTokenClassification

from lowtide.engine.forward import install, score
from lowtide.engine.heads import head_of
from lowtide.engine.heads.classes import TokenClasses
from lowtide.engine.heads.masked_language_model import MaskedLanguageModel
from lowtide.engine.positions import position_table
from lowtide.engine.probe import probe
from lowtide.ops.logits.linear_logprobs import Want
from lowtide.ragged import RaggedBatch
from lowtide.score_rules import IGNORE, OWN_TOKEN

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "vocab_size": 64,
    "max_position_embeddings": 64,
}
RAGGED: dict[str, dict[str, Any]] = {
    "bert": {},
    "roberta": {},
    "xlm-roberta": {},
    "distilbert": {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48},
    "electra": {"embedding_size": 16},
    "albert": {"embedding_size": 16},
    "modernbert": {
        **{"local_attention": 8, "global_attn_every_n_layers": 2, "pad_token_id": 0},
        **{"cls_token_id": 1, "sep_token_id": 2, "bos_token_id": 1, "eos_token_id": 2},
    },
}
PADDED: dict[str, dict[str, Any]] = {"deberta-v2": {}, "mpnet": {}}
"""Their attention is their own."""
FAMILIES = {**RAGGED, **PADDED}
CLASSES = {"tokens": AutoModelForTokenClassification, "masked": AutoModelForMaskedLM}
LENGTHS = (3, 11, 7, 11)


def build(family: str, kind: str) -> Any:
    torch.manual_seed(0)
    labels = {"num_labels": 5} if kind == "tokens" else {}
    config = AutoConfig.for_model(family, **SIZES, **labels, **FAMILIES[family])
    model = CLASSES[kind].from_config(config).eval()
    for name, p in model.named_parameters():
        if "norm" not in name.lower():
            nn.init.normal_(p, std=0.2)
    return model


def rows(classes: int) -> tuple[list[list[int]], list[list[int]]]:
    """Tokens, and a label for about half of them."""
    generator = torch.Generator().manual_seed(1)
    tokens = [torch.randint(3, 64, (n,), generator=generator) for n in LENGTHS]
    labels = [torch.randint(classes, (n,), generator=generator) for n in LENGTHS]
    kept = [torch.rand(n, generator=generator) < 0.5 for n in LENGTHS]
    masked = [label.where(keep, IGNORE) for label, keep in zip(labels, kept, strict=True)]
    return [each.tolist() for each in tokens], [each.tolist() for each in masked]


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def dense_loss(model: Any, tokens: list[list[int]], labels: list[list[int]]) -> Tensor:
    """Of transformers' own forward on a padded batch."""
    longest, pad = max(map(len, tokens)), model.config.pad_token_id or 0

    def padded(values: list[list[int]], with_value: int) -> Tensor:
        return torch.tensor([[*each, *[with_value] * (longest - len(each))] for each in values])

    mask = padded([[1] * len(each) for each in tokens], 0)
    return model(input_ids=padded(tokens, pad), attention_mask=mask, labels=padded(labels, IGNORE)).loss


def our_loss(model: Any, batch: RaggedBatch, padding_free: bool) -> Tensor:
    output = score(model, batch, padding_free=padding_free)
    if head_of(model) is TokenClasses:
        return nn.functional.cross_entropy(output.stats["logits"], batch.score_target)
    return -output.stats["logprobs"].mean()


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_are_those_of_transformers(family: str, kind: str):
    tokens, labels = rows(5 if kind == "tokens" else 64)
    model = build(family, kind)
    expected = dense_loss(model, tokens, labels)
    reference = gradients(model, expected)

    install(model, padding_free=family in RAGGED)
    batch = RaggedBatch.from_segments(tokens, labels, score_rule=OWN_TOKEN)
    found = our_loss(model, batch, family in RAGGED)

    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    ours = gradients(model, found)
    assert ours.keys() == reference.keys()
    for name, gradient in reference.items():
        assert (ours[name] - gradient).norm() <= 1e-4 * gradient.norm() + 1e-7, name


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_probe_tells_who_can_run_without_padding(family: str, kind: str):
    found = probe(build(family, kind))
    assert found.isolated is (family in RAGGED)


def test_positions_that_are_counted_otherwise_are_found_out(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("lowtide.engine.forward.first_position", lambda model: 0)
    assert not probe(build("roberta", "tokens")).isolated


@pytest.mark.parametrize(("kind", "head"), [("tokens", TokenClasses), ("masked", MaskedLanguageModel)])
def test_a_model_is_known_by_its_head(kind: str, head: type):
    assert head_of(build("bert", kind)) is head


def test_a_masked_head_gives_all_that_a_language_model_does():
    tokens, labels = rows(64)
    model = build("bert", "masked")
    install(model)
    batch = RaggedBatch.from_segments(tokens, labels, score_rule=OWN_TOKEN)
    want = Want(entropies=True, mean_logprobs=True, top1=True)
    found = score(model, batch, want=want).stats
    logits = [model(input_ids=torch.tensor([each])).logits[0] for each in tokens]
    expected = torch.log_softmax(torch.cat(logits)[batch.score_index], -1)
    torch.testing.assert_close(found["entropies"], -(expected.exp() * expected).sum(-1))
    torch.testing.assert_close(found["mean_logprobs"], expected.mean(-1))
    assert torch.equal(found["top1"], expected.argmax(-1) == batch.score_target)


@pytest.mark.parametrize("kind", CLASSES)
def test_a_model_in_float64_is_proved_in_float64(kind: str):
    found = probe(build("bert", kind).double())
    assert found.isolated
    assert found.leak < 1e-12


@pytest.mark.parametrize(("family", "taken"), [("bert", 0), ("roberta", 2), ("modernbert", None)])
def test_a_row_may_be_as_long_as_there_are_positions_for(family: str, taken: int | None):
    model = AutoModelForMaskedLM.from_config(AutoConfig.for_model(family, **SIZES, **RAGGED[family]))
    most = position_table(model)
    if taken is None:
        assert most is None  # positions are computed
        return
    assert most == SIZES["max_position_embeddings"] - taken
    longest = torch.zeros(1, most, dtype=torch.long).fill_(3)
    model(longest)
    with pytest.raises((IndexError, RuntimeError)):
        model(torch.cat([longest, longest[:, :1]], dim=1))
