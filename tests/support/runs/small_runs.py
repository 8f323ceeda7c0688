"""Tiny runs of five steps that save every second one, for the tests of checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.support.matrix.matrix import make

SAVING = {"save_strategy": "steps", "save_steps": 2, "train_sampling_strategy": "random"}


def small(folder: Path, **options: Any) -> Any:
    """An SFT trainer that writes into a folder."""
    return make("SFT", output_dir=str(folder), **SAVING | options)


def trained(folder: Path, **options: Any) -> Any:
    """The same after its training."""
    trainer = small(folder, **options)
    trainer.train()
    return trainer


def weights(trainer: Any) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
