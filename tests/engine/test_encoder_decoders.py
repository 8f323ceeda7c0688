"""Encoder-decoders on ragged pairs against their own forward on padded batches: losses, gradients, positions, heads."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, DataCollatorForSeq2Seq

from lowtide.engine.encoder_decoder import PairPlan
from lowtide.engine.forward import install, score
from lowtide.engine.heads import head_of
from lowtide.engine.heads.sequence_to_sequence import SequenceToSequence
from lowtide.engine.probe import probe
from lowtide.ragged import RaggedBatch
from lowtide.score_rules import ShiftedRight
from tests.support.marks import slow_but
from tests.support.models.pairs_of_texts import END, FAMILIES, OF_BART, PAD, build, tokenized, tokenizer

MORE = {**FAMILIES, "blenderbot": OF_BART}


def batch_of(model: Any, rows: Any) -> RaggedBatch:
    rule = SequenceToSequence.score_rule(model)
    return RaggedBatch.from_pairs([(row["input_ids"], row["labels"]) for row in rows], rule)


def gradients(model: Any) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        assert (found[name] - grad).norm() <= 1e-5 * grad.norm() + 1e-6, name


@pytest.fixture
def four() -> list[dict[str, list[int]]]:
    return list(tokenized(4))


@pytest.mark.parametrize("padding_free", [True, False])
@pytest.mark.parametrize("family", slow_but(["bart", "mbart", "marian", "t5"], MORE))
def test_losses_and_gradients_are_those_of_padded_batches(family: str, padding_free: bool, four: list):
    model = build(family) if family in FAMILIES else other_model(family)
    theirs = copy.deepcopy(model)
    padded = DataCollatorForSeq2Seq(tokenizer(), theirs)(copy.deepcopy(four))
    expected = theirs(**{name: torch.as_tensor(each) for name, each in padded.items()}).loss
    expected.backward()
    install(model, padding_free=padding_free)
    batch = batch_of(model, four)
    loss = -score(model, batch, padding_free=padding_free).scored.mean()
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0.0)
    assert_same(gradients(model), gradients(theirs))


def other_model(family: str) -> Any:
    torch.manual_seed(0)
    ids = {"vocab_size": len(tokenizer()), "pad_token_id": PAD, "eos_token_id": END}
    return AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model(family, **{**ids, **MORE[family]}))


@pytest.mark.parametrize("family", ["bart", "t5"])
def test_a_source_that_several_rows_have_is_computed_once(family: str, four: list):
    model = build(family)
    install(model)
    rows = [four[0], {**four[1], "input_ids": four[0]["input_ids"]}, four[2]]
    batch = batch_of(model, rows)
    shared = batch.share_prefixes()
    assert shared.tokens == batch.tokens - len(four[0]["input_ids"])
    torch.testing.assert_close(score(model, shared).scored, score(model, batch).scored)


@pytest.mark.parametrize("family", ["bart", "t5"])
def test_rows_that_are_selected_keep_their_numbers(family: str, four: list):
    model = build(family)
    install(model)
    batch = batch_of(model, four)
    whole = score(model, batch).scored
    parts = [score(model, part).scored for part in (batch.select_rows([0, 2]), batch.select_rows([1, 3]))]
    lengths = [len(row["labels"]) for row in four]
    first, second, third, fourth = whole.split(lengths)
    torch.testing.assert_close(torch.cat(parts), torch.cat([first, third, second, fourth]))


@pytest.mark.parametrize("family", slow_but(["bart", "t5"], MORE))
def test_the_probe_proves_the_family(family: str):
    found = probe(build(family) if family in FAMILIES else other_model(family))
    assert found.isolated
    assert found.shares_prefixes


def test_the_probe_sees_positions_that_go_on_through_all_rows(monkeypatch: pytest.MonkeyPatch):
    model: Any = build("bart")
    plain = PairPlan.build

    def counted_on(batch: RaggedBatch) -> Any:
        plan, *tokens = plain(batch)
        source = replace(plan.source, positions=torch.arange(plan.source.tokens))
        return replace(plan, source=source), *tokens

    monkeypatch.setattr(PairPlan, "build", counted_on)
    found = probe(model)
    assert found.ragged_error > found.tolerance
    assert not found.isolated


def test_generation_is_the_models_own(four: list):
    model = build("t5")
    plain = copy.deepcopy(model)
    install(model)
    inputs = torch.tensor([four[0]["input_ids"]])
    assert torch.equal(model.generate(inputs, max_new_tokens=5), plain.generate(inputs, max_new_tokens=5))


STARTS = {
    "bart": ShiftedRight(END, PAD),
    "t5": ShiftedRight(PAD, PAD),
    "mbart": ShiftedRight(None, PAD),
    "blenderbot": ShiftedRight(END, PAD),
}


@pytest.mark.parametrize("family", STARTS)
def test_what_a_decoder_is_given_is_asked_of_the_model(family: str):
    model = build(family) if family in FAMILIES else other_model(family)
    assert head_of(model) is SequenceToSequence
    rule = SequenceToSequence.score_rule(model)
    assert rule == STARTS[family]
    start = 9 if rule.start is None else rule.start
    assert rule.tokens([7, -100, 9]) == [start, 7, PAD]


@pytest.mark.parametrize("name", ["decoder_start_token_id", "pad_token_id"])
def test_a_config_without_the_token_that_starts_targets_is_refused(name: str):
    model = build("bart")
    setattr(model.config, name, None)
    with pytest.raises(ValueError, match=rf"has no {name}.*set model.config.{name}"):
        SequenceToSequence.score_rule(model)


def test_a_causal_model_has_no_such_head():
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", vocab_size=20, **sizes))
    assert SequenceToSequence.why_not(model) == "is no encoder-decoder, and reads no source"


def test_a_model_that_is_not_known_runs_padded():
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": PAD}
    config = AutoConfig.for_model("umt5", vocab_size=len(tokenizer()), pad_token_id=PAD, **sizes)
    found = probe(AutoModelForSeq2SeqLM.from_config(config))
    assert found.head_error < found.tolerance
    assert not found.isolated
