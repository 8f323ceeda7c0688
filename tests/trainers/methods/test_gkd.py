"""Generalized knowledge distillation in its trainer: what does not change its numbers, what is written by whom,
resuming, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from datasets import Dataset

from lowtide import GKDConfig
from lowtide.ragged import RaggedBatch
from tests.support.marks import slow_but
from tests.support.references.parity_world import build_model, sums, tokenizer
from tests.support.runs.distilling import (
    build_teacher,
    distilling,
    losses,
    other_tokens,
    talks,
    trained,
    weights,
)

SAME: dict[str, dict[str, Any]] = {
    "padded": {"padding_free": False},
    "accumulated": {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4},
    "token budget": {"tokens_per_microbatch": 250},
    "rows in pieces": {"tokens_per_microbatch": 40},
    "rows in pieces, rehearsed": {"tokens_per_microbatch": 40, "rehearsal": True},
    "checkpointed": {"gradient_checkpointing": True},
    "workers that load": {"dataloader_num_workers": 2},
    "rehearsed": {"rehearsal": True},
}


def assert_close(one: Any, other: Any) -> None:
    torch.testing.assert_close(losses(one), losses(other), rtol=1e-6, atol=0.0)
    expected = weights(other)
    for name, found in weights(one).items():
        torch.testing.assert_close(found, expected[name], rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_but(["accumulated"], SAME))
def test_how_a_step_is_run_changes_no_number(name, tmp_path):
    plain = {"gradient_checkpointing": False}
    assert_close(trained(tmp_path / "a", **plain | SAME[name]), trained(tmp_path / "b", **plain))


@pytest.mark.slow
def test_an_evaluation_of_rows_in_pieces_is_that_of_whole_rows(tmp_path):
    rows = {"train_dataset": talks(), "eval_dataset": talks(5, seed=2)}
    metrics = ("eval_loss", "eval_mean_token_accuracy", "eval_entropy")
    made = [distilling(tmp_path / str(most), arguments=rows, tokens_per_microbatch=most) for most in (None, 40)]
    assert max(made[1].row_lengths()) > 80
    whole, cut = (each.evaluate() for each in made)
    assert {name: cut[name] for name in metrics} == pytest.approx({name: whole[name] for name in metrics}, rel=1e-6)


# -- what is written ---------------------------------------------------------------------------------------------------


def seen_batches(trainer: Any) -> list[tuple[RaggedBatch, RaggedBatch]]:
    """Each micro-batch as the dataset has it and as it is trained on."""
    seen: list[tuple[RaggedBatch, RaggedBatch]] = []
    drawn = trainer.drawn

    def watched(batch: RaggedBatch, epoch: int) -> RaggedBatch:
        found = drawn(batch, epoch)
        seen.append((batch, found))
        return found

    trainer.drawn = watched
    return seen


def rows_of(batch: RaggedBatch) -> list[tuple[list[int], list[int]]]:
    """(prompt, completion) of each row."""
    tokens, index = batch.token_ids.tolist(), batch.score_index.tolist()
    firsts = [index[part.score_start] + 1 for part in batch.segments]
    return [(tokens[p.start : first], tokens[first : p.stop]) for p, first in zip(batch.segments, firsts, strict=True)]


def greedily(model: Any, prompt: list[int], most: int) -> list[int]:
    """What transformers' generate writes."""
    end = tokenizer().eos_token_id
    written = model.generate(
        torch.tensor([prompt]), max_new_tokens=most, do_sample=False, eos_token_id=end, pad_token_id=0
    )
    return written[0, len(prompt) :].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("who", ["student", "teacher"])
def test_completions_are_those_of_generate_at_a_low_temperature(who, tmp_path):
    options: dict[str, Any] = {"lmbda": 1.0} if who == "student" else {"seq_kd": True}
    trainer = distilling(tmp_path, temperature=1e-4, max_steps=1, **options)
    writer = build_model("llama").double() if who == "student" else build_teacher()
    seen = seen_batches(trainer)
    trainer.train()
    ((given, taken),) = seen
    for (prompt, own), (same, completion) in zip(rows_of(given), rows_of(taken), strict=True):
        assert same == prompt
        assert completion == greedily(writer, prompt, 12) != own
    logged = trainer.state.log_history[0]
    assert logged["completions/mean_length"] == sum(len(c) for _, c in rows_of(taken)) / 4


