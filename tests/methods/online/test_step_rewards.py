"""Rewards at several places of completions: advantages against a loop in plain float64, a step against a dense forward,
and what is said of places that are not there."""

from __future__ import annotations

import math
import statistics
from typing import Any

import pytest
import torch

from lowtide.data.batches.values import OLD, RETURN, TOKEN_ADVANTAGE, VALUE
from lowtide.methods.online.grpo import GRPOOptions
from lowtide.methods.online.learning import ByAdvantage, GroupRewards, Rewarded
from lowtide.methods.online.ppo import ByToken, PPOOptions
from lowtide.methods.online.rloo import RLOOOptions
from lowtide.objectives.step_rewards import StepRewards
from lowtide.rollout.generators.generator import Completion
from lowtide.rollout.rewards.completed import Completed
from lowtide.rollout.rewards.rewards import Rewards
from lowtide.rollout.rollout import Rollout
from tests.support.references.parity_world import build_model, tokenizer
from tests.support.runs.online_runs import even_tokens, every_third_token, online, trained, weights

WRITTEN = ["1111", "1", "110011", "0011", "11111", "111"]
"""Of each token of six completions of two prompts, whether the policy wrote it."""
STEPS: list[Any] = [
    [(1, 0.5), (3, 1.0)],
    [(0, 0.25)],
    [(2, 1.0), (3, 0.0), (5, 0.75)],
    [(0, 9.0), (1, 0.5), (3, 0.5)],  # no token of the policy's ends at the first two or stands before them
    2.0,
    None,
]
OUTCOMES = [1.0, 0.0, math.nan, 0.5, 0.5, 2.0]
FACTORS = [0.5, 2.0]


def rewarded() -> Rewarded:
    completions = [
        Completion([7] * len(own), [0.0] * len(own), [0.0] * len(own), [flag == "1" for flag in own], "stop")
        for own in WRITTEN
    ]
    rollout = Rollout([[5, 6]] * len(WRITTEN), completions, 0)
    ids = [each.token_ids for each in completions]
    known = Completed(["p"] * len(ids), ["c"] * len(ids), ids)
    outcomes = [None if math.isnan(each) else each for each in OUTCOMES]
    scored = Rewards([lambda **_: STEPS, lambda **_: outcomes], weights=FACTORS).scored(known)
    group = GroupRewards(scored.rewards, torch.tensor(FACTORS), 3, steps=scored.steps.with_wholes(scored.rewards))
    return Rewarded(rollout, group, slice(0, len(ids)), torch.device("cpu"))


def pairs_of(number: int) -> list[tuple[int, float]]:
    """The steps of a completion; its reward as a whole is that of its last token."""
    given = STEPS[number]
    return [(len(WRITTEN[number]) - 1, given)] if isinstance(given, float) else given or []


