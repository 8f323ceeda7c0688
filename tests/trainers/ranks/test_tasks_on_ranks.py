"""Encoder tasks and sequence to sequence on two ranks of gloo against one: whole copies of the weights, sharded ones,
and split sequences."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lowtide.ranks.shards import whole_of
from tests.support.marks import slow_but
from tests.support.models import classifying, pairs_of_texts, tagging
from tests.support.ranks.processes import run_ranks
from tests.support.ranks.sharded_training import meeting_place, rank_of

STEPS = {"max_steps": 6, "learning_rate": 5e-3, "class_weights": "balanced"}
ROWS = 8
"""Of a step, on all ranks."""


def seq2seq(family: str, folder: Path, options: dict[str, Any]) -> tuple[Any, Any]:
    held_out = pairs_of_texts.rows(9, seed=3)
    own = {"eval_dataset": held_out, "compute_metrics": _handed_over}
    return pairs_of_texts.make(folder, pairs_of_texts.rows(24), family=family, **own, **options), held_out


def _handed_over(prediction: Any) -> dict[str, float]:
    """Of whatever an evaluation hands over."""
    return {"sum": float(abs(prediction.predictions).sum()), "rows": float(len(prediction.label_ids))}


def token_classification(folder: Path, options: dict[str, Any]) -> tuple[Any, Any]:
    """Rows of an evaluation are cut into windows, which ranks share out."""
    held_out = tagging.dataset(21, longest=30, seed=3)
    windows = {"max_length": 14, "return_entity_level_metrics": True}
    return tagging.trainer(folder, arguments={"eval_dataset": held_out}, **STEPS, **windows, **options), held_out


def sequence_classification(folder: Path, options: dict[str, Any]) -> tuple[Any, Any]:
    """Of pairs of texts."""
    held_out = classifying.dataset(21, pairs=True, longest=30, seed=3)
    rows = classifying.dataset(40, pairs=True)
    return classifying.trainer(folder, rows, {"eval_dataset": held_out}, **STEPS, **options), held_out


TASKS: dict[str, Callable[[Path, dict[str, Any]], tuple[Any, Any]]] = {
    "t5": partial(seq2seq, "t5"),
    "bart": partial(seq2seq, "bart"),
    "token classification": token_classification,
    "sequence classification": sequence_classification,
}
WAYS: dict[str, dict[str, Any]] = {
    "copies": {},
    "copies, written": {"predict_with_generate": True, "generation_max_length": 6},
    "FSDP2": {"fsdp": "full_shard"},
    "sequences": {"parallelism_config": {"sp_size": 2}},
}
OF_SOME = {"sequences": ("sequence classification",), "copies, written": ("t5", "bart")}
CASES = [(task, way) for task in TASKS for way in WAYS if task in OF_SOME.get(way, TASKS)]
QUICK = [("sequence classification", "copies")]


def trained(folder: Path, task: str, rows: int, options: dict[str, Any]) -> tuple[dict, list[float], dict, Any]:
    """Weights, losses, evaluation and predictions."""
    batch = {"per_device_train_batch_size": rows, "per_device_eval_batch_size": rows}
    made, held_out = TASKS[task](folder, {"train_sampling_strategy": "sequential", **batch, **options})
    made.train()
    found = {name: each for name, each in made.evaluate().items() if "runtime" not in name and "second" not in name}
    moved = {n: p for n, p in made.model.named_parameters() if not n.endswith(("key.bias", "k_proj.bias"))}
    said = made.predict(held_out)
    weights = {name: whole_of(each).detach().clone() for name, each in moved.items()}
    return weights, pairs_of_texts.losses(made), found, (said.predictions, said.label_ids)


def rank_main(rank: int, folder: str, task: str, way: str) -> None:
    with rank_of(Path(folder), rank, 2):
        found = trained(Path(folder), task, ROWS if way == "sequences" else ROWS // 2, WAYS[way])
        if rank == 0:
            torch.save(found, Path(folder, "found.pt"))


@pytest.mark.parametrize(("task", "way"), slow_but(QUICK, CASES))
def test_two_ranks_are_one(task: str, way: str, tmp_path: Path):
    run_ranks(rank_main, str(meeting_place(tmp_path)), task, way, ranks=2)
    weights, losses, evaluation, said = torch.load(tmp_path / "found.pt", weights_only=False)
    alone = {name: value for name, value in WAYS[way].items() if name not in ("fsdp", "parallelism_config")}
    expected, own_losses, own_evaluation, own = trained(tmp_path / "one", task, ROWS, alone)
    assert losses == pytest.approx(own_losses, rel=1e-4)
    assert 0 < own_evaluation.get("eval_f1", 0.5) < 1
    assert evaluation == pytest.approx(own_evaluation, rel=1e-4)
    np.testing.assert_allclose(said[0], own[0], rtol=1e-3, atol=1e-4)  # in the order of the rows
    np.testing.assert_array_equal(said[1], own[1])
    for name, each in expected.items():
        torch.testing.assert_close(weights[name], each, rtol=1e-3, atol=1e-4, msg=lambda text, name=name: name + text)
