"""A teacher that is asked in place of being loaded: log-probabilities of a server, or of a folder."""

from __future__ import annotations

from typing import Any

import pytest
import torch

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


def dense_loss(beta: float, top: int, tail: bool) -> float:
    """The first loss of a run, in float64 from whole logits."""
    rows: Any = talks(4)
    student, teacher = build_model("llama").double(), build_teacher()
    total, count = 0.0, 0
    for row in rows:
        ids: Any = tokenizer().apply_chat_template(row["messages"], return_dict=False)
        while ids[-1] != tokenizer().eos_token_id:  # a line's end behind the answer's, which is not written
            ids.pop()
        prompt = tokenizer().apply_chat_template(row["messages"][:1], add_generation_prompt=True, return_dict=False)
        log_q, log_p = (
            each(torch.tensor([ids])).logits[0, len(prompt) - 1 : -1].log_softmax(-1) for each in (student, teacher)
        )
        for q, p, token in zip(log_q, log_p, ids[len(prompt) :], strict=True):
            names = [] if beta == 1 and top == 1 else p.topk(top).indices.tolist()
            names = names if beta == 0 else list(dict.fromkeys([*names, token]))
            q, p = (each[names].exp() for each in (q, p))
            if tail:
                q, p = (torch.cat([each, 1 - each.sum(-1, keepdim=True)]) for each in (q, p))
            else:
                q, p = (each / each.sum() for each in (q, p))
            m = beta * p + (1 - beta) * q
            kl = lambda a, b: (a * (a.log() - b.log())).sum()  # noqa: E731
            total += (
                kl(p, q) if beta == 0 else kl(q, p) if beta == 1 else beta * kl(p, m) + (1 - beta) * kl(q, m)
            ).item()
            count += 1
    return total / count


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
    assert losses(trainer).item() == pytest.approx(dense_loss(beta, top, tail), rel=1e-5)


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
    with pytest.raises(ValueError, match=r"has nothing of a row of 20 tokens .*template or max_length"):
        trainer.train()


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "two teachers": ({"teacher_model_server_url": "http://h:1", "teacher_logprobs": "F"}, "two teachers"),
    "one that is loaded": ({"teacher_logprobs": "F", "teacher_model_name_or_path": "T"}, "loads a teacher"),
    "stored": ({"teacher_logprobs": "F", "ref_model_storage": "8bit"}, "ref_model_storage='8bit' is of a teacher"),
    "written anew": ({"teacher_logprobs": "F", "lmbda": 0.5}, "set lmbda=0"),
    "written by the teacher": ({"teacher_model_server_url": "http://h:1", "seq_kd": True}, "seq_kd=True has the"),
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
    settings = {name: value for name, value in SETTINGS.items() if name not in ("lmbda", "max_new_tokens")}
    settings |= {"max_completion_length": 12, "max_steps": 2, "gradient_accumulation_steps": 2}
    rows = talks(16).map(lambda row: {"prompt": [user(row["messages"][0]["content"])]}, remove_columns=["messages"])

    def losses_of(**more: Any) -> Any:
        teacher = more.pop("teacher_model", None)
        made = trainer(
            model=build_model("llama").double(),
            teacher_model=teacher,
            args=config(output_dir=str(tmp_path / str(len(more))), **settings, **more),
            train_dataset=rows,
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
