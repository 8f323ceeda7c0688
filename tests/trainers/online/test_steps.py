"""Steps of GRPO and RLOO on completions that the policy writes: what they learn does not depend on how they are cut."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from transformers import LlamaConfig, LlamaForSequenceClassification

from lowtide.engine.reference import logprobs
from lowtide.ops.logits import linear_logprobs
from lowtide.step.rank_sync import OutOfMemory
from tests.support.marks import slow_but
from tests.support.references.parity_world import tokenizer
from tests.support.runs.online_runs import LOSSES, assert_near, even_tokens, loss_options, online, trained, weights
from tests.support.runs.sabotage import out_of_memory

CUTS = {
    "accumulated": {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8},
    "in twos": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4},
    "within a token budget": {"tokens_per_microbatch": 60},
    "padded": {"padding_free": False, "generation_backend": "transformers"},
    "prompts repeated": {"prefix_sharing": False},
    "written in turns": {"tokens_per_generation_batch": 100},
}


PARTED = [(loss_type, cut) for loss_type in LOSSES for cut in ("accumulated", "within a token budget")]
QUICK = [each for each in PARTED if each[0] == "dapo"]
SWEPT = [each for number, each in enumerate(PARTED) if each not in QUICK and number % 4 in (0, 3)]
"""Each loss in the one cut, and the next one in the other."""


@pytest.mark.parametrize(("loss_type", "cut"), slow_but(QUICK, PARTED, swept=SWEPT))
def test_however_a_step_is_cut_it_learns_the_same(loss_type, cut, tmp_path):
    options = loss_options(loss_type)
    whole = trained(tmp_path / "whole", **options)
    parts = trained(tmp_path / "parts", **options, **CUTS[cut])
    assert_near(weights(parts), weights(whole))


@pytest.mark.parametrize("cut", slow_but(["prompts repeated"], ["in twos", "prompts repeated", "written in turns"]))
@pytest.mark.parametrize("method", slow_but(["RLOO"], ["GRPO", "RLOO"]))
def test_with_a_reference_too(method, cut, tmp_path):
    options = {"beta": 0.1, "num_iterations": 2}
    whole = trained(tmp_path / "whole", method, **options)
    parts = trained(tmp_path / "parts", method, **options, **CUTS[cut])
    assert_near(weights(parts), weights(whole), 1e-5)  # the sampler's log-probs are in float32


def test_old_log_probs_are_the_samplers_and_equal_the_scorers(tmp_path):
    trainer = online(tmp_path, num_iterations=2, temperature=0.8, top_k=20, repetition_penalty=1.3)
    rows = [dict(trainer.train_dataset[row]) for row in (0, 0, 0, 0, 1, 1, 1, 1)]
    made = trainer.maker.make(rows, (0, 0, 0), group=4, version=0)
    batch = made.rollout.batch()
    expected = logprobs(trainer.model, batch, padding_free=True, temperature=0.8)
    torch.testing.assert_close(batch.score_values["old"].double(), expected, rtol=0, atol=1e-5)


def test_the_log_says_what_was_rewarded(tmp_path):
    trainer = trained(tmp_path, logging_steps=1)
    first = next(entry for entry in trainer.state.log_history if "loss" in entry)
    assert first["reward"] == pytest.approx(first["rewards/even_tokens/mean"])
    assert 1 <= first["completions/min_length"] <= first["completions/mean_length"] <= 12
    assert first["frac_reward_zero_std"] == 0.0
    assert first["entropy"] > 0


@pytest.mark.slow
def test_a_reward_is_learned(tmp_path):
    trainer = trained(tmp_path, max_steps=40, learning_rate=1e-2, num_generations=8, logging_steps=5)
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    assert rewards[-1] > rewards[0] + 0.2


@pytest.mark.slow
def test_evaluation_writes_its_own_completions_and_changes_nothing(tmp_path):
    options = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4, "num_generations_eval": 2}
    plain = trained(tmp_path / "plain")
    dataset = plain.train_dataset.select(range(3)).remove_columns("prompt_ids")
    evaluated = trained(tmp_path / "evaluated", arguments={"eval_dataset": dataset}, **options)
    assert_near(weights(evaluated), weights(plain), 0.0)
    found = [entry for entry in evaluated.state.log_history if "eval_reward" in entry]
    assert len(found) == 3
    assert {"eval_loss", "eval_rewards/even_tokens/mean", "eval_completions/mean_length"} <= found[0].keys()
    assert "train_dataset" not in found[0]


@pytest.mark.parametrize("method", slow_but(["GRPO"], ["GRPO", "PPO"]))
def test_scoring_that_runs_out_of_memory_is_repeated_in_smaller_parts(method, tmp_path, caplog):
    options = {"GRPO": {"beta": 0.1}, "PPO": {"num_generations": 1, "num_ppo_epochs": 1}}[method]
    plain = trained(tmp_path / "plain", method, **options)
    failing = online(tmp_path / "failing", method, **options)
    with out_of_memory(failing.model, "head", 0) as fired:
        failing.train()
    assert fired == ["head"]
    assert "out of memory in scoring" in caplog.text
    assert failing.limits.tokens is None  # of updates
    assert_near(weights(failing), weights(plain), 1e-5)


@pytest.mark.slow
def test_one_row_that_cannot_be_scored_stops_the_run_and_says_what_to_lower(tmp_path):
    trainer = online(
        tmp_path, per_device_train_batch_size=1, gradient_accumulation_steps=4, beta=0.1, num_generations=4
    )
    before = weights(trainer)
    with (
        mock.patch.object(
            linear_logprobs.ChunkedHead, "chunks", side_effect=torch.OutOfMemoryError("CUDA out of memory")
        ),
        pytest.raises(OutOfMemory, match=r"in scoring one row of \d+ tokens, .*max_completion_length"),
    ):
        trainer.train()
    assert all(torch.equal(value, before[name]) for name, value in weights(trainer).items())


@pytest.mark.parametrize("method", slow_but(["GRPO"], ["GRPO", "RLOO"]))
def test_the_summary_of_a_run_has_the_metrics_of_steps_not_logged_yet(method, tmp_path):
    """As TRL's last log, which is all that a run shorter than logging_steps has."""
    options = {"entropy_coef": 0.1} if method == "GRPO" else {}
    each = trained(tmp_path, method, logging_steps=1, **options).state.log_history
    seldom = trained(tmp_path, method, logging_steps=100, **options).state.log_history
    steps = [entry for entry in each if "loss" in entry]
    assert len(steps) == 3
    for name in ("reward", "rewards/even_tokens/mean", *(("policy_loss", "entropy_coef") if options else ())):
        assert name not in each[-1]
        mean = sum(entry[name] for entry in steps) / len(steps)
        assert seldom[-1][name] == pytest.approx(mean, rel=1e-6), name
    assert seldom[-1]["num_tokens"] == steps[-1]["num_tokens"]


