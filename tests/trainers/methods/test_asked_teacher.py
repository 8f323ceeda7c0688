"""A teacher that is asked in place of being loaded: log-probabilities of a server, or of a folder."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, cast

import pytest
import torch
from datasets import Dataset

from lowtide import DistillationConfig, DistillationTrainer, GKDConfig, IWOPDConfig
from lowtide.data.teacher_logprobs import texts_of
from lowtide.ragged import RaggedBatch
from tests.support.marks import slow_but
from tests.support.references.parity_world import VOCABULARY, Writer, build_model, tokenizer, user
from tests.support.runs.distilling import SETTINGS, build_teacher, distilling, losses, talks, trained, weights
from tests.support.vllm.teaching_server import Teaches, teaching_server

ALL = VOCABULARY
"""Tokens of the vocabulary."""


def test_the_texts_of_a_batch_and_their_places():
    """Of whole rows, and of completions that go on from a prompt that is there once."""
    batch = RaggedBatch.from_segments([[1, 2, 3, 4]], [[-100, -100, 3, 4]])
    assert texts_of(batch) == [([1, 2, 3, 4], [2, 3])]
    shared = RaggedBatch.from_segments(
        [[1, 2], [3, 4], [5]], [[-100, -100], [3, 4], [5]], prefix=[-1, 0, 0], row=[0, 0, 0]
    )
    assert texts_of(shared) == [([1, 2, 3, 4], [2, 3]), ([1, 2, 5], [2])]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the teacher says of all tokens."""
    made = tmp_path_factory.mktemp("said")
    rows = {"eval_dataset": talks(4, seed=2)}
    assert distilling(made / "run", arguments=rows).write_teacher_logprobs(made / "all", top_logprobs=ALL) == 28
    return str(made / "all")


def asking(folder: Any, **options: Any) -> Any:
    return distilling(folder, arguments={"teacher_model": None}, **options)


@pytest.mark.slow
@pytest.mark.parametrize("how", [{}, {"loss_add_tail": False}, {"tokens_per_microbatch": 40}, {"padding_free": False}])
@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_all_tokens_of_a_folder_are_the_teacher(folder, tmp_path, beta, how):
    """Losses and weights are those of a run with the teacher in memory; 1e-7 is what a tail holds at least."""
    run = {name: value for name, value in how.items() if name != "loss_add_tail"}
    loaded = trained(tmp_path / "loaded", beta=beta, **run)
    asked = asking(tmp_path / "asked", beta=beta, teacher_logprobs=folder, loss_top_k=ALL, **how)
    asked.train()
    torch.testing.assert_close(losses(asked), losses(loaded), rtol=1e-5, atol=0.0)
    expected = weights(loaded)
    for name, found in weights(asked).items():
        torch.testing.assert_close(found, expected[name], rtol=1e-4, atol=2e-5, msg=name)


def dense_losses(text: list[int], places: list[int], teacher: Any, beta: float, top: int, tail: bool) -> list[float]:
    """The losses of the places of a text before training, in float64 from whole logits."""
    found, student = [], build_model("llama").double()
    log_q, log_p = (each(torch.tensor([text])).logits[0].log_softmax(-1) for each in (student, teacher))
    for place in places:
        q, p, token = log_q[place - 1], log_p[place - 1], text[place]
        names = [] if beta == 1 and top == 1 else p.topk(top).indices.tolist()
        names = names if beta == 0 else list(dict.fromkeys([*names, token]))
        q, p = (each[names].exp() for each in (q, p))
        if tail:
            q, p = (torch.cat([each, 1 - each.sum(-1, keepdim=True)]) for each in (q, p))
        else:
            q, p = (each / each.sum() for each in (q, p))
        m = beta * p + (1 - beta) * q
        kl = lambda a, b: (a * (a.log() - b.log())).sum()  # noqa: E731
        loss = kl(p, q) if beta == 0 else kl(q, p) if beta == 1 else beta * kl(p, m) + (1 - beta) * kl(q, m)
        found.append(loss.item())
    return found


def dense_loss(rows: Any, teacher: Any, beta: float, top: int, tail: bool) -> tuple[float, int]:
    """The sum of the losses of the answers of conversations, and of how many tokens it is."""
    found: list[float] = []
    for row in rows:
        ids: Any = tokenizer().apply_chat_template(row["messages"], return_dict=False)
        while ids[-1] != tokenizer().eos_token_id:  # a line's end behind the answer's, which is not written
            ids.pop()
        prompt = tokenizer().apply_chat_template(row["messages"][:1], add_generation_prompt=True, return_dict=False)
        found += dense_losses(ids, [*range(len(prompt), len(ids))], teacher, beta, top, tail)
    return sum(found), len(found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("beta", "top", "tail"),
    [(0.0, 3, True), (0.0, 4, False), (0.5, 1, True), (0.3, 5, True), (1.0, 1, True), (1.0, 2, True)],
)
def test_the_loss_of_some_tokens_is_the_dense_one(folder, tmp_path, beta, top, tail):
    rows = {"teacher_model": None, "train_dataset": talks(4)}
    how = {"loss_top_k": top, "loss_add_tail": tail, "max_steps": 1}
    trainer = distilling(tmp_path, arguments=rows, beta=beta, teacher_logprobs=folder, **how)
    trainer.train()
    total, count = dense_loss(talks(4), build_teacher(), beta, top, tail)
    assert losses(trainer).item() == pytest.approx(total / count, rel=1e-5)


