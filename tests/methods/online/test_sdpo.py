"""Self-distillation policy optimization: what the teacher is told, and what a run does with it. The losses are compared
with TRL's in `tests/parity/test_reprompting_parity.py`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import lowtide
from lowtide.data.batches.values import TOKEN_ADVANTAGE
from lowtide.data.prompts import PromptEncoder
from lowtide.data.teacher_prompts import RepromptEncoder, Reprompts, feedback_of
from lowtide.methods.online.learning import GroupRewards, Rewarded
from lowtide.methods.online.reprompting import Reprompting, demonstrations
from lowtide.methods.online.sdpo import SDPOOptions
from lowtide.ragged import WEIGHT
from lowtide.rollout.generators.generator import Completion
from lowtide.rollout.rollout import Rollout
from tests.support.references.parity_world import tokenizer, user
from tests.support.runs.online_runs import assert_near, online, prompts, trained, weights

WRITTEN = ["a", "<think>b</think> c", "d", "e", "f", "g"]
OPTIONS: dict[str, Any] = {"max_steps": 1, "num_generations": 4, "max_completion_length": 6, "optim": "sgd"}
OPTIONS |= {"success_reward_threshold": 0.5, "max_grad_norm": 0.0, "learning_rate": 1.0, "teacher_model_kind": "base"}
TEMPLATES = {
    "reprompt_template": "{prompt}|{solution}|{feedback}",
    "solution_template": "S{successful_previous_attempt}",
    "feedback_template": "F{feedback_raw}",
}


def made(**options: Any) -> Any:
    found: Any = SDPOOptions(**options)
    found.gradient_accumulation_steps = 1
    return found


def rewarded(rewards: list[float]) -> Rewarded:
    """Six completions of two prompts, of which the second has feedback for its second completion."""
    encode = PromptEncoder(tokenizer())
    ids = [encode(text) for text in WRITTEN]
    completions = [Completion(each, [0.0] * len(each), [0.0] * len(each), [True] * len(each)) for each in ids]
    rows = [{"prompt": "p", "privileged_context": "no" if number == 4 else " "} for number in range(6)]
    rollout = Rollout([encode("p")] * 6, completions, 0, teacher_prompts=[encode("p")] * 6)
    group = GroupRewards(torch.tensor(rewards, dtype=torch.float64)[:, None], torch.ones(1, dtype=torch.float64), 3)
    return Rewarded(rollout, group, slice(0, 6), torch.device("cpu"), rows=rows)


def test_which_completion_a_teacher_is_shown():
    group = rewarded([0.0, 1.0, 2.0, 0.9, 0.0, float("nan")]).group
    assert demonstrations(group, made()) == [1, 2, 1, None, None, None]
    assert demonstrations(group, made(dont_reprompt_on_self_success=False))[:3] == [1, 1, 1]
    assert demonstrations(group, made(success_reward_threshold=0.9)) == [1, 2, 1, None, 3, 3]
    assert demonstrations(group, made(use_successful_as_teacher=False)) == [None] * 6


def test_what_the_teacher_reads_and_what_counts():
    options = made(include_environment_feedback=True, remove_thinking_from_demonstration=True, **TEMPLATES)
    found, learning = rewarded([0.0, 1.0, 0.0, 0.0, 0.0, 0.0]), Reprompting()
    make = learning.teacher_prompts(found, options, tokenizer())
    assert make is not None
    texts = [tokenizer().decode(each) for each in make()]
    assert texts == ["p|Sc|", "p", "p|Sc|", "p", "p", "p"], "feedback alone is in the prompts of the rows already"
    learned, lengths = learning.learn(found, options), found.lengths
    of_each = [part.sum().item() for part in learned.score_values[WEIGHT].split(lengths)]
    assert of_each == pytest.approx([1, 0, 1, 0, 1, 0])
    assert learned.score_values[TOKEN_ADVANTAGE][lengths[0]] > 0
    fractions = {name.split("/")[1]: value for name, value in learned.metrics.items() if "/" in name}
    assert fractions == pytest.approx(
        {
            "reward_std": (5 / 36 + 25 / 36) ** 0.5 / 5**0.5,
            "flat_group_fraction": 1 / 2,
            "success_sample_fraction": 2 / 6,
            "feedback_available_fraction": 1 / 6,
            "feedback_used_fraction": 1 / 6,
            "reprompt_sample_fraction": 3 / 6,
            "success_group_fraction": 1 / 2,
        }
    )
    found.rollout.teacher_prompts = None
    assert learning.teacher_prompts(found, made(distillation_weight=0.0), tokenizer()) is None


def test_feedback_may_be_left_to_those_without_a_solution():
    options = made(include_environment_feedback=True, environment_feedback_only_without_solution=True, **TEMPLATES)
    for rewards, expected in (([0.0] * 4 + [0.0, 1.0], "p|Sg|"), ([0.0] * 6, "p")):
        make = Reprompting().teacher_prompts(rewarded(rewards), options, tokenizer())
        assert make is not None
        assert tokenizer().decode(make()[4]) == expected


def test_prompts_of_the_teacher():
    templates = Reprompts(*TEMPLATES.values())
    encoder = RepromptEncoder(tokenizer(), reprompts=templates, gives_feedback=True)
    plain, talk = PromptEncoder(tokenizer()), [{"role": "system", "content": "s"}, user("x")]
    assert encoder.told({"prompt": "x"}, 0, "{a}", None) == plain("x|S{a}|")
    assert encoder.of_row({"prompt": talk, "privileged_context": "y"}, 0) == plain([talk[0], user("x||Fy")])
    assert encoder.of_row({"prompt": talk, "privileged_context": " "}, 0) == plain(talk)
    assert (
        RepromptEncoder(tokenizer(), 3, reprompts=templates).told({"prompt": "x"}, 0, "abcdef", None)
        == plain("x|Sabcdef|")[-3:]
    )
    assert feedback_of({"privileged_context": [user("a"), user("b")]}) == "a\nb"
    assert feedback_of({"privileged_context": 3}) is None
    with pytest.raises(ValueError, match=r"row 2: the teacher's prompt .* ends with a message of the user"):
        encoder.of_row({"prompt": [*talk, {"role": "assistant", "content": "z"}]}, 2)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sampled_token", "topk_logits"])
def test_micro_batches_pieces_and_repeated_prompts_change_nothing(mode, tmp_path):
    options = OPTIONS | {"distillation_mode": mode, "distillation_topk": 30, "logging_steps": 1}
    options |= {"distillation_weight": 0.5}
    whole = trained(tmp_path / "whole", "SDPO", **options)
    expected, loss = weights(whole), whole.state.log_history[0]["loss"]
    ways: list[dict[str, Any]] = [{"tokens_per_microbatch": 60, "prefix_sharing": False}, {"tokens_per_microbatch": 16}]
    for number, way in enumerate(ways):
        parts = trained(tmp_path / f"parts {number}", "SDPO", **options, **way)
        assert_near(weights(parts), expected)
        assert parts.state.log_history[0]["loss"] == pytest.approx(loss, rel=1e-5)


def test_what_cannot_work_is_refused(tmp_path):
    for options, said in (
        ({"distillation_alpha": 0.5}, "distillation_alpha=0.5: set distillation_alpha=1"),
        ({"distillation_mode": "topk_logits"}, "requires distillation_topk"),
        ({"ref_model_storage": "8bit"}, "'ema' moves it"),
        ({"reprompt_template": "{prompt}{feedback}"}, "has no place {solution}"),
        ({"feedback_template": "{feedback_raw}{x}"}, "can't be filled in"),
        ({"scale_rewards": "some"}, "scale_rewards='some' is not one of"),
        ({"loss_type": "cispo"}, "loss_type='cispo'"),
    ):
        with pytest.raises(ValueError, match=said):
            lowtide.SDPOConfig(output_dir=str(tmp_path), use_cpu=True, **options)  # type: ignore[arg-type]
    assert lowtide.SDPOConfig(output_dir=str(tmp_path), use_cpu=True, scale_rewards=False).scale_rewards == "none"  # type: ignore[arg-type]
    ends = prompts(8).map(lambda row: {"prompt": [user("x"), {"role": "assistant", "content": row["prompt"]}]})
    with pytest.raises(ValueError, match="row 0: the teacher's prompt"):
        online(tmp_path, "SDPO", arguments={"train_dataset": ends})


def test_windows_that_teach_nothing_are_told_at_the_first_and_every_so_often(tmp_path, caplog):
    options: dict[str, Any] = {"max_steps": 5, "diagnostics_warning_interval": 2, "max_completion_length": 4}
    flat: Any = {"reward_funcs": lambda completion_ids, **_: [0.0] * len(completion_ids)}
    trained(tmp_path / "flat", "SDPO", **options, arguments=flat)
    for said in ("all completions are rewarded alike", "nothing is distilled: no completion reached"):
        counts = [each.rsplit("(", 1)[1] for each in caplog.messages if said in each]
        assert counts == ["1 windows in a row)", "2 windows in a row)", "4 windows in a row)"]
    caplog.clear()
    trained(
        tmp_path / "silent", "SDPO", **options | {"diagnostics_warning_interval": 0, "max_steps": 1}, arguments=flat
    )
    assert not [each for each in caplog.messages if "in a row" in each]


def test_rewards_within_the_tolerance_are_alike():
    found = rewarded([0.0, 1e-3, 0.0, 0.5, 0.5, 0.5])
    wide = Reprompting().learn(found, made(diagnostics_flat_tolerance=1e-2, **TEMPLATES)).metrics
    narrow = Reprompting().learn(found, made(**TEMPLATES)).metrics
    assert wide["self_distillation/flat_group_fraction"] > narrow["self_distillation/flat_group_fraction"]
    assert narrow["self_distillation/reward_std"] == pytest.approx(
        torch.tensor([0, 1e-3, 0, 0.5, 0.5, 0.5]).std().item()
    )


def test_a_weight_without_effect_is_refused():
    with pytest.raises(ValueError, match=r"beta=0.1 has no effect in SDPO, nor in TRL"):
        lowtide.SDPOConfig(output_dir="run", use_cpu=True, beta=0.1)