@pytest.mark.slow
def test_the_weight_of_entropy_is_read_off_the_trainer(tmp_path):
    assert online(tmp_path, entropy_coef=0.25).entropy_coef == 0.25
    options = {"use_adaptive_entropy": True, "entropy_coef": 0.01, "entropy_target": 50.0, "entropy_coef_delta": 0.005}
    assert trained(tmp_path, **options).entropy_coef == pytest.approx(0.01 + 3 * 0.005)


@pytest.mark.slow
def test_ratios_of_sequences_in_a_sum_over_tokens_are_warned_of(tmp_path, caplog):
    for loss_type in ("bnpo", "dr_grpo", "dapo", "cispo", "grpo"):
        caplog.clear()
        online(tmp_path, loss_type=loss_type, importance_sampling_level="sequence")
        assert ("weights each sequence by its completion length" in caplog.text) == (loss_type != "grpo"), loss_type
    caplog.clear()
    online(tmp_path, loss_type="dapo")
    assert "completion length" not in caplog.text


def test_rewards_are_read_off_the_trainer(tmp_path):
    config = LlamaConfig(
        vocab_size=len(tokenizer()),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_labels=1,
        pad_token_id=0,
    )
    classifier = LlamaForSequenceClassification(config)
    given = {"reward_funcs": [even_tokens, classifier], "reward_processing_classes": [None, tokenizer()]}
    trainer = online(tmp_path, arguments=given)
    assert trainer.reward_funcs == given["reward_funcs"]
    assert trainer.reward_func_names[0] == "even_tokens"
    assert trainer.reward_processing_classes == given["reward_processing_classes"]
    with pytest.raises(ValueError, match="processing_classes: there are 1 for 2 reward functions, and they must match"):
        online(tmp_path, arguments=given | {"reward_processing_classes": [tokenizer()]})


def test_what_writes_may_be_set_later(tmp_path):
    trainer = online(tmp_path, max_steps=1)
    assert trainer.rollout_func is None
    asked = []

    def write(prompts, trainer):
        asked.extend(prompts)
        return {"prompt_ids": [[5, 6]] * len(prompts), "completion_ids": [[7, 8]] * len(prompts), "logprobs": None}

    trainer.rollout_func = write
    trainer.train()
    assert len(asked) == 8
    trainer.rollout_func = lambda prompts, trainer: {"prompt_ids": [[1]], "completion_ids": [[2]]}
    with pytest.raises(ValueError, match="rollout_func must return keys prompt_ids, completion_ids, logprobs, and ret"):
        trainer.train()