def test_the_loss_is_the_divergence_on_what_was_written(tmp_path):
    trainer = distilling(tmp_path, lmbda=1.0, beta=0.3, divergence_temperature=1.7, max_steps=1)
    seen = seen_batches(trainer)
    trainer.train()
    student, teacher, total, count = build_model("llama").double(), build_teacher(), 0.0, 0
    for prompt, completion in rows_of(seen[0][1]):
        log_q, log_p = (
            torch.log_softmax(model(torch.tensor([[*prompt, *completion]])).logits[0, len(prompt) - 1 : -1] / 1.7, -1)
            for model in (student, teacher)
        )
        log_m = (0.3 * log_p.exp() + 0.7 * log_q.exp()).log()
        of_teacher, of_student = (F.kl_div(log_m, each, reduction="sum", log_target=True) for each in (log_p, log_q))
        total, count = total + (0.3 * of_teacher + 0.7 * of_student).item(), count + len(completion)
    assert losses(trainer).item() == pytest.approx(total / count, rel=1e-5)


def test_the_share_of_what_the_student_writes_is_lmbda(tmp_path):
    trainer = distilling(tmp_path, lmbda=0.25, max_new_tokens=1)
    drawn = []
    for number in range(400):
        trainer.row_order.place = (0, number)
        drawn.append(trainer._draw_writer() is not None)
    assert 0.18 < sum(drawn) / 400 < 0.32


def test_evaluation_is_on_the_datas_completions(tmp_path):
    held_out = {"eval_dataset": talks(6, seed=1)}
    written = distilling(tmp_path, lmbda=1.0, seq_kd=True, arguments=held_out).evaluate()
    given = distilling(tmp_path, arguments=held_out).evaluate()
    assert written["eval_loss"] == given["eval_loss"]


SAVING = {"save_strategy": "steps", "save_steps": 1}
MIXED = {"lmbda": 0.5, "seq_kd": True, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}
MIXED |= {"max_steps": 3, "max_new_tokens": 5}


@pytest.mark.slow
@pytest.mark.parametrize("step", [1, 2])
def test_resumed_anywhere_the_bits_are_the_same(step, tmp_path):
    whole = trained(tmp_path / "whole", **MIXED)
    first = distilling(tmp_path / "parts", **MIXED, **SAVING)
    first.args.max_steps = step
    first.train()
    second = distilling(tmp_path / "parts", **MIXED, **SAVING)
    second.train(resume_from_checkpoint=str(tmp_path / "parts" / f"checkpoint-{step}"))
    expected, found = weights(whole), weights(second)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


# -- the teacher -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_with_adapters_the_model_without_them_can_teach(tmp_path):
    """As a frozen copy of it does, which is forgotten at the first step, when both are the same."""
    from peft import LoraConfig, get_peft_model

    def adapted():
        torch.manual_seed(3)
        config = LoraConfig(r=4, target_modules=["q_proj", "down_proj", "lm_head"], init_lora_weights=False)
        return get_peft_model(build_model("llama").double(), config).double()

    options = {"lmbda": 0.5, "seq_kd": True}
    own = trained(tmp_path / "own", model=adapted(), arguments={"teacher_model": None}, **options)
    copied = trained(
        tmp_path / "copy", model=adapted(), arguments={"teacher_model": build_model("llama").double()}, **options
    )
    assert losses(own).min() > 0
    assert own.teacher_model is None
    assert_close(own, copied)


@pytest.mark.slow
def test_a_teacher_that_needs_padded_rows_gets_them(tmp_path):
    def taught(name: str, **options: Any) -> Any:
        bloom = {"model_type": "bloom", "n_head": 4, "n_layer": 2, "hidden_size": 32, "hidden_dropout": 0.0}
        teacher = build_teacher(torch.float32, **bloom)  # in float64 transformers' masks overflow
        return trained(tmp_path / name, arguments={"teacher_model": teacher}, **options)

    found, padded = taught("a"), taught("b", padding_free=False)
    assert (found.padding_free, found.reference.padding_free) == (True, False)
    assert_close(found, padded)
    assert "transformers' generate" in taught("c", seq_kd=True, max_steps=1).written_by["the teacher"]


@pytest.mark.slow
def test_of_a_padded_vocabulary_the_common_rows_count(tmp_path):
    """A teacher with more rows teaches as one whose further rows are cut off."""
    padded = build_teacher(vocab_size=384)
    cut = build_teacher(vocab_size=384)
    cut.resize_token_embeddings(320)
    found, expected = (
        trained(tmp_path / name, arguments={"teacher_model": teacher}, beta=0.0)
        for name, teacher in (("padded", padded), ("cut", cut))
    )
    assert_close(found, expected)


@pytest.mark.slow
def test_what_is_written_ends_before_a_row_that_pads_the_vocabulary(tmp_path):
    padded = build_teacher(vocab_size=384)
    padded.lm_head.weight.data[320:] *= 4  # mostly these are drawn
    trainer = distilling(tmp_path, arguments={"teacher_model": padded}, seq_kd=True)
    seen = seen_batches(trainer)
    trainer.train()
    assert all(max(completion) < 320 for _, taken in seen for _, completion in rows_of(taken))
    assert losses(trainer).isfinite().all()


