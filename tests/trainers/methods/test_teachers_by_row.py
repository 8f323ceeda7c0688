"""Several teachers in memory: each row learns of its own, as from a server that has all of its distribution."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import AutoConfig, AutoModelForCausalLM

import lowtide
from lowtide import DistillationConfig, GKDConfig
from lowtide.ranks.sharding import Sharding
from tests.support.references.parity_world import SMALL, VOCABULARY, Writer, build_model, sums, tokenizer
from tests.support.runs.distilling import SETTINGS, build_teacher, losses, weights
from tests.support.vllm.teaching_server import Teaches, teaching_server

KINDS = ["sums", "words", "sums", "sums", "words", "sums", "words", "sums"] * 2
OPTIONS: dict[str, Any] = {name: each for name, each in SETTINGS.items() if name not in ("lmbda", "max_new_tokens")}
OPTIONS |= {"max_completion_length": 12, "max_steps": 2, "per_device_train_batch_size": 8, "teacher_column": "kind"}


def teachers() -> dict[str, Any]:
    return {"sums": build_teacher(), "words": build_teacher(hidden_size=48)}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Where the teachers lie, in float64."""
    place, found = tmp_path_factory.mktemp("teachers"), {}
    for name, model in teachers().items():
        model.save_pretrained(place / name)
        tokenizer().save_pretrained(place / name)
        found[name] = str(place / name)
    return found


def rows() -> Dataset:
    return Dataset.from_list(
        [{"prompt": ask, "kind": kind} for (ask, _), kind in zip(sums(len(KINDS)), KINDS, strict=True)]
    )


def trained(folder: Path, kind: str, **options: Any) -> Any:
    trainer = getattr(lowtide, f"{kind}Trainer")(
        model=build_model("llama").double(),
        args=getattr(lowtide, f"{kind}Config")(output_dir=str(folder), **OPTIONS | options),
        train_dataset=rows(),
        processing_class=tokenizer(),
        rollout_func=Writer(),
    )
    trainer.train()
    return trainer


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What a run learns of two servers that say all of their distributions."""
    known: dict[str, Any] = {}

    def found(kind: str, beta: float) -> Any:
        if f"{kind} {beta}" not in known:
            with ExitStack() as stack:
                urls = {n: stack.enter_context(teaching_server(Teaches(t, tokenizer()))) for n, t in teachers().items()}
                named: dict[str, Any] = {"beta": beta, "loss_top_k": VOCABULARY}
                named = named if kind == "Distillation" else {"use_teacher_server": True}
                run = trained(tmp_path_factory.mktemp("served"), kind, teacher_model_server_urls=urls, **named)
            known[f"{kind} {beta}"] = losses(run), weights(run)
        return known[f"{kind} {beta}"]

    return found


CASES: dict[str, tuple[str, float, dict[str, Any]]] = {
    "whole": ("Distillation", 0.0, {}),
    "micro-batches": (
        *("Distillation", 1.0),
        {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4},
    ),
    "pieces": ("Distillation", 0.5, {"tokens_per_microbatch": 16}),
    "padded": ("Distillation", 0.5, {"padding_free": False}),
    "streamed": ("Distillation", 0.0, {"base_weights": "stream"}),
    "written tokens alone": ("IWOPD", 0.0, {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_each_row_learns_of_its_own_teacher(name, folders, served, tmp_path):
    kind, beta, options = CASES[name]
    named = {"beta": beta} if kind == "Distillation" else {}
    run = trained(tmp_path, kind, teacher_model_names_or_paths=folders, **named, **options)
    expected_losses, expected = served(kind, beta)
    torch.testing.assert_close(losses(run), expected_losses, rtol=2e-5, atol=1e-7)
    for key, found in weights(run).items():
        torch.testing.assert_close(found, expected[key], rtol=1e-4, atol=2e-5, msg=key)


def test_a_plan_counts_all_of_them(folders, tmp_path):
    config = DistillationConfig(
        output_dir=str(tmp_path), use_cpu=True, max_completion_length=8, teacher_model_names_or_paths=folders
    )
    found = lowtide.estimate(config, model=build_model("llama").config, lengths=[20] * 16, processing_class=tokenizer())
    held = sum(p.numel() * 4 for model in teachers().values() for p in model.parameters())
    assert all(phase["reference"] == pytest.approx(held, rel=0.01) for phase in found.phases.values())


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "one, too": ({"teacher_model_name_or_path": "T"}, "are several: leave one of them out"),
    "served too": ({"teacher_model_server_url": "http://h:1"}, "loads a teacher"),
    "no folder": ({"teacher_model_names_or_paths": {"a": 3}}, "a folder or a name on the hub for each"),
    "none": ({"teacher_model_names_or_paths": {}}, "a folder or a name on the hub for each"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_several_do_not_go_with_is_refused(name, tmp_path):
    options, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        DistillationConfig(
            output_dir=str(tmp_path), **{"teacher_model_names_or_paths": {"a": "A", "b": "B"}, **options}
        )


def test_split_weights_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(Sharding, "cuts_weights", True)
    with pytest.raises(ValueError, match=r"several loaded teachers \(a, b\) are whole on each process"):
        DistillationConfig(output_dir=str(tmp_path), teacher_model_names_or_paths={"a": "A", "b": "B"})


def test_they_are_told_apart_by_a_column_of_prompts(tmp_path):
    with pytest.raises(ValueError, match=r"several teachers \(a, b\), which are told apart by a column of prompts"):
        GKDConfig(output_dir=str(tmp_path), teacher_model_names_or_paths={"a": "A", "b": "B"})


OTHER_HEADS: dict[str, dict[str, Any]] = {
    "scale or cap their logits": {"model_type": "granite", "logits_scaling": 3.0},
    "has a bias": {"model_type": "phi"},
}


@pytest.mark.parametrize("said", OTHER_HEADS)
def test_teachers_whose_heads_differ_are_refused(said, folders, tmp_path):
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**SMALL | OTHER_HEADS[said])).save_pretrained(tmp_path / "o")
    tokenizer().save_pretrained(tmp_path / "o")
    with pytest.raises(ValueError, match=said):
        trained(tmp_path, "Distillation", teacher_model_names_or_paths={**folders, "words": str(tmp_path / "o")})
