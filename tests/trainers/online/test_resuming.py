"""A run that stops in the middle of a window of completions goes on with the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.runs.online_runs import online, trained, weights

WINDOW = {"gradient_accumulation_steps": 2, "steps_per_generation": 4, "num_iterations": 3}
"""Six optimizer steps learn from what is written at a time."""
SAVING = {"save_strategy": "steps", "save_steps": 1}
OPTIONS: dict[str, Any] = {
    **WINDOW,
    "beta": 0.05,
    "use_adaptive_entropy": True,
    "entropy_coef": 0.01,
    "entropy_target": 6.0,
}
STEPS = 15


def assert_same_weights(first: Any, second: Any) -> None:
    expected, found = weights(first), weights(second)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_stopped_within_a_window_and_resumed_the_bits_are_the_same(tmp_path):
    options = OPTIONS | {"max_steps": 8}
    saving = SAVING | {"save_steps": 4}
    first = online(tmp_path / "parts", **options, **saving)
    first.args.max_steps = 4
    first.train()
    second = online(tmp_path / "parts", **options, **saving)
    second.train(resume_from_checkpoint=str(tmp_path / "parts" / "checkpoint-4"))
    assert_same_weights(trained(tmp_path / "whole", **options), second)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run that wrote nothing; and its folder has the checkpoints that another one wrote after each of its steps."""
    folder = tmp_path_factory.mktemp("whole")
    found = trained(folder, **OPTIONS, max_steps=STEPS)
    assert_same_weights(found, trained(folder, **OPTIONS, max_steps=STEPS, **SAVING))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("step", [1, 2, 5, 6, 9, 10, 14])  # each place of a window, and some of the third
def test_resumed_anywhere_in_a_window_the_bits_are_the_same(step, whole, tmp_path):
    resumed = online(tmp_path, **OPTIONS, max_steps=STEPS)
    resumed.train(resume_from_checkpoint=str(Path(whole.args.output_dir) / f"checkpoint-{step}"))
    assert_same_weights(whole, resumed)


@pytest.mark.slow
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


def test_the_first_rows_are_written_and_scored_as_later_ones_are(tmp_path):
    begun = []

    def written(prompts, trainer):
        begun.append(trainer.runner.begun)
        ids = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
        count = len(prompts)
        return {"prompt_ids": ids, "completion_ids": [[5, 6, 7]] * count, "logprobs": [[-1.0] * 3] * count}

    trained(tmp_path, max_steps=2, arguments={"rollout_func": written})
    assert begun == [True, True]
