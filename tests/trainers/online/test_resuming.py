"""A run that stops in the middle of a window of completions goes on with the same bits."""

from __future__ import annotations

import random

import pytest
import torch

from tests.support.marks import slow_but
from tests.support.runs.online_runs import online, trained, weights

WINDOW = {"gradient_accumulation_steps": 2, "steps_per_generation": 4, "num_iterations": 3}
"""Six optimizer steps learn from what is written at a time."""
SAVING = {"save_strategy": "steps", "save_steps": 1}
MOMENTS = [(4, 8), *((step, 15) for step in random.Random(0).sample(range(1, 15), 10))]
"""Steps after which a run stops, and the steps of all of it."""


@pytest.mark.parametrize(("step", "steps"), slow_but(MOMENTS[:1], MOMENTS))
def test_resumed_anywhere_in_a_window_the_bits_are_the_same(step, steps, tmp_path):
    options = {
        **WINDOW,
        "max_steps": steps,
        "beta": 0.05,
        "use_adaptive_entropy": True,
        "entropy_coef": 0.01,
        "entropy_target": 6.0,
    }
    whole = trained(tmp_path / "whole", **options)
    first = online(tmp_path / "parts", **options, **SAVING)
    first.args.max_steps = step
    first.train()
    second = online(tmp_path / "parts", **options, **SAVING)
    second.train(resume_from_checkpoint=str(tmp_path / "parts" / f"checkpoint-{step}"))
    expected, found = weights(whole), weights(second)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_a_checkpoint_between_windows_holds_no_rollout(tmp_path):
    trained(tmp_path, max_steps=2, **SAVING)
    assert not list(tmp_path.glob("checkpoint-*/rollout_*"))


def test_a_checkpoint_within_a_window_holds_it_under_its_manifest(tmp_path):
    trained(tmp_path, **WINDOW, max_steps=2, **SAVING)
    found = tmp_path / "checkpoint-2" / "rollout_0.safetensors"
    assert found.exists()
    found.write_bytes(found.read_bytes()[:-8])
    resumed = online(tmp_path, **WINDOW, max_steps=15, **SAVING)
    with pytest.raises(ValueError, match="rollout_0"):
        resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
