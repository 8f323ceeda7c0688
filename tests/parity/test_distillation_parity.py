"""lowtide's DistillationTrainer against TRL 1.16's: steps from the same weights and teacher, on the same completions.

Both libraries are given the same completions, which depend on the prompt and on how often it was asked. TRL pads; both
form the divergence without whole logits.
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
    assistant,
    build_model,
    build_teacher,
    lora,
    numbers,
    runs_of,
    sums,
    tokenizer,
    user,
)
from tests.support.vllm.teaching_server import Teaches, teaching_server

trl = pytest.importorskip("trl", reason="parity is against trl==1.16.0: install the bench extra")
lowtide = pytest.importorskip("lowtide")
module = pytest.importorskip("trl.trainer.distillation_trainer")

SETTINGS = {
    **{name: value for name, value in COMMON.items() if name != "train_sampling_strategy"},
    **{"learning_rate": 1e-3, "per_device_train_batch_size": 8, "max_completion_length": 24},
}


@dataclass(frozen=True)
class Case:
    """One way to distil; `flags` go to both libraries, `ours` to lowtide alone."""

    flags: dict[str, Any] = field(default_factory=dict)
    ours: dict[str, Any] = field(default_factory=dict)
    model: str = "llama"
    lora: bool = False
    chat: bool = False


CASES = {
    "reverse": Case(),
    "forward": Case({"beta": 0.0}),
    "jensen-shannon": Case({"beta": 0.3}),
    "temperature": Case({"temperature": 0.6, "beta": 0.5}),
    "tied head": Case(model="tied"),
    "conversations": Case(chat=True),
    "accumulated 2x4": Case({"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}),
    "within a token budget": Case(ours={"tokens_per_microbatch": 150}),
    "rows in pieces": Case(ours={"tokens_per_microbatch": 30}),
    "padded by us": Case(ours={"padding_free": False}),
    "prompts repeated": Case(ours={"prefix_sharing": False}),
    "lora": Case({"learning_rate": 1e-2}, lora=True),
}
QUICK = ("reverse",)
LONG = (*QUICK, "forward", "jensen-shannon", "temperature", "lora")


def rows(count: int, chat: bool, seed: int = 0) -> Dataset:
    return Dataset.from_list([{"prompt": [user(ask)] if chat else ask} for ask, _ in sums(count, seed)])


def build_trainer(library: Any, case: Case, folder: Any, steps: int, more: Any = None, **datasets: Any) -> Any:
    flags = SETTINGS | {"max_steps": steps} | case.flags | (more or {})
    writer = Writer()
    trainer = library.DistillationTrainer(
        model=build_model(case.model),
        teacher_model=build_teacher(),
        args=library.DistillationConfig(output_dir=str(folder / library.__name__), **flags),
        train_dataset=rows(40, case.chat),
        processing_class=tokenizer(),
        peft_config=lora() if case.lora else None,
        **{"rollout_func": writer} if library is lowtide else {},
        **datasets,
    )
    if library is not lowtide:
        trainer._generate_single_turn = lambda prompt_ids, *_: writer.completions(prompt_ids)
    return trainer


@runs_of(CASES, QUICK, LONG)
def test_steps_agree_with_trl(name, steps, tmp_path, monkeypatch):
    """The loss, the gradient's norm and the metrics of every step."""
    case = CASES[name]
    monkeypatch.setattr(module, "shuffle_sequence_dict", lambda batch: batch)
    theirs = build_trainer(trl, case, tmp_path, steps)
    ours = build_trainer(lowtide, case, tmp_path, steps, case.ours)
    near = {"entropy": 1e-2} if "gradient_accumulation_steps" in case.flags else {}
    assert_likelihoods_agree(theirs, ours, steps, near, unlike=["step_time"])


@pytest.mark.slow
def test_evaluation_agrees_with_trl(tmp_path):
    case, held_out = Case({"beta": 0.5}), rows(8, False, seed=1)
    theirs, ours = (build_trainer(each, case, tmp_path, 1, eval_dataset=held_out) for each in (trl, lowtide))
    expected, actual = numbers([theirs.evaluate()]), numbers([ours.evaluate()])
    assert actual["eval_loss"].item() == pytest.approx(expected["eval_loss"].item(), rel=1e-5)


