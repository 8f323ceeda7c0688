"""A run that ran out of memory for good says where, on what, what was held, and what would have helped."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from lowtide.memory.allocators.largest_tensors import LargestTensors
from lowtide.planner.estimate import Estimate
from lowtide.step.rank_sync import OutOfMemory
from lowtide.trainers.predictions import predicted
from tests.support.runs.sabotage import out_of_memory
from tests.support.runs.small_sft import trainer

MIB = 1 << 20


def failed(run) -> str:
    with out_of_memory(run.model, "backward", 0), pytest.raises(OutOfMemory) as caught:
        run.train()
    assert caught.value.failure is not None
    return str(caught.value)


def test_the_largest_tensors_are_found_once_each():
    big = torch.zeros(3 << 20, dtype=torch.int64)
    views = [big[1:], big.view(3, -1)]
    weight = torch.nn.Parameter(torch.zeros(5 << 20))
    weight.grad = torch.zeros(5 << 20)
    largest = LargestTensors(torch.device("cpu"))
    largest.take_in_living()
    found = largest.text(3)
    assert found[0] == "24.0 MiB tensor int64 [3145728]"
    assert set(found[1:]) == {"20.0 MiB weight float32 [5242880]", "20.0 MiB gradient float32 [5242880]"}
    assert len(views) == 2


@pytest.mark.slow
def test_the_report_names_phase_rows_tensors_bytes_and_what_helps(tmp_path: Path):
    text = failed(trainer(tmp_path, per_device_train_batch_size=1))
    assert "in backward of micro-batch 0 (1 row(s) of 26 tokens)" in text
    assert "lower `max_length`" in text
    # What else lives in the process of the tests may be larger than this model.
    assert re.search(r"The largest tensors then: (\d+ x )?[\d,.]+ (B|KiB|MiB) (weight|gradient|tensor) \w+ \[", text)
    assert "The peak was " in text


def test_what_would_not_help_is_not_named_and_effects_are(tmp_path: Path, monkeypatch):
    def estimated(size: int) -> Estimate:
        return Estimate(size * MIB, "backward", {"backward": {"activations": size * MIB}}, "cpu")

    def predicted(_trainer, changes, beside) -> list[Estimate]:
        return [estimated(60 if "mlp_tile_tokens" in settings else 100) for settings in changes]

    monkeypatch.setattr("lowtide.trainers.predictions.predicted", predicted)
    tiled = "mlp_tile_tokens=3 (exact, predicted peak of tensors 60.0 MiB in place of 100.0 MiB)"
    assert failed(trainer(tmp_path, per_device_train_batch_size=1)).endswith(f"What helps first: {tiled}")


@pytest.mark.slow
def test_effects_are_those_of_an_estimate(tmp_path: Path):
    run = trainer(tmp_path, per_device_train_batch_size=4)
    changes = [
        {}, {"gradient_checkpointing": False}, {"per_device_train_batch_size": 1}, {"optimizer_in_backward": True}
    ]  # fmt: skip
    plain, kept, thin, refused = predicted(run, changes, beside=0)
    assert isinstance(refused, ValueError)
    assert "clipping" in str(refused)
    assert kept.tensor_bytes > plain.tensor_bytes > thin.tensor_bytes


def test_an_estimate_that_fails_does_not_hide_the_error(tmp_path: Path, monkeypatch):
    def predicted(_trainer, changes, beside) -> list[Estimate]:
        raise RuntimeError("cannot be traced")

    monkeypatch.setattr("lowtide.trainers.predictions.predicted", predicted)
    text = failed(trainer(tmp_path, per_device_train_batch_size=1))
    assert "What helps first: activation_offloading=True (exact)" in text
