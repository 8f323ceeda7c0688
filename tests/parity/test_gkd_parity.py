"""lowtide's GKDTrainer against TRL 1.16's: steps from the same weights and teacher, on the same rows in the same order.

TRL pads, and holds the logits of student and teacher whole.
"""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from datasets import Dataset

from tests.support.references.parity_world import (
    COMMON,
    assert_likelihoods_agree,
    assistant,
    build_model,
    build_teacher,
    lora,
    numbers,
    runs_of,
    sums,
    tokenizer,
    two_turns,
    user,
)

pytest.importorskip("trl", reason="parity is against trl==1.16.0: install the bench extra")
theirs_gkd = pytest.importorskip("trl.experimental.gkd")
lowtide = pytest.importorskip("lowtide")

SETTINGS = COMMON | {"learning_rate": 1e-3, "lmbda": 0.0, "per_device_eval_batch_size": 8}


@dataclass(frozen=True)
class Case:
    """One way to distil; `flags` go to both libraries, `ours` to lowtide alone."""

    flags: dict[str, Any] = field(default_factory=dict)
    ours: dict[str, Any] = field(default_factory=dict)
    model: str = "llama"
    lora: bool = False
    turns: int = 1


def accumulated(rows: int, steps: int) -> dict[str, Any]:
    return {"per_device_train_batch_size": rows, "gradient_accumulation_steps": steps}


CASES = {
    "jensen-shannon": Case(),
    "forward": Case({"beta": 0.0}),
    "reverse": Case({"beta": 1.0}),
    "mostly reverse": Case({"beta": 0.9}),
    "tied head": Case(model="tied"),
    "two turns": Case(turns=2),
    "cut at the start": Case({"max_length": 60}, turns=2),
    "within a token budget": Case(ours={"tokens_per_microbatch": 300}),
    "padded by us": Case(ours={"padding_free": False}),
    "nothing checkpointed": Case({"gradient_checkpointing": False}),
    "accumulated 2x4": Case(accumulated(2, 4)),
    "lora": Case({"learning_rate": 1e-2}, lora=True),
}
QUICK = ("jensen-shannon",)
LONG = (*QUICK, "forward", "reverse", "lora")


def rows(count: int, turns: int, seed: int = 0) -> Dataset:
    pairs = sums(count, seed)
    talks = [
        [user(question), assistant(answer)] if turns == 1 else two_turns(question, answer) for question, answer in pairs
    ]
    return Dataset.from_list([{"messages": talk} for talk in talks])


@runs_of(CASES, QUICK, LONG)
def test_steps_agree_with_trl(name, steps, tmp_path):
    """The loss, the gradient's norm and the metrics of every step."""
    case = CASES[name]
    theirs = build_trainer(theirs_gkd, case, tmp_path, steps)
    ours = build_trainer(lowtide, case, tmp_path, steps, case.ours)
    assert_likelihoods_agree(theirs, ours, steps)


@pytest.mark.parametrize("beta", [0.5])
def test_evaluation_agrees_with_trl(beta, tmp_path):
    case, held_out = Case({"beta": beta}), rows(8, 1, seed=1)
    theirs = build_trainer(theirs_gkd, case, tmp_path, 1, eval_dataset=held_out)
    ours = build_trainer(lowtide, case, tmp_path, 1, eval_dataset=held_out)
    expected, actual = numbers([theirs.evaluate()]), numbers([ours.evaluate()])
    torch.testing.assert_close(actual["eval_loss"], expected["eval_loss"], rtol=1e-5, atol=0.0)


def build_trainer(
    library: Any, case: Case, folder: Any, steps: int, more: dict[str, Any] | None = None, **datasets: Any
) -> Any:
    flags = SETTINGS | {"max_steps": steps} | case.flags | (more or {})
    flags |= {"turns": "whole"} if library is lowtide else {}
    return library.GKDTrainer(
        model=build_model(case.model),
        teacher_model=build_teacher(),
        args=library.GKDConfig(output_dir=str(folder / library.__name__), **flags),
        train_dataset=rows(40, case.turns),
        processing_class=tokenizer(),
        peft_config=lora() if case.lora else None,
        **datasets,
    )
