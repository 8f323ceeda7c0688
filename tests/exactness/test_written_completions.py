"""A policy that writes for itself writes the same completions under every exact technique, and learns the same.

In the table of techniques and trainers completions are given. Here they are written by the policy as it is after each
step, so that a technique that disturbs writing, or the weights before it, shows in the tokens.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from tests.support.marks import slow_but
from tests.support.matrix.matrix import (
    ACTED,
    BITWISE,
    ROUNDING,
    TECHNIQUES,
    Run,
    build,
    distance,
    make,
    watched,
    with_it,
)
from tests.support.matrix.matrix_models import ONLINE

OPTIONS: dict[str, dict[str, Any]] = {
    "GRPO": {"num_iterations": 1, "max_steps": 3},
    "RLOO": {"num_iterations": 2, "max_steps": 4},
    "OnlineDPO": {"max_steps": 3},
    "PPO": {"num_ppo_epochs": 1, "num_mini_batches": 2, "max_steps": 4},
}
"""Each run has two rollouts or three. RLOO and PPO take two steps from each."""
COMMON: dict[str, Any] = {"max_completion_length": 12, "learning_rate": 5e-3}
EXACT = (
    *("gradient checkpointing", "checkpointing that keeps attention", "checkpointing that keeps products"),
    *("checkpointing of every k-th layer", "activation offloading", "tiled MLP", "compiled layers"),
    *("optimizer in backward", "optimizer in backward, two passes"),
    *("prefix sharing", "token budget", "gradient accumulation", "rehearsal"),
)
"""Padded batches are not among them: transformers' `generate` writes then, with other random numbers."""
IN_ALL_KINDS = ("gradient checkpointing", "activation offloading", "tiled MLP", "optimizer in backward")
"""Those that change the model or its weights the most; the others are tried in GRPO alone."""
IN_BFLOAT16 = ("bfloat16 mixed precision", "compressed AdamW", "bfloat16 AdamW with stochastic rounding")
NATS = 0.05
"""By how much log-probabilities of a token may differ in bfloat16; up to 0.023 is seen."""
PLAIN: dict[str, dict[str, Any]] = {
    "optimizer in backward": {"max_grad_norm": 0.0},
    "prefix sharing": {"prefix_sharing": False},
}


def even_tokens(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """A reward that differs within a group: the share of even token ids."""
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]


def writer(kind: str, written: list[list[list[int]]], **options: Any) -> Any:
    """A trainer whose policy writes; what it writes is kept, a rollout an entry.

    Weights are float64: gradients that cancel leave nothing then, which Adam would bring to the size of a step.
    """

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        written.append(completion_ids)
        return even_tokens(completion_ids)

    options = COMMON | OPTIONS[kind] | options
    return make(kind, model=build(kind, 64).double(), arguments={"reward_funcs": reward}, **options)


def trained(kind: str, **options: Any) -> tuple[Run, list[list[list[int]]]]:
    written: list[list[list[int]]] = []
    return watched(writer(kind, written, **options)), written


@functools.cache
def plainly(kind: str, technique: str) -> tuple[Run, list[list[list[int]]]]:
    return trained(kind, **PLAIN.get(technique, {}))


def acted(technique: str, run: Run, plain: Run) -> bool:
    """Forwards that write are not within the token budget of micro-batches."""
    return run.graphs > plain.graphs if technique == "token budget" else ACTED[technique](run, plain)


CELLS = [("GRPO", name) for name in EXACT] + [(kind, name) for kind in ONLINE[1:] for name in IN_ALL_KINDS]

SWEPT = [cell for number, cell in enumerate(CELLS) if (number + ONLINE.index(cell[0])) % 2]
"""Every second one, and of each method others."""


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "technique"), slow_but(CELLS[:1], CELLS, swept=SWEPT))
def test_completions_are_those_of_the_plain_run(kind, technique):
    run, written = trained(kind, **with_it(TECHNIQUES[technique]))
    plain, expected = plainly(kind, technique)
    assert len(written) > 1
    assert written == expected
    assert acted(technique, run, plain)
    losses, weights = distance(run, plain)
    if technique in BITWISE:
        assert losses == weights == 0.0
    assert weights <= ROUNDING


@pytest.mark.slow
@pytest.mark.parametrize("kind", slow_but(["GRPO"], ONLINE))
def test_later_completions_depend_on_what_was_learned(kind):
    _, written = plainly(kind, "")
    _, untrained = trained(kind, learning_rate=0.0)
    assert written[0] == untrained[0]
    assert written[-1] != untrained[-1]


@pytest.mark.slow
@pytest.mark.parametrize("technique", slow_but(["bfloat16 mixed precision"], IN_BFLOAT16))
@pytest.mark.parametrize("kind", slow_but(["GRPO"], ONLINE))
def test_what_writes_in_bfloat16_is_what_learns(kind, technique):
    """The sampler's log-probabilities are those of the policy that is trained, and both are computed in bfloat16."""
    options = {**COMMON, "temperature": 1.0, **with_it(TECHNIQUES[technique])}
    trainer = make(kind, arguments={"reward_funcs": even_tokens}, **options)
    run = watched(trainer)
    rows = [dict(trainer.train_dataset[row]) for row in (0, 0, 1, 1)]
    rollout = trainer.maker.make(rows, (0, 9, 0), group=2, version=0).rollout
    expected = trainer.maker._policy(rollout.batch()).float()
    sampled = rollout.of_scores("plain_logprobs")
    torch.testing.assert_close(sampled, expected, rtol=0, atol=NATS)
    assert run.dtypes == {torch.bfloat16}
