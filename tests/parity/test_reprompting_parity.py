"""lowtide's SDPOTrainer against TRL 1.16's: steps from the same weights, on the same completions and rewards.

Both libraries are given the same completions, which depend on the prompt and on how often it was asked, and reward them
by what they are; the teacher's prompts are each library's own.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.references.parity_world import (
    COMMON,
    FIRST_STEPS,
    assert_likelihoods_agree,
    told_rows,
    writing_trainer,
)
from tests.support.references.parity_world import WritingCase as Case
from tests.support.runs.online_runs import even_tokens

trl = pytest.importorskip("trl.experimental.sdpo", reason="parity is against trl==1.16.0: install the bench extra")
lowtide = pytest.importorskip("lowtide")

SETTINGS = {
    **{name: value for name, value in COMMON.items() if name != "train_sampling_strategy"},
    **{"learning_rate": 1e-3, "per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 24},
    "success_reward_threshold": 0.5,
}
OTHER_NAMES = ["reward_mean", "reward_std", "reward_min", "reward_max", "group_reward_std_mean", "flat_group_fraction"]
UNLIKE = [
    *(
        f"self_distillation/{name}"
        for name in (*OTHER_NAMES, "rewards/even_tokens", "distillation_loss", "policy_loss")
    ),
    *("sdpo/distillation_loss", "step_time"),
]


TWICE = {"num_iterations": 2}
CASES = {
    "the written token, with feedback, of conversations": Case(
        {"include_environment_feedback": True, "gradient_accumulation_steps": 2}, chat=True
    ),
    "beside the policy's loss, learned from twice": Case(
        {
            **{"distillation_weight": 0.4, "dont_reprompt_on_self_success": False, "temperature": 0.7, **TWICE},
            **{"loss_type": "grpo", "importance_sampling_level": "sequence"},
        },
        {"tokens_per_microbatch": 60},
    ),
    "the policy's loss alone": Case({"distillation_weight": 0.0, "epsilon_high": 0.3, **TWICE}),
    "likeliest tokens": Case(
        {"distillation_mode": "topk_logits", "distillation_topk": 20, "distillation_add_tail": True, **TWICE},
        {"prefix_sharing": False},
    ),
    "whole distributions beside the policy's loss": Case(
        {
            **{"distillation_mode": "full_logits", "distillation_alpha": 0.3, "distillation_weight": 0.4, **TWICE},
            **{"teacher_model_kind": "live", "loss_type": "grpo", "importance_sampling_level": "sequence"},
        },
        {"tokens_per_microbatch": 60},
    ),
    "adapters": Case({"learning_rate": 1e-2, "teacher_model_kind": "base"}, lora=True),
}


def build_trainer(library: Any, case: Case, folder: Any, more: Any = None) -> Any:
    flags = SETTINGS | {"max_steps": FIRST_STEPS} | case.flags | (more or {})
    rows = told_rows(40, case.chat, lambda number, answer: f"It was {len(answer)} long." if number % 3 else "")
    return writing_trainer(library, "SDPO", folder, case, flags, train_dataset=rows, reward_funcs=even_tokens)


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=[] if each == "adapters" else pytest.mark.slow) for each in CASES]
)
def test_steps_agree_with_trl(name, tmp_path):
    """The loss, the gradient's norm and the metrics of every step."""
    case = CASES[name]
    theirs = build_trainer(trl, case, tmp_path)
    ours = build_trainer(lowtide, case, tmp_path, case.ours)
    assert_likelihoods_agree(theirs, ours, FIRST_STEPS, unlike=UNLIKE)