SERVED = [(1.0, 1, True), (0.0, 3, True), (0.0, 3, False), (0.4, 1, True), (0.4, 1, False)]


@pytest.mark.slow
@pytest.mark.parametrize(("beta", "top", "tail"), SERVED)
def test_steps_with_a_teacher_behind_a_server_agree_with_trl(beta, top, tail, tmp_path, monkeypatch):
    """Both ask the same server, whose model is computed densely."""
    experimental = pytest.importorskip("trl.experimental.server_distillation")
    monkeypatch.setattr(module, "shuffle_sequence_dict", lambda batch: batch)
    monkeypatch.setattr("trl.generation.vllm_client.is_vllm_available", lambda: True)
    how = {"beta": beta, "loss_top_k": top, "loss_add_tail": tail, "max_steps": FIRST_STEPS}
    built = []
    with teaching_server(Teaches(build_teacher(), tokenizer())) as url:
        for library in (experimental, lowtide):
            writer, ours = Writer(), library is lowtide
            name = "DistillationConfig" if ours else "ServerDistillationConfig"
            folder = tmp_path / library.__name__
            flags = SETTINGS | how | {"teacher_model_server_url": url}
            make = library.DistillationTrainer if ours else library.ServerDistillationTrainer
            trainer = make(
                model=build_model("llama"),
                args=getattr(library, name)(output_dir=str(folder), **flags),
                train_dataset=rows(40, chat=False),
                processing_class=tokenizer(),
                **{"rollout_func": writer} if ours else {},
            )
            if not ours:
                trainer._generate_single_turn = lambda prompt_ids, *_, own=writer: own.completions(prompt_ids)
            built.append(trainer)
        theirs, ours = built
        assert_likelihoods_agree(theirs, ours, FIRST_STEPS, unlike=["step_time"])


@pytest.mark.slow
def test_steps_of_importance_weighted_distillation_agree_with_trl(tmp_path):
    experimental = pytest.importorskip("trl.experimental.iw_opd")
    flags = SETTINGS | {"max_steps": FIRST_STEPS, "num_generations": 2, "temperature": 0.8}
    tokenizer().save_pretrained(tmp_path / "teacher")  # which TRL compares with the student's
    answered = [{"messages": [*asked, assistant("unread")]} for asked in rows(40, chat=True)["prompt"]]
    built = []
    for library in (experimental, lowtide):
        writer, teacher = Writer(), build_teacher()
        teacher.config._name_or_path = str(tmp_path / "teacher")
        trainer = library.IWOPDTrainer(
            model=build_model("llama"),
            teacher_model=teacher,
            args=library.IWOPDConfig(output_dir=str(tmp_path / library.__name__), **flags),
            train_dataset=rows(40, chat=True) if library is lowtide else Dataset.from_list(answered),
            processing_class=tokenizer(),
            **{"rollout_func": writer} if library is lowtide else {},
        )
        built.append(trainer)
        if library is experimental:
            trainer._generate_with_model = _written_by(writer, trainer)
            # TRL divides by the tokens of the data's answers, which are counted before others are written.
            trainer._get_num_items_in_batch = lambda *_: None
    lengths = [f"completions/on_policy_{which}_length" for which in ("min", "mean", "max")]
    other_names = [*lengths, "completions/truncated_fraction", "on_policy_loss"]
    theirs, ours = built
    assert_likelihoods_agree(theirs, ours, FIRST_STEPS, unlike=["step_time", *other_names])


def _written_by(writer: Writer, trainer: Any) -> Any:
    """In place of what TRL's trainer writes with."""

    def write(slices: list[dict[str, Any]], numbers: list[int]) -> None:
        of = [(number, place) for number in numbers for place in range(len(slices[number]["prompts"]))]
        prompts = [slices[n]["prompts"][p][slices[n]["prompt_attention_mask"][p].bool()] for n, p in of]
        completions = writer.completions([each.tolist() for each in prompts])
        trainer._store_completions_in_buffer(slices, numbers, [n for n, _ in of], prompts, completions)

    return write
