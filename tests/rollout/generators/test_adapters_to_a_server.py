"""GRPO whose adapters go to a server without their base: the run is the one that sends them merged, and a server that
comes to write by other weights ends it with a checkpoint."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from transformers import TrainerCallback

from lowtide.rollout.generators.vllm.label import StaleWeights
from lowtide.rollout.generators.vllm.turns import WrittenTurn
from tests.support.runs.online_runs import assert_near, online, weights
from tests.support.vllm.writing_server import Writes, writing_server


def run(folder: Path, engine: Writes, *callbacks: TrainerCallback, **options: Any) -> Any:
    with writing_server(engine) as server:
        served = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": server.url}
        short = {"per_device_train_batch_size": 4, "num_generations": 2, "max_completion_length": 4, "max_steps": 4}
        adapters = LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
        torch.manual_seed(1)
        trainer = online(folder, **served, **short, **options, arguments={"peft_config": adapters})
        for each in callbacks:
            trainer.add_callback(each)
        trainer.train()
    return trainer


def starts_again(engine: Writes, number: int, found: list[WrittenTurn]) -> list[WrittenTurn]:
    """A server that has no weights any more after the second request, which is the last of the first check."""
    if number == 2 and engine.service is not None:
        engine.service.labels, engine.adapters = [], {}
    return found


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [0, 1])
def test_the_run_is_the_one_that_sends_them_merged(tmp_path, staleness):
    alone, merged = Writes(), Writes()
    alone.max_lora_rank = 8
    if staleness == 0:  # beside training, nothing could be sent to it
        alone.after = functools.partial(starts_again, alone)
    found = run(tmp_path / "a", alone, max_staleness=staleness, vllm_weight_check_interval=2)
    expected = run(tmp_path / "m", merged, max_staleness=staleness, vllm_weight_check_interval=0)
    assert_near(weights(found), weights(expected))
    assert alone.copies == (2 if staleness == 0 else 1) < 3 <= merged.copies
    assert len(alone.adapters) <= 3
    assert "adapters alone" in found.written_by
    assert "in buckets: the server takes no adapters" in expected.written_by


class Spoils(TrainerCallback):
    """Changes what a server holds, and what it is sent from then on."""

    def __init__(self, engine: Writes) -> None:
        self.engine = engine

    def on_step_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        if state.global_step == 2:
            self.engine.put_adapter = lambda name, data: None  # type: ignore[method-assign]
            older = next(iter(self.engine.adapters.values()))
            self.engine.adapters = Always(older)  # type: ignore[assignment]
            self.engine.begin = lambda: None  # type: ignore[method-assign]


class Always(dict):
    """One adapter under every name."""

    def __init__(self, adapter: bytes) -> None:
        super().__init__()
        self.adapter = adapter

    def __getitem__(self, name: str) -> bytes:
        return self.adapter

    def __delitem__(self, name: str) -> None:
        pass


@pytest.mark.slow
def test_a_server_that_goes_on_by_stale_weights_ends_the_run_with_a_checkpoint(tmp_path):
    engine = Writes()
    engine.max_lora_rank = 8
    saving = {"save_strategy": "steps", "save_steps": 100, "learning_rate": 0.3, "vllm_weight_check_interval": 1}
    with pytest.raises(StaleWeights, match="does not write by the weights after step 2") as raised:
        run(tmp_path, engine, Spoils(engine), **saving)
    assert (tmp_path / "checkpoint-2").is_dir()
    assert any("checkpoint-2" in each for each in raised.value.__notes__)
