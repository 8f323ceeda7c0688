"""lowtide's SDFTTrainer against TRL 1.16's: steps from the same weights, on the same completions.

Both libraries are given the same completions, which depend on the prompt and on how often it was asked. TRL makes both
models' logits whole; lowtide none.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from datasets import Dataset

from tests.support.references.parity_world import (
    COMMON,
    FIRST_STEPS,
    Writer,
    assert_likelihoods_agree,
    build_model,
    lora,
    sums,
    tokenizer,
    user,
)

trl = pytest.importorskip("trl.experimental.sdft", reason="parity is against trl==1.16.0: install the bench extra")
lowtide = pytest.importorskip("lowtide")

SETTINGS = {
    **{name: value for name, value in COMMON.items() if name != "train_sampling_strategy"},
    **{"learning_rate": 1e-3, "per_device_train_batch_size": 8, "num_generations": 2, "max_completion_length": 24},
}
LOGGED_BY_TRL_ALONE = ["self_distillation/distillation_loss", "sdft/distillation_loss", "step_time"]


@dataclass(frozen=True)
class Case:
    """One way to distil; `flags` go to both libraries, `ours` to lowtide alone."""

    flags: dict[str, Any] = field(default_factory=dict)
    ours: dict[str, Any] = field(default_factory=dict)
    lora: bool = False
    chat: bool = False


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
    "adapters": Case({"learning_rate": 1e-2, "distillation_alpha": 0.0}, lora=True),
}


def rows(count: int, chat: bool) -> Dataset:
    asked = sums(count)
    prompts: list[Any] = [[user(ask)] if chat else ask for ask, _ in asked]
    told = [f"This is how to do it: {answer}." for _, answer in asked]
    return Dataset.from_list(
        [{"prompt": prompt, "privileged_context": each} for prompt, each in zip(prompts, told, strict=True)]
    )


def build_trainer(library: Any, case: Case, folder: Any, more: Any = None) -> Any:
    flags, writer = SETTINGS | {"max_steps": FIRST_STEPS} | case.flags | (more or {}), Writer()
    model = build_model("llama")
    if library is trl and not case.lora and flags.get("teacher_model_kind") != "live":
        model.save_pretrained(folder / "model")  # which TRL loads as the teacher
        model.config._name_or_path = str(folder / "model")
    trainer = library.SDFTTrainer(
        model=model,
        args=library.SDFTConfig(output_dir=str(folder / library.__name__), **flags),
        train_dataset=rows(40, case.chat),
        processing_class=tokenizer(),
        peft_config=lora() if case.lora else None,
    )
    if library is lowtide:
        trainer.rollout_func = writer
    else:
        trainer._generate = lambda prompt_ids: (prompt_ids, writer.completions(prompt_ids))
    return trainer


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=[] if each == "adapters" else pytest.mark.slow) for each in CASES]
)
def test_steps_agree_with_trl(name, tmp_path):
    """The loss, the gradient's norm and the metrics of every step."""
    case = CASES[name]
    theirs = build_trainer(trl, case, tmp_path)
    ours = build_trainer(lowtide, case, tmp_path, case.ours)
    assert_likelihoods_agree(theirs, ours, FIRST_STEPS, unlike=LOGGED_BY_TRL_ALONE)
