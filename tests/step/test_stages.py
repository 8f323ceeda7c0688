"""Steps on ranks that each have some layers: scores and gradients are those of one rank with all layers, for every
family of models."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lowtide.engine.forward import install, score
from lowtide.engine.weights.sharded.stages import cut_into_stages
from lowtide.methods.method import TokenObjective
from lowtide.objectives.sft import LOSSES
from lowtide.ops.logits.linear_logprobs import Want
from lowtide.ragged import RaggedBatch
from lowtide.ranks.pipeline import Pipeline
from lowtide.step.runner import StepOptions, StepRunner
from lowtide.step.updaters.stage_updater import PipelineUpdater
from tests.support.models import architectures
from tests.support.models.tiny_models import tokens
from tests.support.ranks.processes import run_ranks

RANKS = 2
SHARE_KEYS = ("gemma4",)
"""Whose later layers attend to keys of earlier ones."""
REFUSED = "where its layers share more than hidden states"


def batch() -> RaggedBatch:
    """Rows of different lengths, one of two completions of a prompt, another with weights."""
    pair = RaggedBatch.from_segments([tokens(9, 1), tokens(4, 2), tokens(7, 3)], prefix=[-1, 0, 0], row=[0, 0, 0])
    weighted = {"input_ids": tokens(3, 3), "loss_weights": [1.0, 0.25, 0.5]}
    rows = [pair, *(RaggedBatch.from_segments([tokens(n, n)]) for n in (5, 14)), RaggedBatch.from_rows([weighted])]
    return RaggedBatch.concat(rows)


def step(model: nn.Module, updater: PipelineUpdater | None = None) -> dict[str, Any]:
    """What comes of a step in micro-batches of different numbers of tokens, and of a forward without gradients."""
    objective = TokenObjective(LOSSES["nll"], Want(top1=True))
    runner = StepRunner(model, objective, StepOptions(tokens_per_microbatch=20), updater=updater)
    with torch.no_grad():
        scores = score(model.eval(), batch()).scored
    loss = runner.gradients(batch())
    gradients = {name: p.grad for name, p in model.named_parameters(remove_duplicate=False) if p.grad is not None}
    return {"loss": loss, "norm": runner.gradient_norm(), "scores": scores, "gradients": gradients}


def built(name: str) -> nn.Module:
    model = architectures.build(name)
    install(model)
    return model


def run_stages(rank: int, folder: str) -> None:
    """Leaves what comes of each family in a file, or why it is refused."""
    dist.init_process_group("gloo", f"file://{folder}/store", timedelta(seconds=60), RANKS, rank)
    pipeline = Pipeline.of_size(RANKS)
    for name in architectures.RAGGED:
        model = built(name)
        try:
            stage = cut_into_stages(model, pipeline, torch.device("cpu"))
        except ValueError as error:
            found = {"refused": str(error)}
        else:
            found = step(model, PipelineUpdater(stage))
        torch.save(found, Path(folder, f"{name}-{rank}.pt"))
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stages")
    run_ranks(run_stages, str(folder), ranks=RANKS)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", architectures.RAGGED)
def test_two_stages_have_the_gradients_of_one_rank(name, stages):
    found = [torch.load(stages / f"{name}-{rank}.pt") for rank in range(RANKS)]
    if name in SHARE_KEYS:
        assert all(REFUSED in each["refused"] for each in found)
        return
    expected = step(built(name))
    for each in found:
        for number in ("loss", "norm", "scores"):
            torch.testing.assert_close(each[number], expected[number], rtol=1e-5, atol=1e-5)
        for parameter, gradient in each["gradients"].items():
            error = (gradient - expected["gradients"][parameter]).norm() / expected["norm"]
            assert error < 1e-6, parameter
    first, last = (set(each["gradients"]) for each in found)
    assert first | last == set(expected["gradients"])
    assert not first & last
