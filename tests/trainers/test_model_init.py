"""A model that is made by a function, `model_init`, as `transformers.Trainer` takes it."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import set_seed

from tests.support.marks import slow_but
from tests.support.matrix import matrix

KINDS = ("SFT", "DPO", "KTO", "Reward", "GRPO", "PPO")


def made(kind: str, folder: Path, **given: Any) -> Any:
    trainer_class, config_class = matrix.classes(kind)
    options = {**matrix.COMMON, **matrix.OF_KIND.get(kind, {}), "max_steps": 1, "output_dir": str(folder)}
    return trainer_class(
        args=config_class(**options),
        train_dataset=matrix.rows(kind),
        processing_class=matrix.tokenizer(),
        **matrix.beside(kind),
        **given,
    )


def weights(trainer: Any) -> dict[str, torch.Tensor]:
    trainer.train()
    return {name: p.detach() for name, p in trainer.model.named_parameters()}


def redrawn(kind: str) -> Any:
    """A model whose weights are drawn from the seed that is set before it is made."""
    model = matrix.build(kind, 64)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.05)
    return model


@pytest.mark.parametrize("kind", slow_but(["SFT", "DPO", "GRPO"], KINDS))
def test_the_model_that_the_function_makes_is_trained(kind, tmp_path):
    found = weights(made(kind, tmp_path, model_init=lambda: redrawn(kind)))
    set_seed(42)
    expected = weights(made(kind, tmp_path, model=redrawn(kind)))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_function_of_a_trial_is_called_with_none(tmp_path):
    trials: list[Any] = []
    trainer = made("SFT", tmp_path, model=None, model_init=lambda trial: (trials.append(trial), redrawn("SFT"))[1])
    assert trials == [None]
    with pytest.raises(ValueError, match="make a trainer for each trial"):
        trainer.hyperparameter_search()


@pytest.mark.parametrize(
    "function", [lambda **options: redrawn("SFT"), lambda *, size=64: redrawn("SFT"), functools.partial(redrawn, "SFT")]
)
def test_a_function_that_takes_no_trial_is_called_without(function, tmp_path):
    assert made("SFT", tmp_path, model_init=function).model.num_parameters() == redrawn("SFT").num_parameters()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"model": "somewhere", "model_init": lambda: None}, "as `model` and as `model_init`"),
        ({"model_init": lambda: None}, "model_init returned None"),
        ({"model_init": "a name"}, "must be a function"),
        ({"model_init": lambda size, seed: None}, r"takes \(size, seed\): leave its arguments out"),
    ],
)
def test_what_makes_no_model_is_refused(given, said, tmp_path):
    with pytest.raises(ValueError, match=said):
        made("SFT", tmp_path, **given)
