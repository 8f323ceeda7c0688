"""Distillation from a teacher with other tokens: runs that agree with one another, and what is refused.

The loss itself is compared with dense probabilities in `tests/ops/logits`, and with TRL's in `tests/parity`.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig

from lowtide import GKDConfig, GKDTrainer, GOLDConfig, GOLDTrainer
from lowtide.data.two_tokenizers import Span, TwoTokenizers, aligned, spoken
from tests.support.marks import slow_but
from tests.support.ranks.processes import run_ranks
from tests.support.ranks.sharded_training import meeting_place, rank_of
from tests.support.runs.distilling import SETTINGS, losses, weights
from tests.support.runs.two_tokenizers import TEXTS, model, rows, tokenizers
from tests.support.texts.word_tokenizers import tokenizer_of

TEXT = "the quick text"
WRITTEN = {"lmbda": 1.0, "max_completion_length": 9}


def make_gold(folder: Path, trainer: Any = GOLDTrainer, config: Any = GOLDConfig, **options: Any) -> Any:
    """A trainer whose teacher has its tokenizer in a folder; models are in float64, but for norms."""
    given = options.pop("arguments", {})
    student, teacher = tokenizers()
    teacher.save_pretrained(folder / "teacher")
    settings = {name: value for name, value in SETTINGS.items() if name != "max_new_tokens"}
    if config is GOLDConfig:
        settings |= {"use_uld_loss": True, "teacher_tokenizer_name_or_path": str(folder / "teacher")}
    settings = {name: value for name, value in (settings | options).items() if value is not None}
    return trainer(
        model=model("llama", len(student), 0),
        **{"teacher_model": model("qwen2", len(teacher), 1, hidden_size=96), "train_dataset": rows()} | given,
        args=config(output_dir=str(folder / "run"), **settings),
        processing_class=student,
    )


@pytest.fixture
def gold(tmp_path):
    return functools.partial(make_gold, tmp_path)


SAME = {
    "accumulated": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2},
    "in small micro-batches": {"tokens_per_microbatch": 160},
    "in pieces": {"tokens_per_microbatch": 16},  # one of which would begin within a span
    "padded": {"padding_free": False},
    "not checkpointed": {"gradient_checkpointing": False},
    "two numbers a score": {"uld_distillation_weight": 1.0, "prefix_sharing": False},
}


@pytest.mark.parametrize("name", slow_but(["in small micro-batches"], SAME))
def test_techniques_change_no_number(name, gold):
    plain = gold()
    plain.train()
    other = gold(**SAME[name])
    other.train()
    torch.testing.assert_close(losses(other), losses(plain), rtol=0, atol=2e-4)  # as they are logged
    found, expected = weights(other), weights(plain)
    for each, weight in expected.items():
        torch.testing.assert_close(found[each], weight, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("options", [{}, pytest.param({"uld_use_hybrid_loss": True}, marks=pytest.mark.slow)])
def test_what_the_student_writes_is_learned_from(options, gold):
    trainer = gold(**WRITTEN, learning_rate=1e-2, max_steps=10, arguments={"train_dataset": rows(4)}, **options)
    trainer.train()
    found = losses(trainer)
    assert found.isfinite().all()
    assert found[-3:].mean() < found[:3].mean()
    assert "completions/mean_length" in trainer.state.log_history[0]


@pytest.mark.slow
def test_adapters_and_evaluation(gold):
    adapters = LoraConfig(r=4, target_modules=["q_proj", "lm_head"])
    trainer = gold(learning_rate=2e-2, max_steps=8, arguments={"peft_config": adapters, "eval_dataset": rows(6, 1)})
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < before


@pytest.mark.slow
def test_a_run_in_16_bits_is_near_the_same(gold):
    plain = gold()
    plain.train()
    narrow = gold(bf16=True)
    narrow.train()
    torch.testing.assert_close(losses(narrow), losses(plain), rtol=0.05, atol=0.0)


def test_a_teacher_by_name_brings_its_tokenizer(gold, tmp_path):
    _, teacher = tokenizers()
    model("qwen2", len(teacher), 1).float().save_pretrained(tmp_path / "teacher")
    teacher.save_pretrained(tmp_path / "teacher")
    trainer = gold(
        teacher_tokenizer_name_or_path=None, arguments={"teacher_model": str(tmp_path / "teacher")}, max_steps=1
    )
    trainer.train()
    assert losses(trainer).isfinite().all()


RANKS = {
    "copies": {},
    "shards": {"fsdp": True},
    "written": WRITTEN,
}
EACH = {"per_device_train_batch_size": 2, "max_steps": 2}


def rank_main(rank: int, folder: str) -> None:
    place = Path(folder)
    with rank_of(place, rank, 2):
        for name, options in RANKS.items():
            same = {"teacher_tokenizer_name_or_path": str(place / "teacher")}
            trainer = make_gold(place / name / str(rank), **EACH, **same, **options)
            trainer.train()
            if rank == 0:
                torch.save(losses(trainer), place / f"{name}.pt")


@pytest.mark.slow
def test_two_ranks_train_what_one_does(tmp_path):
    tokenizers()[1].save_pretrained(tmp_path / "teacher")
    run_ranks(rank_main, str(meeting_place(tmp_path)))
    for name, options in RANKS.items():
        alone = {option: value for option, value in options.items() if option != "fsdp"}
        trainer = make_gold(tmp_path / name / "alone", **EACH | {"per_device_train_batch_size": 4}, **alone)
        trainer.train()
        torch.testing.assert_close(torch.load(tmp_path / f"{name}.pt"), losses(trainer), rtol=0, atol=2e-4)


def test_without_it_the_loss_is_gkds(gold):
    student, _ = tokenizers()
    alike = {"arguments": {"teacher_model": model("qwen2", len(student), 1)}, "max_steps": 2}
    ours = gold(use_uld_loss=False, teacher_tokenizer_name_or_path=None, temperature=0.7, **alike)
    theirs = gold(GKDTrainer, GKDConfig, divergence_temperature=0.7, **alike)
    for trainer in (ours, theirs):
        trainer.train()
    assert torch.equal(losses(ours), losses(theirs))


# -- refused -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"packing": True}, "packing=True"),
        ({"seq_kd": True}, "seq_kd=True has the teacher write"),
        ({"assistant_only_loss": True}, "assistant_only_loss=True has several"),
        ({"uld_hybrid_matched_weight": 0.5}, "set the other too"),
        ({"uld_crossentropy_weight": 0.1, "uld_student_temperature": 2.0}, "leave one of them out"),
        ({"use_uld_loss": False, "uld_skip_student_eos": False}, "requires use_uld_loss=True"),
        ({"max_completion_length": 5, "max_new_tokens": 6}, "contradict each other"),
        ({"uld_token_merge_strategy": "mean"}, "uld_token_merge_strategy"),
        ({"uld_teacher_temperature": 0.0}, "uld_teacher_temperature"),
    ],
)
def test_options_that_cannot_work_are_refused(options, says, gold):
    with pytest.raises(ValueError, match=says):
        gold(**options)


def test_terms_that_move_no_weight_are_known():
    weights = {"uld_distillation_weight": 0.0, "uld_crossentropy_weight": 0.0}
    none = GOLDConfig(output_dir="run", report_to=[], use_uld_loss=True, **weights).without_gradient()
    assert none == [{"uld_distillation_weight=0.0"}, {"uld_crossentropy_weight=0.0"}]
    assert GOLDConfig(output_dir="run", report_to=[]).without_gradient() == [set()]


def test_a_teacher_of_other_tokens_names_gold(gold, tmp_path):
    with pytest.raises(ValueError, match="GOLD"):
        gold(GKDTrainer, GKDConfig)
    _, teacher = tokenizers()
    model("qwen2", 290, 1).save_pretrained(tmp_path / "teacher")
    teacher.save_pretrained(tmp_path / "teacher")
    with pytest.raises(ValueError, match="GOLD"):
        gold(GKDTrainer, GKDConfig, arguments={"teacher_model": str(tmp_path / "teacher")})


def test_a_teacher_without_a_tokenizer_is_refused(gold):
    with pytest.raises(ValueError, match="set teacher_tokenizer_name_or_path"):
        gold(teacher_tokenizer_name_or_path=None)


def test_a_tokenizer_that_does_not_give_text_back_is_refused(gold, tmp_path):
    tokenizer_of("wordpiece", TEXTS).save_pretrained(tmp_path / "wordpiece")
    with pytest.raises(ValueError, match="use_extended_uld=False"):
        gold(teacher_tokenizer_name_or_path=str(tmp_path / "wordpiece"))


def test_several_completions_a_row_are_refused(gold):
    tokens = {"input_ids": [5, 6, 7, 8, 9], "labels": [-100, 6, -100, 8, 9]}
    trainer = gold(arguments={"train_dataset": Dataset.from_list([tokens] * 4)}, max_steps=1)
    with pytest.raises(ValueError, match="a row has several"):
        trainer.train()


# -- alignment ---------------------------------------------------------------------------------------------------------


def spans(*pairs: tuple[int, int]) -> list[Span]:
    found, ours, theirs = [], 0, 0
    for own, other in pairs:
        found.append(Span(range(ours, ours + own), range(theirs, theirs + other)))
        ours, theirs = ours + own, theirs + other
    return found


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [
        ([1, 2, 3], [1, 2, 3], spans((1, 1), (1, 1), (1, 1))),
        ([1, 1, 2], [2, 2], spans((2, 1), (1, 1))),
        ([3, 3], [2, 2, 2], spans((2, 3))),
        ([2, 1, 3], [1, 2, 3], spans((2, 2), (1, 1))),
        ([2, 2], [2, 1], spans((1, 1), (1, 1))),
        ([2], [3], spans((1, 1))),
        ([], [1], []),
        ([1], [], []),
    ],
)
def test_texts_are_cut_where_both_end_a_token(ours, theirs, expected):
    assert aligned(ours, theirs) == expected


@pytest.mark.parametrize("one", ["byte-level", "metaspace", "unigram", "gemma"])
@pytest.mark.parametrize("other", ["digits apart", "metaspace", "gemma"])
def test_spans_of_two_tokenizers_stand_for_the_same_text(one, other):
    texts = ["Hello world, this is a text of 12 numbers 345", "the quick brown fox jumps over the lazy dog"]
    ours, theirs = tokenizer_of(one, texts), tokenizer_of(other, [text[::-1] for text in texts] + texts[:1], 90)
    both = TwoTokenizers(ours, theirs, ends=[ours.eos_token_id])
    prompt, completion = (cast(Any, ours(text, add_special_tokens=False)["input_ids"]) for text in ("Hello", TEXT))
    read = both.read(prompt, [*completion, ours.eos_token_id])
    assert read.completion[-1] == theirs.eos_token_id
    assert read.prompt[0] == theirs.bos_token_id
    assert both.ours is not None
    assert both.theirs is not None
    for span in read.spans:
        own = b"".join(both.ours.of([completion[each] for each in span.ours]))
        its = b"".join(both.theirs.of([read.completion[each] for each in span.theirs]))
        assert own.strip() == its.strip()
    covered = [each for span in read.spans for each in span.ours]
    assert covered == [*range(len(completion))]


@pytest.mark.parametrize(
    ("pieces", "text", "lengths"),
    [
        ([b"a b", b"", b"c"], "a bc", [3, 0, 1]),
        (["€".encode()[:2], "€".encode()[2:]], "€", [2, 1]),
        ([b"a\xff", b"b", "€".encode()[:1]], "a\ufffdb\ufffd", [4, 1, 3]),
        ([], "", []),
    ],
)
def test_bytes_that_are_no_letters_are_replaced_in_place(pieces, text, lengths):
    assert spoken(pieces) == (text, lengths)
    assert sum(lengths) == len(text.encode())


def test_letters_cut_into_bytes_are_aligned():
    ours, theirs = tokenizers()
    both = TwoTokenizers(ours, theirs)
    completion: Any = ours("€ 7", add_special_tokens=False)["input_ids"]
    read = both.read(ours("a")["input_ids"], completion)
    assert len(completion) >= 4
    assert [*read.spans[-1].ours][-1] == len(completion) - 1
    clipped = both.read(ours("a")["input_ids"], completion[:2])  # the text ends within a letter
    assert clipped.spans


def test_a_text_without_tokens_of_the_teacher_teaches_nothing(caplog):
    ours = tokenizer_of("byte-level", ["a b c"])
    both = TwoTokenizers(ours, tokenizer_of("metaspace", ["a b c d"], 30))
    assert both.read(ours("a")["input_ids"], ours("ß", add_special_tokens=False)["input_ids"]).spans == []
