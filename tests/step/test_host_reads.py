"""Between the start of a step and its end nothing of the device is read, and nothing of it is mixed with the host's.

Weights on the meta device stand for a device's: a number cannot be read off such a tensor, and a batch is in host
memory, so that whatever is not sent over fails.
"""

from __future__ import annotations

import contextlib

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from lowtide.data.batches.collate import CompletionCollator
from lowtide.data.batches.values import ADVANTAGE, OLD, WINDOW_TOKENS
from lowtide.engine.forward import install
from lowtide.engine.reference import FrozenModel
from lowtide.methods import METHODS
from lowtide.ragged import LastToken, RaggedBatch
from lowtide.step.runner import StepOptions, StepRunner
from lowtide.step.updater import Updater
from tests.support.preference_models import build, pair_rows, unpaired_rows


def pairs(**more) -> RaggedBatch:
    return CompletionCollator(("chosen_ids", "rejected_ids"), **more)(pair_rows())


def written() -> RaggedBatch:
    """Completions that a policy wrote, two of each prompt, with their advantages."""
    prompts = [[5, 6, 7], [8, 9]]
    tokens = [part for prompt in prompts for part in (prompt, [1, 2, 3], prompt, [4, 2])]
    labels = [part if number % 2 else [-100] * len(part) for number, part in enumerate(tokens)]
    prefix = [-1 if number % 2 == 0 else number - 1 for number in range(len(tokens))]
    batch = RaggedBatch.from_segments(tokens, labels, prefix=prefix, row=[number // 2 for number in range(len(tokens))])
    values = {"row_values": {ADVANTAGE: torch.tensor([1.0, -1.0, 0.5, -0.5]), WINDOW_TOKENS: torch.full((4,), 10.0)}}
    values["score_values"] = {OLD: torch.full((batch.scores,), -3.0)}
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


def runner(name: str, **options) -> StepRunner:
    method, chosen, _ = CASES[name]
    kind = {"kind": AutoModelForSequenceClassification, "num_labels": 1} if method == "reward" else {}
    model, reference = (build(seed, **kind) for seed in range(2))
    install(model)
    model.to("meta")
    objective = METHODS[method].objective(METHODS[method].options(**chosen))
    other = FrozenModel(reference.to("meta"), padding_free=True) if objective.needs_reference else None
    updater = Updater(torch.optim.SGD(model.parameters(), lr=0.1))
    return StepRunner(model, objective, StepOptions(**options), reference=other, updater=updater)


@pytest.fixture(autouse=True)
def no_autocast_on_meta(monkeypatch):
    """There is none on this device, and torch refuses to be asked."""
    enabled, autocast = torch.is_autocast_enabled, torch.autocast

    def entered(kind: str, *args, **kwargs):
        return contextlib.nullcontext() if kind == "meta" else autocast(kind, *args, **kwargs)

    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind="cuda": kind != "meta" and enabled(kind))
    monkeypatch.setattr(torch, "autocast", entered)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_a_step_reads_nothing_off_the_device(name, checkpointing, dtype):
    made = runner(name, per_device_train_batch_size=2)
    made.model.to(dtype)
    if checkpointing:
        made.model.gradient_checkpointing_enable()
    made.begin()
    batch = CASES[name][2]()
    loss = made.gradients(batch)
    assert loss.device.type == "meta"
    trained = [p for p in made.model.parameters() if p.grad is not None]
    assert trained
    assert all(p.grad.device.type == "meta" for p in trained)


def test_a_number_of_the_device_cannot_be_read():
    with pytest.raises(RuntimeError, match="meta"):
        torch.zeros((), device="meta").item()
    with pytest.raises(RuntimeError):
        torch.zeros(3, device="meta") + torch.zeros(3)
