"""vLLM in the process that trains, without a vLLM: when the engine sleeps, and what is refused."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lowtide import GRPOConfig, RLOOConfig
from lowtide.compat import vllm as compat
from lowtide.rollout.generators.generator import HoldsWeights, Request, Sampling
from lowtide.rollout.generators.vllm.colocated import VLLMColocatedGenerator
from lowtide.rollout.generators.vllm.engine import Engine, EngineOptions
from lowtide.rollout.generators.vllm.label import StaleWeights
from lowtide.rollout.generators.vllm.turns import WrittenTurn
from lowtide.run.writing import make_generator
from tests.support.models.tiny_llama import tiny_llama

SAMPLING = Sampling(4)


class Notes:
    """An engine that notes what it is told."""

    max_model_length = 64

    def __init__(self) -> None:
        self.told: list[str] = []
        self.loaded: set[str] = set()

    def begin(self) -> None:
        self.told.append("begin")

    def load(self, weights: dict[str, torch.Tensor]) -> None:
        self.told.append("load")
        self.loaded |= weights.keys()

    def end(self) -> None:
        self.told.append("end")

    def sleep(self) -> None:
        self.told.append("sleep")

    def wake(self, what: str) -> None:
        self.told.append(f"wake {what}")

    def write(self, jobs: Any) -> list[list[WrittenTurn]]:
        self.told.append("write")
        return [[WrittenTurn([3], [-1.0], "stop") for _ in turns] for turns, *_ in jobs]


def test_it_sleeps_but_while_it_writes():
    engine, model = Notes(), tiny_llama()
    generator = VLLMColocatedGenerator(engine, sleeps=True)
    for _ in range(2):  # of the same weights: these are lost when it sleeps
        generator.sync(model, 0)
        generator.generate(model, [Request([5], 2)], SAMPLING)
    once = ["wake weights", "begin", "load", "end", "wake kv_cache", "write", "sleep"]
    assert engine.told == ["sleep", *once, *once]
    assert engine.loaded == model.state_dict().keys()


def test_it_sleeps_after_a_failure_too():
    engine, model = Notes(), tiny_llama()
    generator = VLLMColocatedGenerator(engine, sleeps=True)
    generator.sync(model, 0)
    engine.write = lambda jobs: [[]]  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="returned 0 completions"):
        generator.generate(model, [Request([5])], SAMPLING)
    assert engine.told[-1] == "sleep"


def test_awake_it_gets_weights_when_they_changed():
    engine, model = Notes(), tiny_llama()
    generator = VLLMColocatedGenerator(engine, bucket_bytes=5000)
    assert isinstance(generator, HoldsWeights)
    for version in (0, 0, 1):
        generator.sync(model, version)
    assert engine.told.count("begin") == 2
    assert engine.told.count("load") > 2
    with torch.no_grad():
        next(model.parameters()).mul_(2)
    with pytest.raises(StaleWeights):
        generator.generate(model, [Request([5])], SAMPLING)


def test_lengths_that_are_refused():
    model = tiny_llama()
    generator = VLLMColocatedGenerator(Notes())
    generator.sync(model, 0)
    with pytest.raises(ValueError, match=r"vLLM takes 64.*raise vllm_max_model_length"):
        generator.generate(model, [Request([5] * 61)], SAMPLING)


# -- options -----------------------------------------------------------------------------------------------------


def config(**given: Any) -> GRPOConfig:
    return GRPOConfig(output_dir="unused", use_cpu=True, bf16=False, use_vllm=True, **given)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="there is a vLLM here")
def test_without_vllm_it_says_how_to_have_one():
    message = r"install vllm 0.30 to 0.32 .*beside this transformers.*lowtide vllm-serve.*'server'"
    with pytest.raises(ValueError, match=message):
        make_generator(config(), tiny_llama(), None, True)


@pytest.mark.parametrize("version", ["0.29.1", "0.33.0", "1.0", "dev"])
def test_other_versions_of_vllm_are_refused(monkeypatch: pytest.MonkeyPatch, version: str):
    monkeypatch.setattr(compat, "part_of_vllm", lambda name: SimpleNamespace(__version__=version))
    with pytest.raises(ValueError, match=f"vLLM {version} is installed, and lowtide knows 0.30 to 0.32"):
        compat.check_version()


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is what sleeping needs")
def test_sleeping_without_cuda_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(compat, "part_of_vllm", lambda name: SimpleNamespace(__version__="0.32.0"))
    with pytest.raises(ValueError, match="vllm_enable_sleep_mode=True needs CUDA"):
        Engine(EngineOptions(model="m", enable_sleep_mode=True))


def test_sleeping_is_not_for_servers():
    with pytest.raises(ValueError, match="vllm_enable_sleep_mode=True is for vllm_mode='colocate'"):
        make_generator(config(vllm_mode="server", vllm_enable_sleep_mode=True), tiny_llama(), None, True)


def test_colocated_on_several_ranks_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("lowtide.run.vllm.launched", lambda: 2)
    with pytest.raises(ValueError, match=r"runs on one rank, and 2 are started: .*lowtide vllm-serve"):
        make_generator(config(), tiny_llama(), None, True)


def test_vespo_takes_ratios_of_tokens():
    with pytest.raises(ValueError, match="does not go with loss_type='vespo'"):
        config(loss_type="vespo")
    assert config(loss_type="vespo", vllm_importance_sampling_mode="token_mask").corrects


def test_rloo_corrects_nothing():
    assert not RLOOConfig(output_dir="unused", use_cpu=True, bf16=False, use_vllm=True).corrects
    with pytest.raises(ValueError, match="vllm_importance_sampling_correction=True is GRPO's"):
        RLOOConfig(output_dir="unused", use_cpu=True, bf16=False, vllm_importance_sampling_correction=True)