def normalized(values: list[float], group: list[float], scale: str, everyones: list[float]) -> list[float]:
    mean = statistics.fmean(group) if group else 0.0
    over = {"none": [], "group": group, "batch": everyones}[scale]
    factor = statistics.stdev(over) + 1e-4 if scale != "none" else 1.0
    return [(each - mean) / factor for each in values]


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_the_advantage_of_a_token_is_that_of_the_steps_that_end_at_it_or_later(scale):
    """Section 4.1.3 of arXiv 2402.03300, a completion and a token at a time."""
    options: Any = GRPOOptions(scale_rewards=scale)
    options.gradient_accumulation_steps = 1
    found = ByAdvantage().learn(rewarded(), options)
    all_steps = [value for number in range(6) for _, value in pairs_of(number)]
    wholes = [FACTORS[1] * each for each in OUTCOMES]
    expected, of_completions = [], []
    for number, own in enumerate(WRITTEN):
        members = range(number // 3 * 3, number // 3 * 3 + 3)
        steps = [value for member in members for _, value in pairs_of(member)]
        outcomes = [wholes[member] for member in members if not math.isnan(wholes[member])]
        known = [each for each in wholes if not math.isnan(each)]
        outcome = 0.0 if math.isnan(wholes[number]) else normalized([wholes[number]], outcomes, scale, known)[0]
        places = [place for place, _ in pairs_of(number)]
        values = normalized([value for _, value in pairs_of(number)], steps, scale, all_steps)
        for token, flag in enumerate(own):
            later = sum(value for place, value in zip(places, values, strict=True) if place >= token)
            if flag == "1":
                expected.append(outcome + FACTORS[0] * later)
        of_completions.append(outcome + FACTORS[0] * sum(values))
    torch.testing.assert_close(found.score_values[TOKEN_ADVANTAGE].double(), torch.tensor(expected).double())
    torch.testing.assert_close(found.values, torch.tensor(of_completions, dtype=torch.float64))
    assert found.metrics["frac_reward_zero_std"] == 0.0


def test_a_group_whose_steps_and_wholes_are_alike_teaches_nothing():
    made = rewarded()
    same = torch.full_like(made.group.rewards, 0.1 + 0.2)
    steps = StepRewards.of([(n, place, 0, 0.3) for n in range(6) for place in range(n % 2 + 1)]).with_wholes(same)
    found = GRPOOptions().advantages(GroupRewards(same, torch.ones(2), 3, steps=steps))
    assert found.without_spread.tolist() == [True, True]
    assert found.steps is not None
    assert found.steps.tolist() == [0.0] * len(steps)
    assert found.values.tolist() == [0.0] * 6


def test_methods_that_weigh_whole_completions_take_the_sum():
    made = rewarded()
    assert made.group.rewards[:, 0].tolist()[:5] == [1.5, 0.25, 1.75, 10.0, 2.0]
    assert made.group.rewards[:, 0].isnan().tolist() == [False] * 5 + [True]
    total = torch.tensor([0.5 * 1.5 + 2 * 1.0, 0.5 * 0.25, 0.5 * 1.75])
    found = RLOOOptions(beta=0.0).advantages(made.group)
    expected = [total[n] - (total.sum() - total[n]) / 2 for n in range(3)]
    assert found.values[:3].tolist() == pytest.approx([each.item() for each in expected])
    assert found.steps is None


def test_ppo_has_the_rewards_of_steps_at_their_tokens():
    """Without discount, values and penalties, what is to be expected is what is still to come."""
    made = rewarded()
    count = sum(flag == "1" for own in WRITTEN for flag in own)
    made.rollout.score_values.update({OLD: torch.zeros(count), VALUE: torch.zeros(count)})
    found = ByToken().learn(made, PPOOptions(kl_coef=0.0, gamma=1.0, lam=1.0, missing_eos_penalty=0.25))
    expected = []
    for number, own in enumerate(WRITTEN):
        outcome = 0.0 if math.isnan(OUTCOMES[number]) else FACTORS[1] * OUTCOMES[number]
        for token, flag in enumerate(own):
            later = sum(value for place, value in pairs_of(number) if place >= token)
            expected += [outcome + FACTORS[0] * later] if flag == "1" else []
    torch.testing.assert_close(found.score_values[RETURN], torch.tensor(expected))


# -- a step --------------------------------------------------------------------------------------------------------

STEP = {"max_steps": 1, "optim": "sgd", "learning_rate": 0.5, "max_grad_norm": 0.0, "loss_type": "grpo"}


@pytest.mark.parametrize(
    "more",
    [
        {},
        pytest.param({"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}, marks=pytest.mark.slow),
        pytest.param({"tokens_per_microbatch": 60}, marks=pytest.mark.slow),
        pytest.param({"tokens_per_microbatch": 20}, marks=pytest.mark.slow),
    ],
    ids=["whole", "accumulated", "micro-batches", "pieces"],
)
def test_a_step_is_that_of_a_dense_forward(tmp_path, more):
    trainer = online(tmp_path, **{**STEP, **more}, arguments={"reward_funcs": [every_third_token, even_tokens]})
    before, made = weights(trainer), []
    finish = trainer.maker.finish
    trainer.maker.finish = lambda *given, **named: made.append(finish(*given, **named)) or made[0]
    trainer.train()
    [window], dense = made, build_model("llama").double()
    dense.load_state_dict(before, strict=False)
    advantages = iter(window.rollout.score_values[TOKEN_ADVANTAGE].double().tolist())
    loss = torch.zeros((), dtype=torch.float64)
    for prompt, written in zip(window.rollout.prompts, window.rollout.completions, strict=True):
        logits = dense(input_ids=torch.tensor([[*prompt, *written.token_ids]])).logits[0, len(prompt) - 1 : -1]
        logprobs = logits.double().log_softmax(-1)[range(len(written.token_ids)), written.token_ids]
        own = torch.tensor([next(advantages) for _ in written.token_ids], dtype=torch.float64)
        loss = loss - (logprobs * own).mean() / len(window.rollout)
    loss.backward()
    assert len(set(window.rollout.score_values[TOKEN_ADVANTAGE].tolist())) > len(window.rollout)
    after = weights(trainer)
    for name, parameter in dense.named_parameters():
        assert parameter.grad is not None
        moved = before[name].double() - 0.5 * parameter.grad
        torch.testing.assert_close(after[name].double(), moved, rtol=1e-5, atol=1e-7, msg=name)


@pytest.mark.slow
def test_stopped_within_a_window_and_resumed_the_bits_are_the_same(tmp_path):
    options: dict[str, Any] = {
        **{"gradient_accumulation_steps": 2, "steps_per_generation": 4, "num_iterations": 2, "max_steps": 6},
        "arguments": {"reward_funcs": [every_third_token, even_tokens]},
    }
    trained(tmp_path / "parts", **options, save_strategy="steps", save_steps=3)
    resumed = online(tmp_path / "parts", **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "parts" / "checkpoint-3"))
    expected = weights(trained(tmp_path / "whole", **options))
    assert all(torch.equal(value, expected[name]) for name, value in weights(resumed).items())


def test_a_rollout_keeps_its_steps_on_disk_and_beside_others(tmp_path):
    made = rewarded().rollout
    made.steps = StepRewards.of([(2, 1, 0, 0.5), (0, 3, 1, 1.0)])
    made.save(tmp_path / "rollout.safetensors")
    loaded, _ = Rollout.load(tmp_path / "rollout.safetensors")
    entries = lambda steps: list(zip(*(getattr(steps, n).tolist() for n in vars(steps)), strict=True))  # noqa: E731
    assert entries(loaded.steps) == [(0, 3, 1, 1.0), (2, 1, 0, 0.5)]
    assert entries(Rollout.concat([made, loaded]).steps) == [
        (0, 3, 1, 1.0),
        (2, 1, 0, 0.5),
        (6, 3, 1, 1.0),
        (8, 1, 0, 0.5),
    ]
    other = Rollout(
        made.prompts[:1], made.completions[:1], 0, torch.zeros(1, 0), steps=StepRewards.of([(0, 2, 0, 7.0)])
    )
    made.rewards = torch.zeros(6, 0)
    assert entries(made.replaced([2], other).steps) == [(0, 3, 1, 1.0), (2, 2, 0, 7.0)]


# -- places --------------------------------------------------------------------------------------------------------


def of_text(text: str, **more: Any) -> Completed:
    ids = tokenizer()(text)["input_ids"]
    return Completed.of([{"prompt": "Why?"}], ["Why?"], [text], completion_ids=[ids], tokenizer=tokenizer(), **more)


def test_characters_are_found_among_tokens():
    text = "One plus two.\nThree \u00e9\u4e16!"
    known, codes = of_text(text), tokenizer()
    ids = known.completion_ids[0]  # type: ignore[index]
    for characters in range(1, len(text) + 1):
        steps = Rewards(lambda **_: [{"characters": [(characters, 1.0)]}]).scored(known).steps  # noqa: B023
        place = int(steps.place)
        assert len(codes.decode(ids[: place + 1]).rstrip("\ufffd")) >= characters
        assert len(codes.decode(ids[:place]).rstrip("\ufffd")) < characters


WRONG: dict[str, tuple[Any, str]] = {
    "behind the end": ([(4, 1.0)], r"'wrong', completion 0 .*: a step ends at token 4, and .* has 4 tokens \(0 to 3\)"),
    "before the start": ([(-1, 1.0)], "a step ends at token -1"),
    "a text": ([("1", 1.0)], "a step ends at '1', which is no whole number"),
    "nan": ([(0, math.nan)], "returned nan for completion 0"),
    "no pairs": ([0.5, 0.25], "rewards of steps are a list of .token, reward. pairs"),
    "characters": ({"characters": [(99, 1.0)]}, "a step ends after 99 characters, and the completion has "),
    "another name": ({"tokens": [(0, 1.0)]}, "a mapping with 'tokens'; rewards of steps are"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_place_that_is_not_there_is_named(case):
    given, said = WRONG[case]

    def wrong(**_: Any) -> list[Any]:
        return [given]

    known = Completed(["Why?"], ["So."], [[7, 8, 9, 10]], tokenizer=tokenizer())
    with pytest.raises(ValueError, match=said):
        Rewards(wrong).scored(known)


def test_characters_of_several_turns_are_refused():
    known = Completed(["Why?"], ["So."], [[7, 8, 9, 10]])
    with pytest.raises(ValueError, match="places by characters are for completions of one turn without tools"):
        Rewards(lambda **_: [{"characters": [(1, 1.0)]}]).scored(known)
