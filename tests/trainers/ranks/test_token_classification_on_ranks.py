"""Token classification on two ranks of gloo against one: whole copies of the weights, and sharded ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lowtide.ranks.shards import whole_of
from tests.support.marks import slow_but
from tests.support.models.tagging import dataset, trainer
from tests.support.ranks.processes import run_ranks
from tests.support.ranks.sharded_training import meeting_place, rank_of

WAYS: dict[str, dict[str, Any]] = {
    "copies": {},
    "FSDP2": {"fsdp": "full_shard"},
}


def trained(folder: str, rows: int, options: dict[str, Any]) -> tuple[dict[str, torch.Tensor], list[float], dict]:
    """Weights, losses and evaluation; rows of an evaluation are cut into windows, which ranks share out."""
    made = trainer(
        Path(folder),
        arguments={"eval_dataset": dataset(21, longest=30, seed=3)},
        per_device_train_batch_size=rows,
        per_device_eval_batch_size=rows,
        train_sampling_strategy="sequential",
        max_length=14,
        class_weights="balanced",
        return_entity_level_metrics=True,
        max_steps=6,
        learning_rate=5e-3,
        **options,
    )
    made.train()
    found = {name: each for name, each in made.evaluate().items() if "runtime" not in name and "second" not in name}
    weights = {name: whole_of(p).detach().clone() for name, p in made.model.named_parameters() if "key" not in name}
    return weights, [entry["loss"] for entry in made.state.log_history if "loss" in entry], found


def rank_main(rank: int, folder: str, options: dict[str, Any]) -> None:
    with rank_of(Path(folder), rank, 2):
        found = trained(folder, 4, options)
        if rank == 0:
            torch.save(found, Path(folder, "found.pt"))


@pytest.mark.parametrize("way", slow_but(["copies"], WAYS))
def test_two_ranks_are_one(way: str, tmp_path: Path):
    run_ranks(rank_main, str(meeting_place(tmp_path)), WAYS[way], ranks=2)
    weights, losses, evaluation = torch.load(tmp_path / "found.pt")
    expected, own_losses, own_evaluation = trained(str(tmp_path / "one"), 8, {})
    assert losses == pytest.approx(own_losses, rel=1e-4)
    assert 0 < own_evaluation["eval_f1"] < 1
    assert evaluation == pytest.approx(own_evaluation, rel=1e-4)
    for name, each in expected.items():
        torch.testing.assert_close(weights[name], each, rtol=1e-3, atol=1e-4, msg=lambda text, name=name: name + text)
