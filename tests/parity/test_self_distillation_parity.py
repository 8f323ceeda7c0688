"""lowtide's SDFTTrainer against TRL 1.16's: steps from the same weights, on the same completions.

Both libraries are given the same completions, which depend on the prompt and on how often it was asked. TRL makes both
models' logits whole; lowtide none.
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

trl = pytest.importorskip("trl.experimental.sdft", reason="parity is against trl==1.16.0: install the bench extra")
lowtide = pytest.importorskip("lowtide")

SETTINGS = {
    **{name: value for name, value in COMMON.items() if name != "train_sampling_strategy"},
    **{"learning_rate": 1e-3, "per_device_train_batch_size": 8, "num_generations": 2, "max_completion_length": 24},
}
LOGGED_BY_TRL_ALONE = [
    *("self_distillation/distillation_loss", "sdft/distillation_loss", "self_distillation/server_logprob_abs_diff"),
    "step_time",
]


CASES = {
    "likeliest tokens": Case({"distillation_topk": 20, "num_loss_tokens_to_skip": 1}),
    "with a tail, of a moving average": Case(
        {
            "distillation_topk": 20,
            "distillation_add_tail": True,
            "teacher_model_kind": "ema",
            "distillation_alpha": 0.3,
        },
        {"tokens_per_microbatch": 60},
    ),
    "whole distributions, learned from twice": Case(
        {"distillation_mode": "full_logits", "num_iterations": 2, "temperature": 0.7, "teacher_model_kind": "live"},
        {"prefix_sharing": False},
    ),
    "the written token, of conversations": Case(
        {"distillation_mode": "sampled_token", "distillation_alpha": 1.0, "gradient_accumulation_steps": 2}, chat=True
    ),
    "the likeliest tokens that a server would say": Case(
        {"teacher_model_kind": "live", "distillation_topk": 20, "distillation_add_tail": True}, served=True
    ),
    "adapters": Case({"learning_rate": 1e-2, "distillation_alpha": 0.0}, lora=True),
}


def build_trainer(library: Any, case: Case, folder: Any, more: Any = None) -> Any:
    flags = SETTINGS | {"max_steps": FIRST_STEPS} | case.flags | (more or {})
    rows = told_rows(40, case.chat, lambda _, answer: f"This is how to do it: {answer}.")
    return writing_trainer(library, "SDFT", folder, case, flags, train_dataset=rows)


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=[] if each == "adapters" else pytest.mark.slow) for each in CASES]
)
def test_steps_agree_with_trl(name, tmp_path):
    """The loss, the gradient's norm and the metrics of every step."""
    case = CASES[name]
    theirs = build_trainer(trl, case, tmp_path)
    ours = build_trainer(lowtide, case, tmp_path, case.ours)
    assert_likelihoods_agree(theirs, ours, FIRST_STEPS, unlike=LOGGED_BY_TRL_ALONE)
