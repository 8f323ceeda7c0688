"""Sequence classification on two ranks of gloo against one: whole copies of the weights, sharded ones, and split
sequences."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lowtide.ranks.shards import whole_of
from tests.support.marks import slow_but
from tests.support.models.classifying import dataset, trainer
from tests.support.ranks.processes import run_ranks
from tests.support.ranks.sharded_training import meeting_place, rank_of

WAYS: dict[str, dict[str, Any]] = {
    "copies": {},
    "FSDP2": {"fsdp": "full_shard"},
    "sequences": {"parallelism_config": {"sp_size": 2}},
}


def trained(folder: str, rows: int, options: dict[str, Any]) -> tuple[dict[str, torch.Tensor], list[float], dict, Any]:
    """Weights, losses, evaluation and predictions, of pairs of texts."""
    held_out = dataset(21, pairs=True, longest=30, seed=3)
    made = trainer(
        Path(folder),
        dataset(40, pairs=True),
        {"eval_dataset": held_out},
        per_device_train_batch_size=rows,
        per_device_eval_batch_size=rows,
        train_sampling_strategy="sequential",
        class_weights="balanced",
        max_steps=6,
        learning_rate=5e-3,
        **options,
    )
    made.train()
    found = {name: each for name, each in made.evaluate().items() if "runtime" not in name and "second" not in name}
    weights = {name: whole_of(p).detach().clone() for name, p in made.model.named_parameters() if "key" not in name}
    said = made.predict(held_out)
    losses = [entry["loss"] for entry in made.state.log_history if "loss" in entry]
    return weights, losses, found, (said.predictions, said.label_ids)


def rank_main(rank: int, folder: str, rows: int, options: dict[str, Any]) -> None:
    with rank_of(Path(folder), rank, 2):
        found = trained(folder, rows, options)
        if rank == 0:
            torch.save(found, Path(folder, "found.pt"))


@pytest.mark.parametrize("way", slow_but(["copies"], WAYS))
def test_two_ranks_are_one(way: str, tmp_path: Path):
    rows = 8 if way == "sequences" else 4
    run_ranks(rank_main, str(meeting_place(tmp_path)), rows, WAYS[way], ranks=2)
    weights, losses, evaluation, said = torch.load(tmp_path / "found.pt", weights_only=False)
    expected, own_losses, own_evaluation, own = trained(str(tmp_path / "one"), 8, {})
    assert losses == pytest.approx(own_losses, rel=1e-4)
    assert 0 < own_evaluation["eval_f1"] < 1
    assert evaluation == pytest.approx(own_evaluation, rel=1e-4)
    np.testing.assert_allclose(said[0], own[0], rtol=1e-3, atol=1e-4)  # in the order of the rows
    np.testing.assert_array_equal(said[1], own[1])
    for name, each in expected.items():
        torch.testing.assert_close(weights[name], each, rtol=1e-3, atol=1e-4, msg=lambda text, name=name: name + text)
