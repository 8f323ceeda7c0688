"""A teacher that is asked, on two ranks: what they train, and how often they ask, is what one rank does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.ranks.processes import run_ranks
from tests.support.ranks.sharded_training import meeting_place, rank_of, trained_weights
from tests.support.references.parity_world import tokenizer
from tests.support.runs.distilling import build_teacher, distilling, talks
from tests.support.runs.online_runs import online
from tests.support.vllm.teaching_server import Teaches, teaching_server

pytestmark = pytest.mark.slow
SEQUENCES, PIECES = {"parallelism_config": {"sp_size": 2}}, {"tokens_per_microbatch": 20}
LAYERS, STAGES = {"parallelism_config": {"tp_size": 2}}, {"pipeline_parallel_size": 2}
ROWS: dict[str, Any] = {"gradient_accumulation_steps": 2}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "a folder, copies": ("GKD", {**ROWS, "loss_top_k": 5}),
    "a folder, shards, pieces": ("GKD", {"fsdp": True, **PIECES}),
    "a folder, split sequences, pieces": ("GKD", {**SEQUENCES, **PIECES, "beta": 0.0, "loss_top_k": 3}),
    "a folder, stages": ("GKD", {**STAGES, "loss_top_k": 5}),
    "a server, copies": ("Distillation", {"beta": 0.0, "loss_top_k": 4}),
    "a server, split sequences": ("Distillation", {**SEQUENCES, "beta": 0.5, "loss_top_k": 4}),
    "one number a token, split layers": ("IWOPD", LAYERS),
}
SAME_ROWS = ("parallelism_config", "pipeline_parallel_size")


def learned(folder: Path, name: str, said: str, url: str, rows: int) -> Any:
    """(losses, weights) of a run of so many rows on each rank."""
    kind, options = CASES[name]
    if kind == "GKD":
        given = {"teacher_model": None, "eval_dataset": talks(4, seed=2)}
        how = {"per_device_train_batch_size": rows, "teacher_logprobs": said, "max_steps": 2}
        trainer = distilling(folder, arguments=given, **how, **options)
    else:
        served = {"use_teacher_server": True} if kind == "IWOPD" else {}
        how = {"per_device_train_batch_size": rows, "num_generations": 1, "max_steps": 2}
        how |= {"teacher_model_server_url": url}
        trainer = online(folder, kind, arguments={"teacher_model": None}, **how, **served, **options)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    losses += [trainer.evaluate()["eval_loss"]] if kind == "GKD" else []
    return losses, trained_weights(trainer.model)


def rank_main(rank: int, folder: str, said: str, url: str) -> None:
    place = Path(folder)
    with rank_of(place, rank, 2):
        for name, (_, options) in CASES.items():
            found = learned(place / name, name, said, url, 8 if options.keys() & {*SAME_ROWS} else 4)
            if rank == 0:
                torch.save(found, place / f"{name}.pt")


def test_two_ranks_train_what_one_does(tmp_path):
    said = str(tmp_path / "said")
    distilling(tmp_path, arguments={"eval_dataset": talks(4, seed=2)}).write_teacher_logprobs(said, top_logprobs=5)
    teaches = Teaches(build_teacher(), tokenizer())
    with teaching_server(teaches) as url:
        run_ranks(rank_main, str(meeting_place(tmp_path)), said, url)
        texts, teaches.texts = sorted(teaches.texts), []
        for name in CASES:
            losses, weights = torch.load(tmp_path / f"{name}.pt")
            expected_losses, expected = learned(tmp_path / "one", name, said, url, 8)
            assert losses == pytest.approx(expected_losses, rel=2e-5), name
            for key, value in expected.items():
                torch.testing.assert_close(weights[key], value, rtol=1e-4, atol=2e-6, msg=f"{name}: {key}")
    assert texts == sorted(teaches.texts)  # each once, by whichever rank