def second_teacher() -> Any:
    return build_teacher(hidden_size=48)


@pytest.mark.slow
def test_several_folders_are_several_teachers(tmp_path):
    parts = [talks(4).select(range(0, 3)), talks(4).select(range(3, 4))]
    teachers, total, count = [build_teacher(), second_teacher()], 0.0, 0
    for number, (part, teacher) in enumerate(zip(parts, teachers, strict=True)):
        arguments = {"teacher_model": teacher, "train_dataset": part}
        made = distilling(tmp_path / f"run{number}", arguments=arguments)
        made.write_teacher_logprobs(tmp_path / f"said{number}", top_logprobs=3)
        sums = dense_loss(part, teacher, 0.0, 3, True)
        total, count = total + sums[0], count + sums[1]
    folders = [str(tmp_path / f"said{number}") for number in range(2)]
    arguments = {"teacher_model": None, "train_dataset": talks(4)}
    how = {"loss_top_k": 3, "max_steps": 1, "beta": 0.0, "teacher_logprobs": folders}
    trainer = distilling(tmp_path / "run", arguments=arguments, **how)
    trainer.train()
    assert losses(trainer).item() == pytest.approx(total / count, rel=1e-5)


def prompts(count: int, **columns: Any) -> Dataset:
    rows = [{"prompt": [user(row["messages"][0]["content"])]} for row in cast(Any, talks(count))]
    return Dataset.from_list(rows).add_column("kind", columns["kind"]) if columns else Dataset.from_list(rows)


WRITING: dict[str, Any] = {name: value for name, value in SETTINGS.items() if name not in ("lmbda", "max_new_tokens")}
WRITING |= {"max_completion_length": 12, "max_steps": 2}


@pytest.mark.slow
@pytest.mark.parametrize("how", [{}, {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4}])
def test_a_column_names_the_teacher_of_a_row(tmp_path, how):
    """Of the first step, in float64 from whole logits; each server is asked of its own rows alone."""
    kinds = ["sums", "words", "sums", "sums", "words", "sums", "words", "sums"]
    servers = {"sums": Teaches(build_teacher(), tokenizer()), "words": Teaches(second_teacher(), tokenizer())}
    rows, writer = prompts(8, kind=kinds), Writer()
    with ExitStack() as stack:
        urls = {name: stack.enter_context(teaching_server(each)) for name, each in servers.items()}
        options = WRITING | {"max_steps": 1, "per_device_train_batch_size": 8, "beta": 0.0, "loss_top_k": 3} | how
        args = DistillationConfig(
            output_dir=str(tmp_path), teacher_model_server_urls=urls, teacher_column="kind", **options
        )
        trainer = DistillationTrainer(
            model=build_model("llama").double(),
            args=args,
            train_dataset=rows,
            processing_class=tokenizer(),
            rollout_func=writer,
        )
        trainer.train()
    found: list[float] = []
    ids = [
        tokenizer().apply_chat_template(each, add_generation_prompt=True, return_dict=False) for each in rows["prompt"]
    ]
    for name, server in servers.items():
        own = [each for each, kind in zip(ids, kinds, strict=True) if kind == name]
        assert len(server.texts) == len(own)
        for text in server.texts:
            (prompt,) = (each for each in own if text[: len(each)] == each)
            found += dense_losses(text, [*range(len(prompt), len(text))], server.model, 0.0, 3, True)
    assert losses(trainer).item() == pytest.approx(sum(found) / len(found), rel=1e-5)


def test_a_row_without_a_teacher_is_told_of(tmp_path):
    args = DistillationConfig(
        output_dir=str(tmp_path),
        teacher_model_server_urls={"a": "http://h:1", "b": "http://h:2"},
        teacher_column="kind",
    )
    made = {"model": build_model("llama"), "args": args, "processing_class": tokenizer()}
    with pytest.raises(ValueError, match=r"has no column `kind`.*\(a, b\), only prompt"):
        DistillationTrainer(train_dataset=prompts(2), **made)
    with pytest.raises(ValueError, match=r"a row has 'c' in the column `kind`.*name one of a, b"):
        DistillationTrainer(train_dataset=prompts(2, kind=["a", "c"]), **made)


