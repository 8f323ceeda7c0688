"""Groups with spread are kept and take the places of later ones without: which, with which numbers, after a stop."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lowtide.data.batches.values import OLD
from tests.support.runs.online_runs import even_tokens, online, trained, weights

OPTIONS: dict[str, Any] = {"replay_buffer_size": 2, "max_steps": 4, "per_device_train_batch_size": 12}
"""Windows of three groups of four."""


def in_the_first_windows(completion_ids: list[list[int]], trainer_state: Any, **kwargs: Any) -> list[float]:
    """Rewards with spread in the first two windows; later, the second group of three alone has some."""
    found = even_tokens(completion_ids)
    early = trainer_state.global_step < 2
    return [reward if early or 4 <= n < 8 else 0.25 for n, reward in enumerate(found)]


def windows_of(trainer: Any) -> list[Any]:
    """What is learned from, window by window, which training adds to."""
    made, finish = [], trainer.maker.finish
    trainer.maker.finish = lambda *given, **named: made.append(finish(*given, **named)) or made[-1]
    return made


def groups_of(made: Any) -> list[tuple]:
    """Of each group of a window its tokens, its rewards and the log-probabilities of who wrote it."""
    rollout = made.rollout
    old = rollout.score_values[OLD].split([sum(flags) for flags in rollout.scored])
    ids = [tuple(each.token_ids) for each in rollout.completions]
    whole = list(zip(ids, rollout.rewards.flatten().tolist(), [tuple(each.tolist()) for each in old], strict=True))
    return [tuple(whole[first : first + 4]) for first in range(0, len(whole), 4)]


def score(group: tuple) -> float:
    """The sum of the advantages' sizes, times the deviation."""
    rewards = torch.tensor([reward for _, reward, _ in group], dtype=torch.float64)
    return ((rewards - rewards.mean()) / (rewards.std() + 1e-4)).abs().sum().item() * rewards.std().item()


def test_kept_groups_take_the_places_of_those_without_spread(tmp_path):
    trainer = online(tmp_path, **OPTIONS, arguments={"reward_funcs": in_the_first_windows})
    made = windows_of(trainer)
    trainer.train()
    first, second, third, fourth = map(groups_of, made)
    best = sorted([*first, *second], key=score, reverse=True)[:2]
    assert third[0] in best
    assert third[2] in best
    assert third[1] not in best
    best = sorted([*best, third[1]], key=score, reverse=True)[:2]
    assert fourth[0] in best
    assert fourth[2] in best
    logs = [each for each in trainer.state.log_history if "replay/replaced_groups" in each]
    assert [each["replay/replaced_groups"] for each in logs] == [0, 0, 2, 2]
    assert [each["replay/kept_groups"] for each in logs] == [0, 2, 2, 2]
    assert all(each["frac_reward_zero_std"] == 0 for each in logs)


def test_without_a_group_to_take_their_places_they_stay(tmp_path):
    trainer = online(
        tmp_path, **OPTIONS | {"max_steps": 2}, arguments={"reward_funcs": lambda completion_ids, **_: [0.5] * 12}
    )
    made = windows_of(trainer)
    trainer.train()
    assert [each.metrics["frac_reward_zero_std"] for each in made] == [1.0, 1.0]
    assert trainer.replay.kept is None


@pytest.mark.slow
def test_stopped_and_resumed_the_bits_are_the_same(tmp_path):
    options: dict[str, Any] = {**OPTIONS, "arguments": {"reward_funcs": in_the_first_windows}}
    options |= {"num_iterations": 2, "max_steps": 8}
    trained(tmp_path / "parts", **options, save_strategy="steps", save_steps=1)
    expected = weights(trained(tmp_path / "whole", **options))
    for step in (2, 3, 4, 5):
        resumed = online(tmp_path / f"from {step}", **options)
        resumed.train(resume_from_checkpoint=str(tmp_path / "parts" / f"checkpoint-{step}"))
        assert all(torch.equal(value, expected[name]) for name, value in weights(resumed).items()), step


def test_images_are_refused(tmp_path):
    trainer = online(tmp_path, **OPTIONS)
    trainer.training_run.shows_images = True
    with pytest.raises(ValueError, match="replay_buffer_size=2 does not go with prompts that show images"):
        trainer._make_replay()
