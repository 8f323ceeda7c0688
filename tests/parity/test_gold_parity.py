"""lowtide's GOLDTrainer against TRL 1.16's: steps from the same weights and a teacher with other tokens.

TRL pads, and holds the probabilities of student and teacher whole. Rows have prompts and completions as plain text, of
which both read the same tokens.
"""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import AutoConfig, AutoModelForCausalLM

from lowtide.data.byte_pairs import learn_tokenizer
from tests.support.references.parity_world import COMMON, SMALL, lora, runs_of, sums, trained_alike

pytest.importorskip("trl", reason="parity is against trl==1.16.0: install the bench extra")
theirs_gold = pytest.importorskip("trl.experimental.gold")
lowtide = pytest.importorskip("lowtide")

SETTINGS = COMMON | {"learning_rate": 1e-3, "adam_epsilon": 1e-4, "lmbda": 0.0, "use_uld_loss": True}
TEXTS = [f"{ask} {answer}" for ask, answer in sums(60, 3)]


@dataclass(frozen=True)
class Case:
    """One way to distil; `flags` go to both libraries, `ours` to lowtide alone."""

    flags: dict[str, Any] = field(default_factory=dict)
    ours: dict[str, Any] = field(default_factory=dict)
    lora: bool = False


BAYESIAN = {"uld_token_merge_strategy": "bayesian"}
OBSERVED = {"uld_token_merge_strategy": "observed"}
HYBRID = BAYESIAN | {"uld_use_hybrid_loss": True}
CASES = {
    "bayesian": Case(BAYESIAN),
    "observed": Case(OBSERVED),
    "hybrid": Case(HYBRID),
    "hybrid, forward, weighted": Case(
        HYBRID | {"beta": 0.0, "uld_hybrid_matched_weight": 0.7, "uld_hybrid_unmatched_weight": 0.2}
    ),
    "hybrid, reverse, observed": Case(HYBRID | OBSERVED | {"beta": 1.0}),
    "by place": Case(BAYESIAN | {"use_extended_uld": False}),
    "with ends": Case(BAYESIAN | {"uld_skip_student_eos": False, "uld_skip_teacher_eos": False}),
    "temperatures": Case(BAYESIAN | {"uld_student_temperature": 1.4, "uld_teacher_temperature": 0.7}),
    "weighed, beside likelihood": Case(
        BAYESIAN | {"uld_distillation_weight": 0.6, "uld_crossentropy_weight": 0.3, "per_device_train_batch_size": 1}
    ),
    "within a token budget": Case(BAYESIAN, {"tokens_per_microbatch": 400}),
    "padded by us": Case(BAYESIAN, {"padding_free": False}),
    "lora": Case(BAYESIAN | {"learning_rate": 5e-3}, lora=True),
}
QUICK = ("bayesian",)
LONG = ()


def model(kind: str, vocab: int, seed: int, **more: Any) -> Any:
    torch.manual_seed(seed)
    config = SMALL | {"model_type": kind, "vocab_size": vocab} | more
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.float32)


@pytest.fixture(autouse=True)
def in_order(monkeypatch):
    """Rows come as they stand in TRL's trainer too, which shuffles whatever it is told."""
    module = theirs_gold.gold_trainer
    repeated = module.RepeatSampler
    monkeypatch.setattr(module, "RepeatSampler", lambda *args, **named: repeated(*args, **named | {"shuffle": False}))


@runs_of(CASES, QUICK, LONG)
def test_steps_agree_with_trl(name, steps, tmp_path):
    """The loss and the gradient's norm of every step. The norm jumps where two probabilities trade places, by a part of
    it that rounding decides once weights differ in their last bits."""
    case = CASES[name]
    theirs = build_trainer(theirs_gold, case, tmp_path, steps)
    ours = build_trainer(lowtide, case, tmp_path, steps, case.ours)
    expected, actual = trained_alike(theirs, ours, steps)
    torch.testing.assert_close(actual["loss"], expected["loss"], rtol=1e-4, atol=1e-4)
    for first, tolerance in ((3, 1e-4), (steps, 2e-2)):
        torch.testing.assert_close(
            actual["grad_norm"][:first], expected["grad_norm"][:first], rtol=tolerance, atol=tolerance
        )


def build_trainer(library: Any, case: Case, folder: Any, steps: int, more: dict[str, Any] | None = None) -> Any:
    student, teacher = learn_tokenizer(TEXTS, 300), learn_tokenizer([text[::-1] for text in TEXTS] + TEXTS[:2], 290)
    teacher.save_pretrained(folder / "teacher")
    flags = SETTINGS | {"max_steps": steps} | case.flags | (more or {})
    rows = [{"prompt": ask, "completion": f" {answer}"} for ask, answer in sums(40)]
    return library.GOLDTrainer(
        model=model("llama", len(student), 0),
        teacher_model=model("qwen2", len(teacher), 1, hidden_size=96, num_hidden_layers=3),
        args=library.GOLDConfig(
            output_dir=str(folder / library.__name__),
            teacher_tokenizer_name_or_path=str(folder / "teacher"),
            **flags,
        ),
        train_dataset=Dataset.from_list(rows),
        processing_class=student,
        peft_config=lora() if case.lora else None,
    )
