"""Sequence to sequence on two ranks of gloo against one: whole copies of the weights, and sharded ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lowtide.ranks.shards import whole_of
from tests.support.marks import slow_but
from tests.support.models.pairs_of_texts import losses, make, rows
from tests.support.ranks.processes import run_ranks
from tests.support.ranks.sharded_training import meeting_place, rank_of

WAYS: dict[str, dict[str, Any]] = {
    "copies": {"predict_with_generate": True, "generation_max_length": 6},
    "FSDP2": {"fsdp": "full_shard"},
}


def written(prediction: Any) -> dict[str, float]:
    """Of whatever an evaluation hands over."""
    return {"sum": float(abs(prediction.predictions).sum()), "rows": float(len(prediction.label_ids))}


def trained(
    folder: str, batch: int, family: str, options: dict[str, Any]
) -> tuple[dict[str, torch.Tensor], list, dict]:
    """Weights, losses and evaluation."""
    made = make(
        Path(folder),
        rows(24),
        family=family,
        eval_dataset=rows(9, seed=3),
        compute_metrics=written,
        train_sampling_strategy="sequential",
        per_device_train_batch_size=batch,
        per_device_eval_batch_size=batch,
        **options,
    )
    made.train()
    found = {name: each for name, each in made.evaluate().items() if "runtime" not in name and "second" not in name}
    named = made.model.named_parameters()
    weights = {name: whole_of(p).detach().clone() for name, p in named if not name.endswith("k_proj.bias")}
    return weights, losses(made), found


def rank_main(rank: int, folder: str, family: str, options: dict[str, Any]) -> None:
    with rank_of(Path(folder), rank, 2):
        found = trained(folder, 4, family, options)
        if rank == 0:
            torch.save(found, Path(folder, "found.pt"))


@pytest.mark.parametrize("family", slow_but(["t5"], ["t5", "bart"]))
@pytest.mark.parametrize("way", slow_but(["copies"], WAYS))
def test_two_ranks_are_one(way: str, family: str, tmp_path: Path):
    run_ranks(rank_main, str(meeting_place(tmp_path)), family, WAYS[way], ranks=2)
    weights, found_losses, evaluation = torch.load(tmp_path / "found.pt")
    alone = {name: value for name, value in WAYS[way].items() if name != "fsdp"}
    expected, own_losses, own_evaluation = trained(str(tmp_path / "one"), 8, family, alone)
    assert found_losses == pytest.approx(own_losses, rel=1e-4)
    assert evaluation == pytest.approx(own_evaluation, rel=1e-4)
    for name, each in expected.items():
        torch.testing.assert_close(weights[name], each, rtol=1e-3, atol=1e-4, msg=lambda text, name=name: name + text)
