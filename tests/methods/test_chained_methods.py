"""Preference methods and reward models on rows above the token budget: what they are on whole rows.

A prompt that both sides share may be cut, and so may each completion; without sharing, two long segments are cut.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, MistralConfig

from lowtide.data.batches.collate import CompletionCollator
from lowtide.engine.reference import FrozenModel
from lowtide.methods.bco import METHOD as BCO
from lowtide.methods.bco import BCOOptions
from lowtide.methods.cpo import METHOD as CPO
from lowtide.methods.cpo import CPOOptions
from lowtide.methods.dpo import METHOD as DPO
from lowtide.methods.dpo import DPOOptions
from lowtide.methods.kto import METHOD as KTO
from lowtide.methods.kto import KTOOptions
from lowtide.methods.orpo import METHOD as ORPO
from lowtide.methods.orpo import ORPOOptions
from lowtide.methods.reward import METHOD as REWARD
from lowtide.methods.reward import RewardOptions
from lowtide.methods.tpo import METHOD as TPO
from lowtide.methods.tpo import TPOOptions
from lowtide.ragged import RaggedBatch
from lowtide.score_rules import LastToken
from lowtide.step.evaluate import evaluate_batch
from lowtide.step.metrics import Totals
from lowtide.step.models import Models
from lowtide.step.recovery import surviving_step
from lowtide.step.train_step import train_step
from lowtide.step_plan import Limits
from tests.support.marks import slow_but
from tests.support.models.preference_models import assert_equal, build, gradients, policy_and_reference

CAP = Limits(tokens=16)
LENGTHS = [(41, 5, 38), (7, 20, 3), (33, 2, 9), (4, 3, 4), (17, 40, 33)]
"""Tokens of the prompt, of the chosen and of the rejected completion."""

PAIRS: dict[str, Callable[[], Any]] = {
    "dpo": lambda: DPO.objective(DPOOptions(beta=0.3)),
    "ld-dpo": lambda: DPO.objective(DPOOptions(ld_alpha=0.3)),
    "wpo": lambda: DPO.objective(DPOOptions(use_weighting=True)),
    "aot": lambda: DPO.objective(DPOOptions(loss_type="aot", label_smoothing=0.1)),
    "together": lambda: DPO.objective(DPOOptions(loss_type=["sigmoid", "sft"], loss_weights=[1, 0.5])),
    "cpo": lambda: CPO.objective(CPOOptions()),
    "orpo": lambda: ORPO.objective(ORPOOptions()),
    "tpo": lambda: TPO.objective(TPOOptions(beta=0.3)),
}
UNPAIRED: dict[str, Callable[[], Any]] = {
    "kto": lambda: KTO.objective(KTOOptions(beta=0.3)),
    "bco": lambda: BCO.objective(BCOOptions()),
}


def rows() -> list[dict]:
    generator = torch.Generator().manual_seed(3)

    def tokens(length: int) -> list[int]:
        return torch.randint(0, 61, (length,), generator=generator).tolist()

    return [
        {"prompt_ids": tokens(p), "chosen_ids": tokens(c), "rejected_ids": tokens(r), "margin": 0.5, "label": c > 4}
        | {"reference_ids": [*range(c + 3)]}
        for p, c, r in LENGTHS
    ]


def pairs(sharing: bool, *further: str, **more: Any) -> RaggedBatch:
    return CompletionCollator(("chosen_ids", "rejected_ids", *further), sharing=sharing, **more)(rows())


def unpaired(sharing: bool, kl: bool) -> RaggedBatch:
    made = [
        {
            "prompt_ids": row["prompt_ids"],
            "completion_ids": row["chosen_ids"],
            "kl_completion_ids": row["rejected_ids"],
            "label": row["label"],
        }
        for row in rows()
    ]
    columns = ("completion_ids", "kl_completion_ids") if kl else ("completion_ids",)
    return CompletionCollator(columns, sharing=sharing, values=("label",))(made)


def step(policy, reference, batch: RaggedBatch, objective, limits: Limits) -> tuple[float, dict, dict]:
    model, totals = copy.deepcopy(policy), Totals()
    models = Models(model, None if reference is None else FrozenModel(reference, padding_free=True))
    loss = train_step(models, batch, objective, limits=limits, totals=totals)
    return loss.item(), gradients(model), totals.read(torch.device("cpu"))


def compare(policy, reference, batch: RaggedBatch, make: Callable[[], Any]) -> None:
    loss, ours, metrics = step(policy, reference, batch, make(), CAP)
    expected, theirs, its_metrics = step(policy, reference, batch, make(), Limits())
    assert loss == pytest.approx(expected, rel=1e-8)
    assert metrics == pytest.approx(its_metrics, rel=1e-6)
    assert_equal(ours, theirs)


@pytest.mark.parametrize("sharing", [True, False])
@pytest.mark.parametrize("name", slow_but(["dpo", "aot", "together"], PAIRS))
def test_pairs(name, sharing):
    batch = pairs(sharing, *["reference_ids"] * (name == "tpo"))
    compare(*policy_and_reference(), batch, PAIRS[name])


@pytest.mark.parametrize("sharing", [True, False])
@pytest.mark.parametrize("name", UNPAIRED)
def test_unpaired(name, sharing):
    compare(*policy_and_reference(), unpaired(sharing, kl=name == "kto"), UNPAIRED[name])


@pytest.mark.parametrize("sharing", [True, False])
def test_reward_models(sharing):
    model = build(0, MistralConfig, AutoModelForSequenceClassification, num_labels=1, pad_token_id=0, sliding_window=9)
    batch = pairs(sharing, score_rule=LastToken(0), values=("margin",))
    compare(model, None, batch, lambda: REWARD.objective(RewardOptions(center_rewards_coefficient=0.1)))


@pytest.mark.parametrize("sharing", [True, False])
def test_evaluation(sharing):
    policy, other = policy_and_reference()
    models, found = Models(policy, FrozenModel(other, padding_free=True)), []
    for limits in (CAP, Limits()):
        totals = Totals()
        evaluate_batch(models, pairs(sharing), PAIRS["dpo"](), totals, limits=limits)
        found.append(totals.read(torch.device("cpu")))
    assert found[0] == pytest.approx(found[1], rel=1e-7)


def test_a_row_that_does_not_fit_is_run_in_pieces():
    policy, other = policy_and_reference()
    model, failures = copy.deepcopy(policy), [3]
    plain = type(model.model).forward

    def crowded(*args, **kwargs):
        if failures[0]:
            failures[0] -= 1
            raise RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory")
        return plain(model.model, *args, **kwargs)

    model.model.forward = crowded
    models = Models(model, FrozenModel(other, padding_free=True))
    batch = pairs(True).select_rows([4])
    loss, taken = surviving_step(models, batch, PAIRS["dpo"](), limits=Limits(), totals=Totals())
    assert taken.tokens == 16  # after 45 and 20
    expected, theirs, _ = step(policy, other, batch, PAIRS["dpo"](), Limits())
    assert loss.item() == pytest.approx(expected, rel=1e-8)
    assert_equal(gradients(model), theirs)
