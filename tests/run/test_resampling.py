"""Prompts whose completions are all rewarded alike are replaced before a window is learned from."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from lowtide.rollout.generators.generator import Completion
from lowtide.rollout.rollout import Rollout
from lowtide.run.rollouts import Made
from tests.support.runs.online_runs import even_tokens, online, prompts, spread_where_even, trained, weights

SOME: dict[str, Any] = {
    "arguments": {"reward_funcs": spread_where_even},
    "dynamic_sampling_rounds": 8,
    "max_completion_length": 6,
}
"""Of half of the prompts nothing is learned."""


def windows(trainer: Any) -> list[Made]:
    """What a trainer learns from, as it is made."""
    found, finish = [], trainer.maker.finish

    def finished(own: Made, *given: Any, **named: Any) -> Made:
        found.append(own)
        return finish(own, *given, **named)

    trainer.maker.finish = finished
    return found


def groups(made: Made, size: int = 4) -> list[tuple[Any, ...]]:
    """Of each prompt: itself, whether its rewards differ, and its completions."""
    rollout = made.rollout
    return [
        (
            tuple(rollout.prompts[place]),
            len({*rollout.rewards[place : place + size, 0].tolist()}) > 1,
            [each.token_ids for each in rollout.completions[place : place + size]],
        )
        for place in range(0, len(rollout), size)
    ]


@pytest.mark.slow
def test_groups_with_spread_stay_and_others_give_way_to_other_prompts(tmp_path):
    plain = online(tmp_path / "plain", **{**SOME, "dynamic_sampling_rounds": 0}, per_device_train_batch_size=24)
    filled = online(tmp_path / "filled", **SOME, per_device_train_batch_size=24)
    before, after = windows(plain), windows(filled)
    calls, generate = [], filled.maker.generator.generate

    def counted(model: Any, requests: Any, *given: Any) -> Any:
        calls.append(len(requests))
        return generate(model, requests, *given)

    filled.maker.generator.generate = counted
    for trainer in (plain, filled):
        trainer.args.max_steps = 1
        trainer.train()
    (first,), (second,) = before, after
    flat = [number for number, (_, differs, _) in enumerate(groups(first)) if not differs]
    assert 0 < len(flat) < 6
    assert all(differs for _, differs, _ in groups(second))
    known = {tuple(row["prompt_ids"]) for row in filled.train_dataset}
    for number, (ours, theirs) in enumerate(zip(groups(second), groups(first), strict=True)):
        assert (ours == theirs) == (number not in flat)
        assert ours[0] in known
    rewards = even_tokens([each.token_ids for each in second.rollout.completions])
    assert second.rollout.rewards[:, 0].tolist() == rewards
    logs = filled.state.log_history[0]
    assert calls[:2] == [24, 4 * len(flat)]  # all that a round lacks is one call
    assert len(calls) == 1 + logs["dynamic_sampling/rounds"]
    assert sum(calls[1:]) == 4 * logs["dynamic_sampling/replaced_prompts"]
    assert logs["dynamic_sampling/frac_reward_zero_std_before"] == pytest.approx(len(flat) / 6)
    assert logs["frac_reward_zero_std"] == 0.0
    assert plain.state.log_history[0]["frac_reward_zero_std"] == pytest.approx(len(flat) / 6)


@pytest.mark.slow
def test_at_the_limit_groups_stay_and_it_is_said_once(tmp_path, caplog):
    def constant(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [1.0] * len(completion_ids)

    trainer = online(tmp_path, arguments={"reward_funcs": constant}, dynamic_sampling_rounds=2, max_steps=2)
    with caplog.at_level(logging.WARNING):
        trainer.train()
    logs = trainer.state.log_history[0]
    assert (logs["dynamic_sampling/rounds"], logs["dynamic_sampling/replaced_prompts"]) == (2, 4)
    assert (logs["frac_reward_zero_std"], logs["loss"], logs["grad_norm"]) == (1.0, 0.0, 0.0)
    assert caplog.text.count("after dynamic_sampling_rounds=2 rounds the completions of 2 prompts") == 1


@pytest.mark.slow
def test_stopped_within_a_window_and_resumed_the_bits_are_the_same(tmp_path):
    options = {**SOME, "gradient_accumulation_steps": 1, "steps_per_generation": 2, "max_steps": 4}
    saving = {"save_strategy": "steps", "save_steps": 3}
    whole = trained(tmp_path, **options, **saving)
    resumed = online(tmp_path, **options, **saving)
    resumed.train(resume_from_checkpoint=str(Path(tmp_path) / "checkpoint-3"))
    expected, found = weights(whole), weights(resumed)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_what_it_does_not_go_with_is_refused(tmp_path):
    arguments = {"train_dataset": prompts().to_iterable_dataset()}
    with pytest.raises(ValueError, match="dynamic_sampling_rounds=1 does not go with a stream"):
        online(tmp_path, arguments=arguments, dynamic_sampling_rounds=1)
    served = {"use_vllm": True, "vllm_mode": "server", "max_staleness": 1}
    with pytest.raises(ValueError, match=r"dynamic_sampling_rounds=1 has prompts replaced .* and max_staleness=1"):
        online(tmp_path, dynamic_sampling_rounds=1, **served)
    with pytest.raises(ValueError, match="dynamic_sampling_rounds=-1 must be at least 0"):
        online(tmp_path, dynamic_sampling_rounds=-1)


def test_columns_numbers_and_calls_of_completions_go_with_them():
    def made(tokens: list[int], **more: Any) -> Made:
        written = [Completion([t], [0.0], [0.0], [True]) for t in tokens]
        rollout = Rollout([[t] for t in tokens], written, 0, torch.tensor(tokens).float()[:, None])
        return Made(rollout, [*map(str, tokens)], [*map(chr, tokens)], **more)

    first = made([65, 66, 67], extra={"a": [1, 2, 3]}, logged={"n": [1.0]}, calls=[(1, 0), (2, 0), (3, 1)])
    other = made([70], extra={"b": [9]}, logged={"n": [2.0], "m": [3.0]}, calls=[(7, 7)])
    found = first.replaced([1], other)
    assert [each.token_ids for each in found.rollout.completions] == [[65], [70], [67]]
    assert found.rollout.prompts == [[65], [70], [67]]
    assert found.rollout.rewards.flatten().tolist() == [65.0, 70.0, 67.0]
    assert (found.prompts, found.completions) == (["65", "70", "67"], ["A", "F", "C"])
    assert found.extra == {"a": [1, None, 3], "b": [None, 9, None]}
    assert found.logged == {"n": [1.0, 2.0], "m": [3.0]}
    assert found.calls == [(1, 0), (7, 7), (3, 1)]
    assert first.rollout.rewards.flatten().tolist() == [65.0, 66.0, 67.0]
