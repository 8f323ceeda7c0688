"""lowtide's SFTTrainer against TRL 1.16's: steps from the same weights, on the same rows in the same order.

The losses can only agree to 1e-4 if tokenization, masks, truncation, normalisation, gradients, clipping and the
optimizer's step all do; TRL pads, so this also compares the ragged path with the padded one inside a real run.
"""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from datasets import Dataset

from tests.support.marks import slow_but
from tests.support.references.parity_world import (
    COMMON,
    assert_likelihoods_agree,
    assert_metrics_agree,
    build_model,
    lora,
    numbers,
    rows_of,
    runs_of,
    tokenizer,
)

trl = pytest.importorskip("trl", reason="parity is against trl==1.16.0: install the bench extra")
lowtide = pytest.importorskip("lowtide")

SETTINGS = COMMON | {"per_device_eval_batch_size": 4, "learning_rate": 1e-3}


@dataclass(frozen=True)
class Case:
    """One way to train; `flags` go to both libraries, `ours` to lowtide alone."""

    format: str = "text"
    flags: dict[str, Any] = field(default_factory=dict)
    ours: dict[str, Any] = field(default_factory=dict)
    model: str = "llama"
    rows: int = 40
    lora: bool = False


def accumulated(rows: int, steps: int, **flags: Any) -> dict[str, Any]:
    return {"per_device_train_batch_size": rows, "gradient_accumulation_steps": steps, **flags}


def packed(**flags: Any) -> dict[str, Any]:
    """A step takes every bin, so that the order in which a packer returns them cannot matter."""
    return {"packing": True, "max_length": 120, "per_device_train_batch_size": 32, **flags}


CASES = {
    "text": Case(),
    "text, nothing checkpointed": Case(flags={"gradient_checkpointing": False}),
    "text, tied head": Case(model="tied"),
    "text cut at the end": Case(flags={"max_length": 24}),
    "text cut at the start": Case(flags={"max_length": 24, "truncation_mode": "keep_end"}),
    "text, last batch short": Case(rows=22),  # of the sixth step
    "text, padded by us": Case(ours={"padding_free": False}),
    "text within a token budget": Case(ours={"tokens_per_microbatch": 300}),
    "messages": Case("messages"),
    "messages, assistant only": Case("messages", {"assistant_only_loss": True}),
    "messages, assistant only, cut": Case("messages", {"assistant_only_loss": True, "max_length": 60}),
    "conversations from and value": Case("conversations"),
    "prompt and completion": Case("prompt_completion"),
    "prompt and completion, both scored": Case("prompt_completion", {"completion_only_loss": False}),
    "prompt and completion, conversational": Case("prompt_completion_messages", ours={"turns": "whole"}),
    "accumulated 2x4": Case("prompt_completion", accumulated(2, 4)),
    "accumulated 2x4, last group short": Case("prompt_completion", accumulated(2, 4), rows=42),
    "accumulated 1x4, nothing checkpointed": Case(flags=accumulated(1, 4, gradient_checkpointing=False)),
    "packed": Case(flags=packed(), rows=10),
    "packed, long rows cut": Case(flags=packed(max_length=64), rows=10),
    "packed, long rows split": Case(flags=packed(max_length=64, packing_strategy="bfd_split"), rows=10),
    "packed, completions": Case("prompt_completion", packed(), rows=10),
    "packed, assistant only": Case("messages", packed(assistant_only_loss=True), rows=6),
    "lora": Case("prompt_completion", {"learning_rate": 1e-2}, lora=True),
    "lora, nothing checkpointed": Case(flags={"learning_rate": 1e-2, "gradient_checkpointing": False}, lora=True),
    "dft": Case("prompt_completion", {"loss_type": "dft"}),
    "dft, accumulated": Case(flags=accumulated(2, 2, loss_type="dft")),
    "label smoothing": Case("prompt_completion", {"label_smoothing_factor": 0.1}),
    "label smoothing, accumulated": Case(flags=accumulated(2, 2, label_smoothing_factor=0.1)),
    "mixtral with its auxiliary loss": Case(model="mixtral"),
    "mixtral, auxiliary loss switched off": Case(model="mixtral", flags={"router_aux_loss_coef": 0.0}),
    "qwen3_moe with an auxiliary loss": Case(model="qwen3_moe", flags={"router_aux_loss_coef": 0.01}),
    # An auxiliary loss is no sum over rows: it depends on which rows share a micro-batch, and TRL weighs micro-batches
    # alike where lowtide weighs them by tokens. One row each, of one length, leaves the same thing to compare.
    "mixtral, accumulated": Case(model="mixtral", flags=accumulated(1, 4, router_aux_loss_coef=0.05, max_length=13)),
}
QUICK = ("text",)
OF_TOKENS = {"entropy": 0.01, "mean_token_accuracy": 0.5}
"""Accumulated, TRL's are means of means, which weigh tokens by their micro-batch."""
OF_EVALUATION = ("eval_runtime", "eval_samples_per_second", "eval_steps_per_second", "eval_model_preparation_time")
OF_EVALUATION += ("eval_num_tokens",)  # of the training so far
LONG = (*QUICK, "packed", "messages, assistant only", "lora", "mixtral with its auxiliary loss")

