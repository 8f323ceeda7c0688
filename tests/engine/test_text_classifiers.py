"""Classifiers of texts without padding: what their heads give, and its gradients, against transformers' own padded
forward and its own loss."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForSequenceClassification

from lowtide.engine.forward import install, score
from lowtide.engine.heads import head_of
from lowtide.engine.heads.classes import SequenceClasses
from lowtide.engine.heads.head import Scores
from lowtide.engine.heads.value import Value
from lowtide.engine.probe import probe
from lowtide.ragged import SECOND_TEXT, RaggedBatch

SIZES = {
    **{"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48},
    **{"vocab_size": 64, "max_position_embeddings": 64, "pad_token_id": 0},
}
MODERNBERT = {
    **{"local_attention": 8, "global_attn_every_n_layers": 2, "cls_token_id": 1, "sep_token_id": 2},
    **{"bos_token_id": 1, "eos_token_id": 2},
}
RAGGED: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("bert", {}),
    "roberta": ("roberta", {}),
    "xlm-roberta": ("xlm-roberta", {}),
    "distilbert": ("distilbert", {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48}),
    "electra": ("electra", {"embedding_size": 16}),
    "albert": ("albert", {"embedding_size": 16}),
    "modernbert": ("modernbert", {**MODERNBERT, "classifier_pooling": "cls"}),
    "modernbert, mean": ("modernbert", {**MODERNBERT, "classifier_pooling": "mean"}),
    "llama": ("llama", {"num_key_value_heads": 2}),
    "gpt2": ("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 4}),
    "qwen3": ("qwen3", {"num_key_value_heads": 2, "head_dim": 8}),
}
PADDED: dict[str, tuple[str, dict[str, Any]]] = {"deberta-v2": ("deberta-v2", {}), "mpnet": ("mpnet", {})}
"""Their attention is their own."""
FAMILIES = {**RAGGED, **PADDED}
LENGTHS = (3, 11, 7, 11)
PAIRS = ("bert", "electra", "albert")
"""Models that embed which text of a pair a token is of."""


def build(family: str, labels: int = 5, **changes: Any) -> Any:
    torch.manual_seed(0)
    kind, values = FAMILIES[family]
    config = AutoConfig.for_model(kind, **{**SIZES, **values, "num_labels": labels, **changes})
    model = AutoModelForSequenceClassification.from_config(config).eval()
    for name, p in model.named_parameters():
        if "norm" not in name.lower() and "ln_" not in name:
            nn.init.normal_(p, std=0.2)
    return model


def rows() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 64, (n,), generator=generator).tolist() for n in LENGTHS]


def padded(values: list[list[int]]) -> Tensor:
    return torch.tensor([[*each, *[0] * (max(LENGTHS) - len(each))] for each in values])


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def batch_of(model: nn.Module, second: list[int] | None = None) -> RaggedBatch:
    values = {} if second is None else {SECOND_TEXT: torch.tensor(second)}
    return RaggedBatch.from_segments(rows(), score_rule=SequenceClasses.score_rule(model), row_values=values)


def check_alike(family: str, second: list[int] | None = None) -> None:
    model, labels = build(family), torch.tensor([4, 0, 2, 1])
    mask = padded([[1] * n for n in LENGTHS])
    types = {}
    if second is not None:
        begins = zip(LENGTHS, second, strict=True)
        types["token_type_ids"] = padded([[int(at >= start) for at in range(n)] for n, start in begins])
    expected = model(input_ids=padded(rows()), attention_mask=mask, labels=labels, **types).loss
    reference = gradients(model, expected)

    install(model, padding_free=family in RAGGED)
    output = score(model, batch_of(model, second), padding_free=family in RAGGED)
    found = nn.functional.cross_entropy(output.stats["logits"], labels)

    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    ours = gradients(model, found)
    assert ours.keys() == reference.keys()
    for name, gradient in reference.items():
        assert (ours[name] - gradient).norm() <= 1e-5 * gradient.norm() + 1e-6, name


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_are_those_of_transformers(family: str):
    check_alike(family)


@pytest.mark.parametrize("family", PAIRS)
def test_the_second_text_of_a_pair_is_told_apart(family: str):
    check_alike(family, second=[2, 11, 3, 6])


def test_padded_rows_tell_the_second_text_apart(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delitem(RAGGED, "bert")
    check_alike("bert", second=[2, 11, 3, 6])


@pytest.mark.parametrize("family", FAMILIES)
def test_the_probe_tells_who_can_run_without_padding(family: str):
    assert probe(build(family)).isolated is (family in RAGGED)


@pytest.mark.parametrize("family", ["bert", "roberta", "llama"])
def test_a_new_head_is_proved_too(family: str):
    torch.manual_seed(0)
    kind, values = FAMILIES[family]
    config = AutoConfig.for_model(kind, **{**SIZES, **values, "num_labels": 3})
    assert probe(AutoModelForSequenceClassification.from_config(config)).isolated


def test_the_head_is_found_on_a_model():
    assert head_of(build("bert")) is SequenceClasses
    assert head_of(build("llama")) is SequenceClasses
    assert head_of(build("bert", labels=1)) is SequenceClasses
    assert head_of(build("llama", labels=1)) is Value


def test_a_reward_models_value_is_read_as_a_label():
    model = build("llama", labels=1)
    install(model)
    batch = batch_of(model)
    values = score(model, batch).stats["values"]
    logits = score(model, batch, Scores(batch.score_index, batch.score_target, head=SequenceClasses)).stats["logits"]
    torch.testing.assert_close(logits[:, 0], values)


def test_padding_at_the_end_is_passed_over_as_by_transformers():
    model = build("llama")
    tokens = [5, 6, 7, 0, 0]
    expected = model(input_ids=torch.tensor([tokens])).logits
    install(model)
    batch = RaggedBatch.from_segments([tokens], score_rule=SequenceClasses.score_rule(model))
    torch.testing.assert_close(score(model, batch).stats["logits"], expected)


def test_a_mean_needs_whole_texts():
    model = build("modernbert, mean")
    with pytest.raises(ValueError, match=r"classifier_pooling='mean'.* leave sp_size and cp_size out"):
        SequenceClasses.outputs(model, torch.zeros(4, 32), Scores(torch.tensor([0]), torch.tensor([0])))
