"""A plan in the settings of another trainer, and which of its savings that trainer lacks.

Option names are those of TRL 1.16 (`SFTConfig`, `DPOConfig`, `ModelConfig`), of Axolotl's `utils/schemas` and
LLaMA-Factory's `hparams` in November 2026, and of Unsloth's `FastLanguageModel`. What a trainer has no word for is left
out and named in a comment, so that nobody takes the predicted peak for that trainer's.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from lowtide.memory.allocators.measure import bytes_text
from lowtide.planner.answers.given_settings import PAIRED, Given
from lowtide.planner.answers.translations import DATASET, REWARD_MODEL, TEMPLATE, axolotl, llama_factory, trl, unsloth
from lowtide.planner.answers.unsloth_script import unsloth_script
from lowtide.planner.plan import Plan

FIRST = "FIRST-NODE"
"""Stands for the address of the first of several nodes, and RANK for a node's number."""
SHARED = {"prefix_sharing": "the prompt of a row is computed once for each of its completions"}


@dataclass(frozen=True)
class Trainer:
    """Another trainer."""

    title: str
    methods: Mapping[str, Mapping[str, Any]]
    """By our method, what says so there."""
    command: Callable[[Given, str], str]
    """That runs a file."""
    translate: Callable[[Given], None]
    file: str = "plan.yaml"
    """What the command calls the file where it has no name yet."""


def check_method(other: str, method: str) -> None:
    """Refuses a method that another trainer does not have.

    Raises:
        ValueError: it does not; says which ones it has.
    """
    trainer = TRAINERS[other]
    if method not in trainer.methods:
        raise ValueError(
            f"--for {other}: {trainer.title} has no {method}; it has {', '.join(trainer.methods)}. Leave --for out"
        )


def settings_for(other: str, plan: Plan, file: str | None = None) -> str:
    """A plan as a file of another trainer: YAML, or a script for Unsloth.

    Args:
        other: the trainer, of `TRAINERS`.
        plan: with the user's own settings.
        file: where it will be written.

    Raises:
        ValueError: the trainer has no such method.
    """
    check_method(other, plan.method)
    trainer, given = TRAINERS[other], Given.of(plan)
    shares = plan.method in PAIRED and given.left.get("prefix_sharing", True)
    given.left.pop("prefix_sharing", None)
    trainer.translate(given)
    lacks = given.lacking() | (SHARED if shares else {})
    if other == "unsloth":
        text = unsloth_script(given.written, plan.method)
    else:
        values = {**trainer.methods[plan.method], **given.written}
        text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
    head = [
        f"{trainer.title}, {plan.method}; from a plan of lowtide for {bytes_text(plan.budget_bytes)} on {plan.device}.",
        f"lowtide's predicted peak is {bytes_text(plan.chosen.peak_bytes)}. {trainer.title} was not measured: without",
        "what it lacks, below, it takes more.",
        *(f"- {name}: {why}" for name, why in lacks.items()),
        *(f"{word} stands for {what}." for word, what in PLACEHOLDERS.items() if word in text),
        f"Run it: {trainer.command(given, shlex.quote(file or trainer.file))}",
    ]
    return "".join(f"# {line}\n" for line in head) + text


PLACEHOLDERS = {
    DATASET: "your rows, as that trainer names and reads them",
    TEMPLATE: "the model's chat template, by its name there",
    REWARD_MODEL: "the reward model, a folder or a name on the hub",
    "REWARD_FUNCS": "your reward functions",
}
"""Words in a file that have to be replaced."""


def _run_trl(given: Given, file: str) -> str:
    several = f" --num_processes {given.processes}" if given.processes > 1 else ""
    if given.nodes > 1:
        several += f" --num_machines {given.nodes} --machine_rank RANK --main_process_ip {FIRST}"
        several += " --main_process_port 29500"
    return f"trl {given.method} --config {file}{several}"


def _run_axolotl(given: Given, file: str) -> str:
    several = ""
    if given.processes > 1:
        several = f" --launcher torchrun -- --nproc_per_node={given.processes // given.nodes}"
    if given.nodes > 1:
        several += f" --nnodes={given.nodes} --rdzv_backend=c10d --rdzv_endpoint={FIRST}:29500"
    return f"axolotl train {file}{several} (set `type` of the dataset as its format needs)"


def _run_llama_factory(given: Given, file: str) -> str:
    several = ""
    if given.processes > 1:
        several = f"FORCE_TORCHRUN=1 NPROC_PER_NODE={given.processes // given.nodes} "
    if given.nodes > 1:
        several += f"NNODES={given.nodes} NODE_RANK=RANK MASTER_ADDR={FIRST} MASTER_PORT=29500 "
    return f"{several}llamafactory-cli train {file} (name dataset and template as its own tables have them)"


TRAINERS: dict[str, Trainer] = {
    "trl": Trainer("TRL", {name: {} for name in ("sft", "dpo", "kto", "reward", "grpo", "rloo")}, _run_trl, trl),
    "axolotl": Trainer(
        "Axolotl",
        {
            "sft": {},
            "reward": {"reward_model": True},
            **{name: {"rl": name} for name in ("dpo", "kto", "orpo", "grpo")},
        },
        _run_axolotl,
        axolotl,
    ),
    "llama-factory": Trainer(
        "LLaMA-Factory",
        {
            "sft": {"stage": "sft"},
            "pretrain": {"stage": "pt"},
            "reward": {"stage": "rm"},
            "dpo": {"stage": "dpo"},
            "orpo": {"stage": "dpo", "pref_loss": "orpo"},
            "kto": {"stage": "kto"},
            "ppo": {"stage": "ppo"},
        },
        _run_llama_factory,
        llama_factory,
    ),
    "unsloth": Trainer(
        "Unsloth",
        {name: {} for name in ("sft", "dpo", "kto", "orpo", "grpo")},
        lambda _, file: f"python {file}",
        unsloth,
        "plan.py",
    ),
}
"""By the name that `--for` takes."""