EVALUATIONS = {
    # One batch holds all rows: over several, TRL's is the mean of the batches' means, ours the mean over tokens.
    "text": Case(flags={"per_device_eval_batch_size": 8}),
    "text, padded by us": Case(flags={"per_device_eval_batch_size": 8}, ours={"padding_free": False}),
    "text within a token budget": Case(flags={"per_device_eval_batch_size": 8}, ours={"tokens_per_microbatch": 300}),
    "messages, assistant only": Case("messages", {"per_device_eval_batch_size": 8, "assistant_only_loss": True}),
    "prompt and completion": Case("prompt_completion", {"per_device_eval_batch_size": 8}),
    "packed": Case(flags=packed(per_device_eval_batch_size=32), rows=16),
    "dft": Case("prompt_completion", {"per_device_eval_batch_size": 8, "loss_type": "dft"}),
    "label smoothing": Case(flags={"per_device_eval_batch_size": 8, "label_smoothing_factor": 0.1}),
    "mixtral": Case(model="mixtral", flags={"per_device_eval_batch_size": 8}),
}


@runs_of(CASES, QUICK, LONG)
def test_steps_agree_with_trl(name, steps, tmp_path):
    """The loss, the gradient's norm and the metrics of every step."""
    case = CASES[name]
    theirs = build_trainer(trl, case, tmp_path, steps)
    ours = build_trainer(lowtide, case, tmp_path, steps, case.ours)
    near = OF_TOKENS if "gradient_accumulation_steps" in case.flags else {}
    assert_likelihoods_agree(theirs, ours, steps, near)


@pytest.mark.parametrize("name", slow_but(["text"], EVALUATIONS))
def test_evaluation_agrees_with_trl(name, tmp_path):
    case = EVALUATIONS[name]
    held_out = Dataset.from_list(rows_of(case.format, 8, seed=1))
    theirs = build_trainer(trl, case, tmp_path, 1, eval_dataset=held_out)
    ours = build_trainer(lowtide, case, tmp_path, 1, case.ours, eval_dataset=held_out)
    ours.model.load_state_dict(theirs.model.state_dict())
    expected, actual = numbers([theirs.evaluate()]), numbers([ours.evaluate()])
    torch.testing.assert_close(actual["eval_loss"], expected["eval_loss"], rtol=1e-5, atol=0.0)
    assert_metrics_agree(actual, expected, unlike=OF_EVALUATION)


def build_trainer(
    library: Any, case: Case, folder: Any, steps: int, more: dict[str, Any] | None = None, **datasets: Any
) -> Any:
    """Returns the library's SFTTrainer for a case."""
    flags = SETTINGS | {"max_steps": steps} | case.flags | (more or {})
    args = library.SFTConfig(output_dir=str(folder / library.__name__), **flags)
    return library.SFTTrainer(
        model=build_model(case.model),
        args=args,
        train_dataset=Dataset.from_list(rows_of(case.format, case.rows)),
        processing_class=tokenizer(),
        peft_config=lora() if case.lora else None,
        **datasets,
    )
