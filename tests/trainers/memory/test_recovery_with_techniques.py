"""A run that ran out of memory equals the one that had the smaller budget from the start, bit by bit, whatever
technique is on.

The budget is that of the batch that failed. A later batch has a longer row, which goes through whole.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.support.marks import slow_but, slow_or_sweep
from tests.support.matrix.matrix import TECHNIQUES, check_equal, make, watched, with_it
from tests.support.matrix.matrix_models import EVERY_TRAINER, RELATED, TASKS
from tests.support.runs.sabotage import ERRORS, OPTIMIZER, PLACES, out_of_memory

pytestmark = pytest.mark.slow

IN_BACKWARD = "optimizer in backward"
REPEATED = ("activation offloading", "tiled MLP", "compressed AdamW")
BUDGET = 80
"""Tokens of a micro-batch, of which the first step then has three or more."""


def trainer(kind: str, technique: str, budget: int | None) -> Any:
    return make(kind, **with_it(TECHNIQUES[technique]), max_steps=3, tokens_per_microbatch=budget)


@pytest.mark.parametrize("kind", slow_but(["SFT"], ["SFT", "DPO"], swept=["DPO"]))
@pytest.mark.parametrize(
    ("place", "technique"),
    slow_or_sweep(
        [(place, technique) for place in PLACES for technique in REPEATED],
        [(place, technique) for n, place in enumerate(PLACES) for m, technique in enumerate(REPEATED) if (n + m) % 2],
    ),
)
def test_a_failed_step_is_repeated_in_smaller_micro_batches(kind, place, technique):
    check_recovery(kind, technique, place, random.Random(f"{kind} {place} {technique}").randrange(2), BUDGET)


@pytest.mark.parametrize(
    ("kind", "place"),
    slow_or_sweep(
        [(kind, place) for kind in TASKS for place in ("forward", "backward")],
        [(kind, ("forward", "backward")[number % 2]) for number, kind in enumerate(TASKS)],
    ),
)
def test_every_task_repeats_a_failed_step(kind, place):
    check_recovery(kind, "activation offloading", place, 0, BUDGET)


@pytest.mark.parametrize("kind", ["SFT", "DPO"])
@pytest.mark.parametrize("place", ["forward", "head"])
def test_before_anything_is_stepped_in_backward_the_step_is_repeated(kind, place):
    check_recovery(kind, IN_BACKWARD, place, 0, None)


@pytest.mark.parametrize("kind", ["GRPO", "OnlineDPO"])
@pytest.mark.parametrize("technique", ["activation offloading", "tiled MLP"])
def test_a_failed_step_on_a_rollout_is_repeated_to_rounding(kind, technique):
    """The rollout was scored before, within the larger budget."""
    check_recovery(kind, technique, "backward", 0, BUDGET, bits=False)


@pytest.mark.parametrize("kind", ["SFT", "DPO", "OnlineDPO"])
@pytest.mark.parametrize("error", ERRORS)
def test_after_something_was_stepped_in_backward_the_run_stops(kind, error):
    failing = trainer(kind, IN_BACKWARD, None)
    message = "some parameters were stepped and others not.*Resume from the last checkpoint"
    with out_of_memory(failing.model, "backward", 1, error), pytest.raises(ValueError, match=message):
        failing.train()
    assert failing.state.global_step == 1


@pytest.mark.parametrize("kind", slow_but(["SFT"], EVERY_TRAINER, swept=RELATED))
@pytest.mark.parametrize("number", [0, 5])
def test_an_optimizer_that_could_not_make_its_states_makes_them_again(kind, number):
    """In the first step, at a random parameter; nothing was stepped yet, so the whole step is taken once."""
    failing = make(kind, max_steps=3, optim="adamw_torch")
    with out_of_memory(failing.model, OPTIMIZER, number, "CPU") as fired:
        found = watched(failing)
    assert fired == [OPTIMIZER]
    check_equal(found, watched(make(kind, max_steps=3, optim="adamw_torch")), bits=True)
    assert failing.limits.tokens is None


def check_recovery(
    kind: str, technique: str, place: str, number: int, budget: int | None, *, bits: bool = True
) -> None:
    failing = trainer(kind, technique, budget)
    with out_of_memory(failing.model, place, number) as fired:
        found = watched(failing)
    assert fired == [place]
    taken = failing.limits.tokens
    assert taken is not None
    assert taken < (budget or 1000)
    smaller = trainer(kind, technique, budget)
    smaller.runner.token_budget = taken
    check_equal(found, watched(smaller), bits=bits)
