"""What is overridden of `transformers.Trainer` stands in one class, and no method's trainer adds to it."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import Trainer

from lowtide.methods import METHODS
from lowtide.trainers.hooks import LowtideTrainer
from lowtide.trainers.public import trainer_class

PUBLIC = {
    "GeneratingTrainer": {"evaluate", "predict"},  # the signature is that of Seq2SeqTrainer, with options of `generate`
}
"""By class, the documented exceptions."""
LONGEST = 5
"""A trainer of a method, the kinds of trainers below it, and the class with the hooks."""


def chain(kind: type) -> tuple[type, ...]:
    """The classes of a trainer that stand above the Trainer's own."""
    order = kind.__mro__
    return order[: order.index(Trainer)]


def overridden(kind: type) -> dict[str, set[str]]:
    """By class of a trainer, the names of the Trainer that it overrides, but for the class with the hooks."""
    names = {name for name in dir(Trainer) if not name.startswith("__")}
    found = {each.__name__: names & vars(each).keys() for each in chain(kind) if each is not LowtideTrainer}
    return {title: own for title, own in found.items() if own}


@pytest.mark.parametrize("method", METHODS)
def test_names_of_the_trainer_are_overridden_in_one_class(method):
    kind = trainer_class(METHODS[method])
    assert overridden(kind).items() <= PUBLIC.items()
    assert len(chain(kind)) <= LONGEST


def test_an_override_anywhere_else_is_found():
    class Mixed:
        def log(self, logs: Any) -> None: ...

    class Own(Mixed, trainer_class(METHODS["sft"])):  # type: ignore[misc]
        def _save_checkpoint(self, model: Any, trial: Any) -> None: ...

    assert overridden(Own) == {"Own": {"_save_checkpoint"}, "Mixed": {"log"}}


def test_a_trainer_is_one_of_transformers():
    assert all(issubclass(trainer_class(METHODS[method]), Trainer) for method in METHODS)