def test_a_teacher_by_name_is_loaded_as_its_options_say(tmp_path):
    build_teacher().save_pretrained(tmp_path / "teacher")
    tokenizer().save_pretrained(tmp_path / "teacher")
    by_name = distilling(
        tmp_path,
        arguments={"teacher_model": None},
        teacher_model_name_or_path=str(tmp_path / "teacher"),
        teacher_model_init_kwargs={"dtype": "bfloat16"},
    )
    assert by_name.teacher_model.dtype == torch.bfloat16
    assert not any(p.requires_grad for p in by_name.teacher_model.parameters())
    plain = distilling(tmp_path, arguments={"teacher_model": str(tmp_path / "teacher")})
    assert plain.teacher_model.dtype == torch.float64  # the student's


def test_the_report_says_who_teaches_and_who_writes(tmp_path):
    lines = dict(distilling(tmp_path, lmbda=0.5, seq_kd=True).report_lines())
    assert lines["teacher"].startswith("the teacher Qwen2ForCausalLM, ")
    assert lines["written by the student"].startswith("lowtide's own")
    assert lines.keys() == {"teacher", "written by the student", "written by the teacher"}


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_a_teacher_of_other_tokens_is_refused(tmp_path):
    build_teacher().save_pretrained(tmp_path / "teacher")
    other_tokens().save_pretrained(tmp_path / "teacher")
    with pytest.raises(ValueError, match=r"the tokenizer of teacher_model .* gives other ids"):
        distilling(tmp_path, arguments={"teacher_model": str(tmp_path / "teacher")})


def test_a_teacher_with_too_few_tokens_is_refused(tmp_path):
    with pytest.raises(ValueError, match="vocabulary of 64 tokens, and the student's tokenizer one of 320"):
        distilling(tmp_path, arguments={"teacher_model": build_teacher(vocab_size=64)})


def test_no_teacher_is_refused(tmp_path):
    with pytest.raises(
        ValueError,
        match="there is no teacher: set teacher_model_name_or_path, or pass a model as `teacher_model`",
    ):
        distilling(tmp_path, arguments={"teacher_model": None})


def test_a_student_is_not_its_own_teacher(tmp_path):
    model = build_model("llama")
    with pytest.raises(ValueError, match="teacher_model is the model that is trained"):
        distilling(tmp_path, model=model, arguments={"teacher_model": model})


def test_arguments_for_a_teacher_that_is_loaded_are_refused(tmp_path):
    with pytest.raises(
        ValueError, match=r"teacher_model_init_kwargs \(dtype\) are for a teacher that is loaded by its name"
    ):
        distilling(tmp_path, teacher_model_init_kwargs={"dtype": "bfloat16"})


@pytest.mark.slow
def test_texts_without_prompts_need_their_own_completions(tmp_path):
    texts = Dataset.from_list([{"text": f"{ask} {answer}"} for ask, answer in sums(8)])
    with pytest.raises(ValueError, match="no prompts to write after"):
        distilling(tmp_path, arguments={"train_dataset": texts}, lmbda=0.5)
    assert losses(trained(tmp_path, arguments={"train_dataset": texts}, packing=True, max_length=200)).min() > 0


def test_a_conversation_has_to_end_with_an_answer(tmp_path):
    rows = Dataset.from_list([{"messages": [{"role": "user", "content": "And?"}]}])
    with pytest.raises(ValueError, match=r"row 0 .*does not end with what the assistant answers"):
        distilling(tmp_path, arguments={"train_dataset": rows})


def test_written_completions_count_against_a_token_budget(tmp_path):
    whole = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
    with pytest.raises(ValueError, match="tokens_per_microbatch=300 is below the longest row"):
        distilling(tmp_path, tokens_per_microbatch=300, lmbda=0.5, max_new_tokens=250, **whole)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beta": 1.5}, "beta"),
        ({"lmbda": -0.1}, "lmbda"),
        ({"divergence_temperature": 0.0}, "divergence_temperature"),
        ({"packing": True}, "packing=True packs rows of the data"),
        ({"completion_only_loss": False}, "completion_only_loss=False scores prompts"),
        ({"generation_kwargs": {"best_of": 2}}, "generation_kwargs: 'best_of' is unknown"),
    ],
)
def test_options_that_cannot_work_are_refused(options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        GKDConfig(output_dir=str(tmp_path), **options)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}},
            "of the teacher, its rot",
        ),
        (
            {"model_type": "gpt2", "max_position_embeddings": 64},
            r"row \d+ of the train dataset has \d+ tokens and teacher_model 64 positions",
        ),
    ],
)
def test_what_the_teacher_cannot_is_refused_at_construction(more, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        distilling(tmp_path, arguments={"teacher_model": build_teacher(**more)}, tokens_per_microbatch=40)
