"""The methods: one row each in the only table of them, which trainer, planner, command line, demo and docs read.

The table costs nothing to import: a method's declaration is loaded when it is asked for. A user's own method, by its
path (`my_module.MY_METHOD`), is in it too, though not listed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lowtide.methods.method import Method


@dataclass(frozen=True)
class MethodRow:
    """A method as the table knows it before its declaration is loaded."""

    public: str
    """`SFT` of `SFTConfig` and `SFTTrainer`."""
    summary: str
    """A line of help."""
    module: str = ""
    """The module whose `METHOD` is the declaration; by default the one of the method's name beside this table."""


FILES = (".yaml", ".yml", ".json", ".jsonl", ".csv", ".parquet")
"""What is no path of a method, though it might be: names of files."""


def is_path(name: object) -> bool:
    """Whether a name may be the path of a user's own method, such as `my_module.MY_METHOD`."""
    return (
        isinstance(name, str)
        and "." in name
        and not name.endswith(FILES)
        and all(part.isidentifier() for part in name.split("."))
    )


class MethodTable(Mapping[str, "Method"]):
    """Declarations by the names of their commands, and those of users by their paths."""

    def __init__(self, rows: dict[str, MethodRow]) -> None:
        self.rows = rows
        """The built-in ones."""
        self._own: dict[str, MethodRow] = {}

    def __getitem__(self, name: str) -> Method:
        row = self.row(name)
        if name not in self.rows:
            return import_module(f"{__name__}.own").own_method(name)
        return import_module(row.module or f"{__name__}.{name}").METHOD

    def row(self, name: str) -> MethodRow:
        """The row of a method, or of a user's own, whose classes are named after its path; nothing is loaded."""
        if name in self.rows or not is_path(name):
            return self.rows[name]
        words = name.replace(".", "_").split("_")
        made = MethodRow("".join(word.capitalize() for word in words), f"the method that {name} declares")
        return self._own.setdefault(name, made)

    def __contains__(self, name: object) -> bool:
        """By the rows, or by its form: no declaration is loaded, which would import torch before allocators are told
        anything."""
        return name in self.rows or is_path(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def public(self, name: str) -> str | None:
        """The method of a public name such as `DPOTrainer` or `DPOConfig`; None where it is of none."""
        for method, row in (*self.rows.items(), *self._own.items()):
            if name in (f"{row.public}Config", f"{row.public}Trainer"):
                return method
        return None


METHODS = MethodTable(
    {
        "sft": MethodRow("SFT", "fine-tune a model on texts, conversations or prompts with completions"),
        "pretrain": MethodRow("Pretrain", "train a language model on documents, from random weights or from a model"),
        "dpo": MethodRow(
            "DPO", "direct preference optimization: pairs of a chosen and a rejected answer, against a reference"
        ),
        "kto": MethodRow(
            "KTO", "Kahneman-Tversky optimization: single answers that are desirable or not, against a reference"
        ),
        "reward": MethodRow("Reward", "train a reward model, which scores an answer, on pairs"),
        "prm": MethodRow(
            "PRM",
            "train a process reward model, which says of each step of an answer whether it is right",
            module="lowtide.methods.process.prm",
        ),
        "token-classification": MethodRow(
            "TokenClassification",
            "train an encoder to label words, such as names and places",
            f"{__name__}.token_classification",
        ),
        "sequence-classification": MethodRow(
            "SequenceClassification",
            "train a model to classify texts, or pairs of texts, or to predict numbers of them",
            f"{__name__}.sequence_classification",
        ),
        "orpo": MethodRow("ORPO", "odds ratio preference optimization: pairs, without a reference"),
        "cpo": MethodRow("CPO", "contrastive preference optimization and SimPO: pairs, without a reference"),
        "tpo": MethodRow(
            "TPO", "triple preference optimization: pairs with a third answer to imitate, without a reference model"
        ),
        "bco": MethodRow(
            "BCO", "binary classifier optimization: single answers that are desirable or not, against a reference"
        ),
        "gkd": MethodRow(
            "GKD",
            "generalized knowledge distillation: a student follows a teacher's distributions",
            module="lowtide.methods.taught.gkd",
        ),
        "gold": MethodRow(
            "GOLD",
            "distillation across tokenizers: a student follows a teacher with a vocabulary of its own",
            module="lowtide.methods.taught.gold",
        ),
        "distillation": MethodRow(
            "Distillation",
            "on-policy distillation: a teacher's distributions on completions that the student writes",
            module="lowtide.methods.online.distillation",
        ),
        "iw-opd": MethodRow(
            "IWOPD",
            "importance-weighted on-policy distillation: a teacher's log-probabilities of what the student writes",
            module="lowtide.methods.online.iw_opd",
        ),
        "sdft": MethodRow(
            "SDFT",
            "self-distillation fine-tuning: the policy's distributions after a prompt with a demonstration in it",
            module="lowtide.methods.online.sdft",
        ),
        "sdpo": MethodRow(
            "SDPO",
            "self-distillation policy optimization: the policy's distributions after a prompt with a rewarded answer",
            module="lowtide.methods.online.sdpo",
        ),
        "grpo": MethodRow(
            "GRPO",
            "group relative policy optimization: completions that the model writes, rewarded against each other",
            module="lowtide.methods.online.grpo",
        ),
        "gmpo": MethodRow(
            "GMPO",
            "geometric-mean policy optimization: GRPO with the geometric mean of a completion's clipped ratios",
            module="lowtide.methods.online.gmpo",
        ),
        "a2po": MethodRow(
            "A2PO",
            "optimal advantage regression (A*-PO): one rewarded completion a prompt, beside values estimated before",
            module="lowtide.methods.online.a2po",
        ),
        "rloo": MethodRow(
            "RLOO",
            "REINFORCE with a leave-one-out baseline: completions that the model writes, rewarded",
            module="lowtide.methods.online.rloo",
        ),
        "online-dpo": MethodRow(
            "OnlineDPO",
            "online DPO: pairs of completions that the model writes, of which a judge or rewards prefer one",
            module="lowtide.methods.online.online_dpo",
        ),
        "ppo": MethodRow(
            "PPO",
            "proximal policy optimization: completions that the model writes, rewarded, and a value function",
            module="lowtide.methods.online.ppo",
        ),
        "seq2seq": MethodRow(
            "Seq2Seq", "sequence to sequence: an encoder-decoder writes a target, such as a summary, for a source"
        ),
        "masked-lm": MethodRow(
            "MaskedLM",
            "masked language modelling: an encoder predicts hidden tokens",
            module="lowtide.methods.masked_lm",
        ),
        "replaced-token-detection": MethodRow(
            "ReplacedTokenDetection",
            "replaced-token detection (ELECTRA): an encoder tells which tokens a generator wrote",
            module="lowtide.methods.replaced_token_detection",
        ),
    }
)