@pytest.mark.slow
def test_an_evaluation_asks_too(folder, tmp_path):
    rows = {"teacher_model": None, "eval_dataset": talks(4, seed=2)}
    asked = distilling(tmp_path / "a", arguments=rows, teacher_logprobs=folder, loss_top_k=ALL)
    loaded = distilling(tmp_path / "b", arguments={"eval_dataset": talks(4, seed=2)})
    assert asked.teacher_model is None
    assert asked.evaluate()["eval_loss"] == pytest.approx(loaded.evaluate()["eval_loss"], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", slow_but(["completions that the student writes"], ["data", "completions that the student writes"])
)
def test_a_server_says_what_the_teacher_computes(tmp_path, name):
    """On the data's completions, and on those that the student writes, GKD's and on-policy distillation's."""
    lmbda = 0.0 if name == "data" else 1.0
    loaded = trained(tmp_path / "a", lmbda=lmbda, beta=0.0, max_steps=2)
    with teaching_server(Teaches(build_teacher(), tokenizer())) as url:
        asked = asking(tmp_path / "b", lmbda=lmbda, beta=0.0, max_steps=2, teacher_model_server_url=url, loss_top_k=ALL)
        asked.train()
    torch.testing.assert_close(losses(asked), losses(loaded), rtol=1e-5, atol=0.0)


def test_rows_that_the_folder_does_not_have_are_told_of(folder, tmp_path):
    trainer = asking(tmp_path, teacher_logprobs=folder, max_length=20)
    there = r"of its 28 texts the nearest has \d+ tokens and begins with the same 0 \(then [\d ]+, and the row [\d ]+\)"
    with pytest.raises(ValueError, match=f"of a row of 20 tokens; {there}: .* template or max_length"):
        trainer.train()


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "one and several": (
        {"teacher_model_server_urls": {"a": "http://h:1"}, "teacher_model_server_url": "http://h:1"},
        "give the address of one",
    ),
    "several servers": ({"teacher_model_server_urls": {"a": "http://h:1"}}, "names several teachers"),
    "two teachers": ({"teacher_model_server_url": "http://h:1", "teacher_logprobs": "F"}, "two teachers"),
    "one that is loaded": ({"teacher_logprobs": "F", "teacher_model_name_or_path": "T"}, "loads a teacher"),
    "stored": ({"teacher_logprobs": "F", "ref_model_storage": "8bit"}, "ref_model_storage='8bit' is of a teacher"),
    "written anew": ({"teacher_logprobs": "F", "lmbda": 0.5}, "set lmbda=0"),
    "written by the teacher": ({"teacher_model_server_url": "http://h:1", "seq_kd": True}, "seq_kd=True has the"),
    "no address": ({"teacher_model_server_url": "localhost"}, "'localhost', which is no address of a server"),
    "no folder": ({"teacher_logprobs": []}, "names no folder"),
    "a column": ({"teacher_column": "kind"}, "teacher_column='kind' requires teacher_model_server_urls"),
    "a timeout": ({"teacher_model_server_timeout": 5.0}, "requires teacher_model_server_url:"),
    "without one": ({"loss_top_k": 5}, "loss_top_k=5 is of a teacher that is asked"),
    "the student's": ({"teacher_logprobs": "F", "reverse_kl_top_1_mode": "argmax"}, "reverse_kl_top_1_mode"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_contradicts_is_refused(name, tmp_path):
    options, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        GKDConfig(output_dir=str(tmp_path), **{"lmbda": 0.0, **options})


def test_a_teacher_that_is_passed_beside_is_refused(folder, tmp_path):
    with pytest.raises(ValueError, match="a teacher_model was passed, and teacher_logprobs="):
        distilling(tmp_path, teacher_logprobs=folder)


def test_a_folder_that_does_not_serve_is_refused(folder, tmp_path):
    with pytest.raises(ValueError, match="is no folder of a teacher's log-probabilities"):
        asking(tmp_path, teacher_logprobs=str(tmp_path / "none"))
    with pytest.raises(ValueError, match="loss_top_k=600 compares 600 tokens of a place"):
        asking(tmp_path, teacher_logprobs=folder, loss_top_k=600)
    with pytest.raises(ValueError, match="written at a temperature of 1"):
        asking(tmp_path, teacher_logprobs=folder, divergence_temperature=2.0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["distillation", "iw_opd"])
def test_methods_whose_student_writes_ask_a_server(kind, tmp_path):
    """The first losses are those with the teacher in memory."""
    from lowtide import IWOPDTrainer

    config, trainer = {
        "distillation": (DistillationConfig, DistillationTrainer),
        "iw_opd": (IWOPDConfig, IWOPDTrainer),
    }[kind]

    def losses_of(**more: Any) -> Any:
        teacher = more.pop("teacher_model", None)
        made = trainer(
            model=build_model("llama").double(),
            teacher_model=teacher,
            args=config(
                output_dir=str(tmp_path / str(len(more))), **WRITING | {"gradient_accumulation_steps": 2}, **more
            ),
            train_dataset=prompts(16),
            processing_class=tokenizer(),
            rollout_func=Writer(),
        )
        made.train()
        return losses(made)

    loaded = losses_of(teacher_model=build_teacher())
    with teaching_server(Teaches(build_teacher(), tokenizer())) as url:
        named = {"loss_top_k": ALL} if kind == "distillation" else {"use_teacher_server": True}
        asked = losses_of(teacher_model_server_url=url, **named)
    torch.testing.assert_close(asked, loaded, rtol=1e-5, atol=1e-7)
