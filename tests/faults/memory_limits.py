"""a limit on memory (`ulimit -v`): the run ends with the right numbers, or in one message with what to do"""

from __future__ import annotations

import hashlib
import json
import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, LlamaConfig

import lowtide
from lowtide.demo.model import make_tokenizer
from lowtide.step.rank_sync import OutOfMemory

from .case import FORK, Case, print_to

MIB = 1 << 20
ROWS, TOKENS, VOCABULARY = 16, 128, 512
WIDTH = 2048
"""Of the MLPs: most of the memory for few multiplications."""


@dataclass(frozen=True)
class Limited:
    """A run under a limit."""

    room: int
    """MiB of address space beside what the process has when the limit begins."""
    method: str = "SFT"
    options: dict[str, Any] = field(default_factory=dict)
    adapters: bool = False
    vocabulary: int = VOCABULARY
    hidden: int = 32
    at: str = "training"
    """When the limit begins: "loading" the model from a folder, "making" the trainer, "training" or "evaluating"."""
    wanted: str = ""
    """What the message has to say; empty where the run has to come through."""


RUNS = {
    "a step": Limited(70),
    "a step of little room": Limited(40),
    "a step that no budget lets through": Limited(2, hidden=384, wanted="`max_length`"),
    "a step with checkpointing": Limited(30, options={"gradient_checkpointing": True}),
    "a step with a large head": Limited(60, vocabulary=16384, options={"gradient_checkpointing": True}),
    "a step of adapters": Limited(60, adapters=True),
    "a step with offloading": Limited(40, options={"activation_offloading": True}),
    "a step of DPO": Limited(80, "DPO"),
    "a step of KTO": Limited(80, "KTO"),
    "a step of ORPO": Limited(80, "ORPO"),
    "the optimizer's states": Limited(
        160, hidden=768, options={"gradient_checkpointing": True}, wanted="in the optimizer's step"
    ),
    "the rehearsal": Limited(2, hidden=384, options={"rehearsal": True}, wanted="the states of AdamW take"),
    "loading the model": Limited(20, hidden=768, at="loading", wanted="while loading the model"),
    "making the reference": Limited(20, "DPO", hidden=768, at="making", wanted="precompute_ref_log_probs"),
    "evaluation": Limited(4, at="evaluating", wanted="`per_device_eval_batch_size`"),
}


def rows(method: str) -> Dataset:
    """`ROWS` rows of `TOKENS` tokens."""
    drawn = torch.randint(1, VOCABULARY, (ROWS, TOKENS), generator=torch.Generator().manual_seed(1)).tolist()
    if method == "SFT":
        return Dataset.from_dict({"input_ids": drawn, "labels": drawn})
    columns: dict[str, Any] = {"prompt_ids": [row[: TOKENS // 2] for row in drawn]}
    if method == "KTO":
        columns |= {"completion_ids": [row[TOKENS // 2 :] for row in drawn], "label": [n % 2 == 0 for n in range(ROWS)]}
        return Dataset.from_dict(columns)
    columns |= {"chosen_ids": [row[TOKENS // 2 :] for row in drawn], "rejected_ids": drawn[::-1]}
    return Dataset.from_dict(columns)


def model_of(run: Limited) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=run.vocabulary,
        hidden_size=run.hidden,
        intermediate_size=max(WIDTH, 4 * run.hidden),
        num_hidden_layers=2,
        num_attention_heads=4,
        eos_token_id=0,
    )
    return AutoModelForCausalLM.from_config(config)


def trainer_of(run: Limited, model: Any, folder: Path, **options: Any) -> Any:
    """A trainer on token rows."""
    given = {
        "output_dir": str(folder / "run"),
        "per_device_train_batch_size": ROWS,
        "per_device_eval_batch_size": ROWS,
        "max_steps": 1,
        "learning_rate": 1e-3,
        "use_cpu": True,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "gradient_checkpointing": False,
        "rehearsal": False,
        "dataset_kwargs": {"skip_prepare_dataset": True},
        **run.options,
        **options,
    }
    peft_config = None
    if run.adapters:
        from peft import LoraConfig

        peft_config = LoraConfig(r=4, target_modules="all-linear")
    if run.method != "SFT":
        del given["dataset_kwargs"]
    trainer_class = getattr(lowtide, f"{run.method}Trainer")
    args = getattr(lowtide, f"{run.method}Config")(**given)
    data = rows(run.method)
    more = {"processing_class": make_tokenizer(), "peft_config": peft_config}
    return trainer_class(model=model, args=args, train_dataset=data, eval_dataset=data, **more)


def limit(room: int) -> None:
    """Sets the address space to what the process has now and some MiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    size = pages * os.sysconf("SC_PAGE_SIZE") + room * MIB
    resource.setrlimit(resource.RLIMIT_AS, (size, size))


def run_limited(run: Limited, folder: Path, room: int | None, budget: int | None, result: Path) -> None:
    """Runs, and writes what came of it; without a limit where `room` is None."""
    print_to(folder / f"{result.stem}.txt")

    def now(moment: str) -> None:
        if room is not None and run.at == moment:
            limit(room)

    found: dict[str, Any] = {}
    try:
        model: Any = str(folder / "model") if run.at == "loading" else model_of(run)
        now("loading")
        now("making")
        trainer = trainer_of(run, model, folder, tokens_per_microbatch=budget)
        now("training")
        now("evaluating")
        (trainer.evaluate if run.at == "evaluating" else trainer.train)()
        weights = [p.detach().numpy().tobytes() for p in trainer.model.parameters()]
        found = {"weights": hashlib.sha256(b"".join(weights)).hexdigest(), "budget": trainer.limits.tokens}
    except Exception as error:
        found = {"kind": type(error).__name__, "text": str(error)}
    resource.setrlimit(resource.RLIMIT_AS, (resource.getrlimit(resource.RLIMIT_AS)[1],) * 2)
    result.write_text(json.dumps(found))


def forked(run: Limited, folder: Path, room: int | None, budget: int | None, name: str) -> dict[str, Any]:
    result = folder / f"{name}.json"
    process = FORK.Process(target=run_limited, args=(run, folder, room, budget, result))
    process.start()
    process.join()
    printed = (folder / f"{name}.txt").read_text()[-1000:]
    assert result.exists(), f"exit code {process.exitcode}: {printed}"
    return json.loads(result.read_text()) | {"printed": printed}


def check(run: Limited, folder: Path) -> None:
    """The weights are bit by bit those of the smaller budget, or there is one message."""
    if run.at == "loading":
        model_of(run).save_pretrained(folder / "model")
    found = forked(run, folder, run.room, None, "limited")
    if run.wanted:
        assert found.get("kind") == OutOfMemory.__name__, found
        assert "out of memory" in found["text"], found
        assert run.wanted in found["text"], found
        return
    assert "weights" in found, found
    assert found["budget"] is not None, f"the limit was not felt: {found}"
    assert "the step is repeated" in found["printed"], found
    expected = forked(run, folder, None, found["budget"], "smaller")
    assert found["weights"] == expected["weights"], f"{found}, and with its budget from the start {expected}"


def cases(seed: int) -> Iterator[Case]:
    """Every run under its limit."""
    for name, run in RUNS.items():
        yield Case(name, partial(check, run), seconds=120)
