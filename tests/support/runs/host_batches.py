"""Steps of several methods with tiny models, whose batches are in host memory."""

from __future__ import annotations

import torch
from transformers import AutoModelForSequenceClassification

from lowtide.data.batches.collate import CompletionCollator
from lowtide.data.batches.values import OLD, TOKEN_ADVANTAGE, WINDOW_TOKENS
from lowtide.engine.forward import install
from lowtide.engine.reference import FrozenModel
from lowtide.methods import METHODS
from lowtide.ragged import RaggedBatch
from lowtide.score_rules import LastToken
from lowtide.step.runner import StepOptions, StepRunner
from lowtide.step.updaters.updater import Updater
from tests.support.models.preference_models import build, pair_rows, unpaired_rows


def pairs(**more) -> RaggedBatch:
    return CompletionCollator(("chosen_ids", "rejected_ids"), **more)(pair_rows())


def written() -> RaggedBatch:
    """Completions that a policy wrote, two of each prompt, with their advantages."""
    prompts = [[5, 6, 7], [8, 9]]
    tokens = [part for prompt in prompts for part in (prompt, [1, 2, 3], prompt, [4, 2])]
    labels = [part if number % 2 else [-100] * len(part) for number, part in enumerate(tokens)]
    prefix = [-1 if number % 2 == 0 else number - 1 for number in range(len(tokens))]
    batch = RaggedBatch.from_segments(tokens, labels, prefix=prefix, row=[number // 2 for number in range(len(tokens))])
    values = {"row_values": {WINDOW_TOKENS: torch.full((4,), 10.0)}}
    advantages = torch.tensor([1.0, -1.0, 0.5, -0.5])[batch.row[batch.score_segment]]
    values["score_values"] = {OLD: torch.full((batch.scores,), -3.0), TOKEN_ADVANTAGE: advantages}
    return RaggedBatch.from_segments(
        tokens, labels, prefix=prefix, row=[number // 2 for number in range(len(tokens))], **values
    )


CASES = {
    "sft": ("sft", {}, lambda: RaggedBatch.from_segments([[1, 2, 3, 4], [5, 6, 7], [3, 3], [1, 9, 8, 7, 6]])),
    "dpo": ("dpo", {}, pairs),
    "dpo with parts": ("dpo", {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]}, pairs),
    "kto": (
        "kto",
        {"loss_type": "apo_zero_unpaired"},
        lambda: CompletionCollator(("completion_ids",), values=("label",))(unpaired_rows()),
    ),
    "reward": ("reward", {}, lambda: pairs(score_rule=LastToken(0))),
    "grpo": ("grpo", {}, written),
    "rloo": ("rloo", {"beta": 0.0}, written),
}


def runner(name: str, device: str, **options) -> StepRunner:
    """One that takes steps of a case, with weights on a device."""
    method, chosen, _ = CASES[name]
    kind = {"kind": AutoModelForSequenceClassification, "num_labels": 1} if method == "reward" else {}
    model, reference = (build(seed, **kind) for seed in range(2))
    install(model)
    model.to(device)
    objective = METHODS[method].objective(METHODS[method].options(**chosen))
    other = FrozenModel(reference.to(device), padding_free=True) if objective.needs_reference else None
    updater = Updater(torch.optim.SGD(model.parameters(), lr=0.1))
    return StepRunner(model, objective, StepOptions(**options), reference=other, updater=updater)
