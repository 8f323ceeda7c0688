"""A completion in several rounds: its score is that of one plain forward a round, each in its own context, added up."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, Lfm2Config, MistralConfig

from lowtide.data.batches.collate import CompletionCollator
from lowtide.data.batches.values import LENGTHS
from lowtide.engine.forward import install
from lowtide.engine.reference import FrozenModel
from lowtide.methods import METHODS
from lowtide.methods.shared.completions import completion_sums, place_in_completion
from lowtide.objectives import preference
from lowtide.objectives.preference import Pairs
from lowtide.ragged import RaggedBatch
from lowtide.step.cut import split
from lowtide.step.models import Models
from lowtide.step.train_step import train_step
from lowtide.step_plan import Limits
from tests.support.models.preference_models import SIZES, build
from tests.support.models.rounds_of_completions import dense_scores, rows_of_pairs, rows_of_singles

SIDES = ("chosen_ids", "rejected_ids")
CUTS = [Limits(), Limits(rows=1), Limits(tokens=16)]
"""A micro-batch, one for each row, and rows in pieces."""


def models(lora: bool = False) -> Any:
    """A policy, its reference and their plain copies, in float32."""
    policy, other = build(0).float(), build(1).float()
    if lora:
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(2)
        policy = get_peft_model(policy, LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False))
        install(policy)
    plain = copy.deepcopy(policy)
    inner: Any = plain.get_base_model() if lora else plain
    del inner.forward
    inner.get_input_embeddings().__dict__.pop("forward", None)
    inner.set_attn_implementation("eager")
    return policy, other, plain, inner


def expected_pairs(inner, other, rows) -> Pairs:
    found = []
    for name in SIDES:
        own = [dense_scores(inner, row, name) for row in rows]
        with torch.no_grad():
            theirs = torch.stack([dense_scores(other, row, name).sum() for row in rows])
        found.append((torch.stack([each.sum() for each in own]), theirs, torch.tensor([float(len(e)) for e in own])))
    (chosen, ref_chosen, tokens), (rejected, ref_rejected, others) = found
    return Pairs(chosen, rejected, ref_chosen, ref_rejected, tokens, others)


def assert_same(policy, plain) -> None:
    theirs = {name: each.grad for name, each in plain.named_parameters() if each.grad is not None}
    ours = {name: each.grad for name, each in policy.named_parameters() if each.grad is not None}
    assert ours.keys() == theirs.keys()
    scale = max(each.abs().max() for each in theirs.values())
    for name, grad in theirs.items():
        torch.testing.assert_close(ours[name], grad, rtol=1e-5, atol=1e-6 * scale.item(), msg=name)


@pytest.mark.parametrize(
    ("loss_type", "lora", "sharing"),
    [("sigmoid", False, True), ("ipo", False, True), ("sigmoid", True, True), ("ipo", False, False)],
)
def test_dpo_of_rounds_is_one_plain_forward_a_round(loss_type, lora, sharing):
    rows, options = rows_of_pairs(), METHODS["dpo"].options(loss_type=loss_type, beta=0.3)
    policy, other, plain, inner = models(lora)
    wanted = preference.LOSSES[loss_type].fn(expected_pairs(inner, other, rows), options).mean()
    wanted.backward()
    batch = CompletionCollator(SIDES, sharing=sharing)(rows)
    for limits in CUTS:
        policy.zero_grad()
        found = train_step(
            Models(policy, FrozenModel(other, padding_free=True)), batch, METHODS["dpo"].objective(options),
            limits=limits,
        )  # fmt: skip
        assert found.item() == pytest.approx(wanted.item(), rel=1e-6, abs=1e-6)
        assert_same(policy, plain)


@pytest.mark.parametrize(
    ("config", "more", "padding_free"),
    [
        (MistralConfig, {"sliding_window": 4}, True),
        (MistralConfig, {"sliding_window": 4}, False),
        (Lfm2Config, {"layer_types": ["conv", "full_attention"]}, True),
    ],
    ids=["window", "padded", "convolution"],
)
def test_rounds_go_on_from_a_part_of_the_prompt_in_other_layers_too(config, more, padding_free):
    rows, options = rows_of_pairs(), METHODS["dpo"].options(loss_type="sigmoid", beta=0.3)
    made, plain = [], []
    for seed in range(2):
        torch.manual_seed(seed)
        made.append(AutoModelForCausalLM.from_config(config(**SIZES, **more)).float())
        plain.append(copy.deepcopy(made[-1]))
        plain[-1].set_attn_implementation("eager")
        install(made[-1], padding_free=padding_free)
    wanted = preference.LOSSES["sigmoid"].fn(expected_pairs(*plain, rows), options).mean()
    wanted.backward()
    given = Models(made[0], FrozenModel(made[1], padding_free=padding_free), padding_free=padding_free)
    found = train_step(given, CompletionCollator(SIDES)(rows), METHODS["dpo"].objective(options), limits=Limits())
    assert found.item() == pytest.approx(wanted.item(), rel=1e-6, abs=1e-6)
    assert_same(made[0], plain[0])


@pytest.mark.parametrize("sharing", [True, False])
def test_kto_of_rounds_is_one_plain_forward_a_round(sharing):
    rows, options = rows_of_singles(), METHODS["kto"].options(loss_type="kto", beta=0.3)
    for number, row in enumerate(rows):
        row["kl_completion_ids"] = [7, 6, 5 + number]
    policy, other, plain, inner = models()
    with torch.no_grad():
        referred = torch.stack([dense_scores(other, row, "completion_ids").sum() for row in rows])
        kl = [dense_scores(m, row, "kl_completion_ids").sum() for m in (inner, other) for row in rows]
    baseline = (torch.stack(kl[: len(rows)]) - torch.stack(kl[len(rows) :])).mean().clamp(min=0)
    ratios = torch.stack([dense_scores(inner, row, "completion_ids").sum() for row in rows]) - referred
    signs = torch.tensor([1.0 if row["label"] else -1.0 for row in rows])
    wanted = (1 - torch.sigmoid(0.3 * signs * (ratios - baseline))).mean()
    wanted.backward()
    columns = ("completion_ids", "kl_completion_ids")
    batch = CompletionCollator(columns, sharing=sharing, values=("label",), apart=columns[1:])(rows)
    for limits in CUTS:
        policy.zero_grad()
        given = Models(policy, FrozenModel(other, padding_free=True))
        found = train_step(given, batch, METHODS["kto"].objective(options), limits=limits)
        assert found.item() == pytest.approx(wanted.item(), rel=1e-6, abs=1e-6)
        assert_same(policy, plain)


@pytest.mark.parametrize("sharing", [True, False])
def test_orpo_of_rounds_scores_the_prompt_once(sharing):
    rows, options = rows_of_pairs(), METHODS["orpo"].options(beta=0.2)
    policy, _, plain, inner = models()
    pairs = expected_pairs(inner, inner, rows)
    odds = [
        logps / tokens
        for logps, tokens in ((pairs.chosen, pairs.chosen_tokens), (pairs.rejected, pairs.rejected_tokens))
    ]
    odds = [mean - torch.log1p(-mean.exp()) for mean in odds]
    prompts = [dense_scores(inner, {"prompt_ids": [], "c_ids": row["prompt_ids"]}, "c_ids") for row in rows]
    tokens = sum(map(len, prompts)) + pairs.chosen_tokens.sum()
    likelihood = -(sum(each.sum() for each in prompts) + pairs.chosen.sum()) / tokens
    wanted = likelihood - 0.2 * F.logsigmoid(odds[0] - odds[1]).mean()
    wanted.backward()
    batch = CompletionCollator(SIDES, sharing=sharing, scores_prompt=True)(rows)
    for limits in CUTS:
        policy.zero_grad()
        found = train_step(policy, batch, METHODS["orpo"].objective(options), limits=limits)
        assert found.item() == pytest.approx(wanted.item(), rel=1e-6, abs=1e-6)
        assert_same(policy, plain)


@pytest.mark.parametrize("sharing", [True, False])
def test_a_batch_keeps_which_completion_its_segments_are_of(sharing):
    rows = rows_of_pairs()
    whole = CompletionCollator(SIDES, sharing=sharing)(rows)
    lengths = [[3 + 3, 3], [3 + 2 + 1, 2 + 2], [3, 2 + 2], [2 + 2, 3 + 3]]
    assert whole.row_values[LENGTHS].tolist() == lengths
    joined = RaggedBatch.concat([CompletionCollator(SIDES, sharing=sharing)([row]) for row in rows])
    assert joined.segments == whole.segments
    assert completion_sums(torch.ones(whole.scores), whole).tolist() == lengths
    parts = split(whole, Limits(rows=1))
    found = [completion_sums(torch.ones(part.scores), part).tolist()[0] for part in parts]
    assert sorted(found) == sorted(lengths)
    places = place_in_completion(torch.ones(whole.scores), whole)
    assert places.tolist() == [float(place) for row in lengths for length in row for place in range(length)]
    alone = whole.select_rows([1]).without_completion(0)
    assert completion_sums(torch.ones(alone.scores), alone).tolist() == [[0.0, 4.0]]
