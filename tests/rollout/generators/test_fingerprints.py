"""Whether vLLM writes by the weights that it got is told colocated, where completions must match something, and on
several ranks, all of which bring weights again that one of them found to be others."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import lowtide
from lowtide.engine.forward import install
from lowtide.rollout.generators.generator import Request, Sampling
from lowtide.rollout.generators.vllm import engine as engines
from lowtide.rollout.generators.vllm.colocated import VLLMColocatedGenerator
from lowtide.rollout.generators.vllm.engine import Engine, EngineOptions
from lowtide.rollout.generators.vllm.facts import AdapterRoom, Facts
from lowtide.rollout.generators.vllm.fingerprint import HOW
from lowtide.rollout.generators.vllm.label import StaleWeights
from lowtide.rollout.generators.vllm.limits import Limits
from lowtide.rollout.generators.vllm.remote import VLLMServerGenerator
from lowtide.rollout.generators.vllm.turns import Turn
from tests.support.ranks.processes import run_ranks
from tests.support.ranks.sharded_training import meeting_place, rank_of
from tests.support.references.parity_world import build_model
from tests.support.vllm.writing_server import LONGEST, Writes, writing_server


class Lossy(Writes):
    """An engine that takes nothing of its first copies.

    Args:
        lost: of so many.
    """

    facts = Facts("m", LONGEST, {}, "float64", AdapterRoom(0, 0))
    max_model_length = LONGEST

    def __init__(self, lost: int) -> None:
        super().__init__()
        self.lost, self.how = lost, []

    def load(self, weights: dict[str, torch.Tensor]) -> None:
        if self.copies > self.lost:
            super().load(weights)

    def write(self, jobs: Any) -> Any:
        self.how += [sampling for _, sampling, _ in jobs]
        return super().write(jobs)


def policy() -> Any:
    """Other weights than the engine's."""
    model = build_model("llama").double()
    install(model)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(3)
    return model


def test_colocated_weights_are_checked_at_the_first_copy_and_every_so_many():
    engine, model = Lossy(0), policy()
    generator = VLLMColocatedGenerator(engine, checked_every=2)
    asked = []
    for version in range(4):
        generator.sync(model, version)
        asked.append(engine.asked)
    assert asked == [2, 2, 4, 4]


def test_colocated_weights_that_were_not_taken_are_copied_again(caplog):
    engine = Lossy(1)
    generator = VLLMColocatedGenerator(engine, checked_every=1)
    generator.sync(policy(), 0)
    assert engine.copies == 2
    assert "does not write by the weights after step 0 that were copied to it" in caplog.text
    assert "All weights are copied again" in caplog.text


def test_a_colocated_engine_that_never_takes_weights_is_refused():
    generator = VLLMColocatedGenerator(Lossy(9), checked_every=1)
    with pytest.raises(StaleWeights, match="nats away from the policy's"):
        generator.sync(policy(), 0)


def test_a_server_whose_completions_match_something_is_checked_without(caplog):
    engine, model = Lossy(1), policy()
    with writing_server(engine, regex="[0-9]+") as server:
        generator = VLLMServerGenerator(server.url, model, regex="[0-9]+", limits=Limits(checked_every=1))
        generator.sync(model, 0)
    assert engine.copies == 2
    assert [how.unconstrained for how in engine.how] == [True] * 4
    assert "All weights are sent again" in caplog.text


def test_an_engine_constrains_what_is_not_for_a_fingerprint(monkeypatch: pytest.MonkeyPatch):
    made = SimpleNamespace(SamplingParams=lambda **how: how, StructuredOutputsParams=lambda regex: regex)
    monkeypatch.setattr(engines, "part_of_vllm", lambda name: made)
    engine = Engine.__new__(Engine)
    engine.options = EngineOptions(model="m", structured_outputs_regex="[0-9]+")
    turn = Turn([5], 0, 4)
    assert engine._params(turn, Sampling(4))["structured_outputs"] == "[0-9]+"
    assert "structured_outputs" not in engine._params(turn, HOW)


def test_the_interval_of_checks_is_for_vllm(tmp_path):
    with pytest.raises(ValueError, match="vllm_weight_check_interval=3 is for vLLM that writes"):
        lowtide.GRPOConfig(output_dir=str(tmp_path), vllm_weight_check_interval=3)
    lowtide.GRPOConfig(output_dir=str(tmp_path), vllm_weight_check_interval=3, use_vllm=True)


def rank_main(rank: int, folder: str, url: str) -> None:
    with rank_of(Path(folder), rank, 2):
        torch.distributed.init_process_group("gloo")
        model = policy()
        served = VLLMServerGenerator(url, model, limits=Limits(checked_every=1))
        served.sync(model, 0)  # the server took nothing of what the first rank sent
        [[completion]] = served.generate(model, [Request([5, 6], 1, rank)], Sampling(4))
        assert completion.token_ids
        engine = Lossy(rank)  # that of the second took nothing at first
        VLLMColocatedGenerator(engine, checked_every=1).sync(model, 0)
        assert engine.copies == 2
        with pytest.raises(StaleWeights, match="nats away from the policy's"):
            VLLMColocatedGenerator(Lossy(9 * rank), checked_every=1).sync(model, 0)


@pytest.mark.slow
def test_all_ranks_bring_weights_again_that_one_found_wrong(tmp_path):
    engine = Lossy(1)
    with writing_server(engine) as server:
        run_ranks(rank_main, str(meeting_place(tmp_path)), server.url)
    assert engine.copies == 2
