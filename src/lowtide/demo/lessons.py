"""What the demo of each method teaches, and how it examines the model: one entry of `LESSONS` a method."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lowtide.demo.answers import answers
from lowtide.demo.continuing import continued, save_beginning, sentence_rows
from lowtide.demo.data import Question, dialogue_rows, told_rows
from lowtide.demo.detecting import make_discriminator, most_suspect, with_wrong_digit
from lowtide.demo.hidden import filled, make_encoder, sum_of_last_digits, text_rows
from lowtide.demo.judging import judged_rows, judgements, shown, verdict
from lowtide.demo.model import make_with_other_tokens, save
from lowtide.demo.preferences import labelled_rows, margins, pair_rows, triple_rows, wrong_sum
from lowtide.demo.tagging import marked, predicted_labels, save_tagger, tagged, tagged_rows
from lowtide.demo.translating import make_encoder_decoder, pair_of_texts, targets_of
from lowtide.engine.heads.head import Head
from lowtide.engine.heads.language_model import LanguageModel
from lowtide.engine.heads.value import Value

COMMON: dict[str, Any] = {
    "lr_scheduler_type": "cosine",
    "warmup_steps": 40,
    "weight_decay": 0.1,
    "adam_beta2": 0.95,
    "gradient_checkpointing": False,
    "logging_steps": 10,
    "save_strategy": "no",
    "use_cpu": True,
}
"""The model is so small that checkpointing would cost more than it saves."""
OF_ROWS: dict[str, Any] = {"max_length": 64}
"""Of the methods whose rows are written already."""


@dataclass(frozen=True)
class Finding:
    """What an examination found for one held-out question."""

    text: str
    right: bool


Examination = Callable[[Path, Sequence[Question], str, int], list[Finding]]
"""From a saved model, questions, what this is called in a progress bar, and the run's seed."""


@dataclass(frozen=True)
class Lesson:
    """The demo of one method."""

    steps: int
    """As many as reach 90%; for methods whose completions are rewarded those of two minutes, which take a model from
    some 70% to 80%; for replaced-token detection those of one minute; for methods with a teacher as many as bring a
    student from a third to more than half."""
    settings: Mapping[str, Any]
    """What `lowtide METHOD` is told beyond `COMMON`."""
    rows: Callable[[Question], Iterator[dict[str, Any]]]
    """The rows that a question becomes."""
    examine: Examination
    measure: str
    """What the share of right findings is called in the report."""
    words: str
    """The same, printed."""
    asked: Callable[[Question], str]
    """What a finding is about."""
    note: str | None = None
    """Printed under the findings."""
    questions: int | None = None
    """Questions to train on, each several times; None for all that are not held out."""
    base: Callable[[Path, int], None] = save
    """Makes the model and its tokenizer in a folder, from a seed."""
    taught: int = 0
    """Steps of supervised fine-tuning that come before, for a method that needs a model which sometimes is right."""
    taught_rows: Callable[[Question], Iterator[dict[str, Any]]] = dialogue_rows
    """The rows of these."""
    teacher: int = 0
    """Steps of supervised fine-tuning that make a teacher, for a method that has one."""
    teacher_base: Callable[[Path, int], None] | None = None
    """As `base`, of the teacher; None for the same."""


def _written(folder: Path, questions: Sequence[Question], name: str, seed: int) -> list[Finding]:
    found = answers(folder, questions, name)
    return [Finding(text, text == each.answer) for text, each in zip(found, questions, strict=True)]


def _answered(folder: Path, questions: Sequence[Question], name: str, seed: int) -> list[Finding]:
    found = targets_of(folder, questions, name)
    return [Finding(text, text == each.answer) for text, each in zip(found, questions, strict=True)]


def _continued(folder: Path, questions: Sequence[Question], name: str, seed: int) -> list[Finding]:
    found = continued(folder, questions, seed)
    return [Finding(text, text == each.answer) for text, each in zip(found, questions, strict=True)]


def _preferred(folder: Path, questions: Sequence[Question], name: str, seed: int, *, head: type[Head]) -> list[Finding]:
    found = margins(folder, questions, head=head, seed=seed).tolist()
    return [Finding(f"{margin:+.2f}", margin > 0) for margin in found]


def _filled(folder: Path, questions: Sequence[Question], name: str, seed: int) -> list[Finding]:
    found = filled(folder, questions, name)
    return [Finding(text, text == sum_of_last_digits(each)) for text, each in zip(found, questions, strict=True)]


def _suspected(folder: Path, questions: Sequence[Question], name: str, seed: int) -> list[Finding]:
    return [Finding(*found) for found in most_suspect(folder, questions)]


def _tagged(folder: Path, questions: Sequence[Question], name: str, seed: int) -> list[Finding]:
    found = predicted_labels(folder, questions, seed)
    pairs = zip(questions, found, strict=True)
    return [Finding(marked(question, labels), labels == tagged(question)[1]) for question, labels in pairs]


def _judged(folder: Path, questions: Sequence[Question], name: str, seed: int) -> list[Finding]:
    pairs = zip(questions, judgements(folder, questions, seed), strict=True)
    return [Finding(verdict(found), found == shown(question)["labels"]) for question, found in pairs]


def _asked(question: Question) -> Iterator[dict[str, Any]]:
    """A question, and its result for the reward."""
    yield {"prompt": question.messages[:1], "answer": str(question.left + question.right)}


def _told(question: Question) -> Iterator[dict[str, Any]]:
    """A question, and its answer for a teacher alone."""
    yield {"prompt": question.messages[:1], "privileged_context": question.answer}


def _sides(question: Question) -> str:
    return f"{question.text} {question.left + question.right}, not {wrong_sum(question)}"


def _preference(*, head: type[Head] = LanguageModel, **more: Any) -> Lesson:
    return Lesson(
        examine=functools.partial(_preferred, head=head),
        measure="preference_accuracy",
        words="rightly preferred",
        asked=_sides,
        note=f"chosen less rejected {head.number}",
        **more,
    )


def _written_after(steps_before: int, *, teacher: int = 0, **more: Any) -> Lesson:
    """A method whose model writes, after some supervised fine-tuning, and perhaps a teacher's after more of it."""
    teachers = f"; its teacher had {teacher}" if teacher else ""
    how: dict[str, Any] = {"rows": _asked, "questions": 2048, **more}
    return Lesson(
        examine=_written,
        measure="exact_match",
        words="exact answers",
        asked=lambda question: question.text,
        note=f"before: after {steps_before} steps of supervised fine-tuning{teachers}",
        taught=steps_before,
        teacher=teacher,
        **how,
    )


PREFERENCE: dict[str, Any] = OF_ROWS | {"learning_rate": 4e-3, "per_device_train_batch_size": 128}
WRITING: dict[str, Any] = {
    "max_completion_length": 16,
    "learning_rate": 3e-4,
    "warmup_steps": 10,
    "weight_decay": 0.0,
    "adam_beta2": 0.999,
}
"""Of the methods whose model writes."""
REWARDED: dict[str, Any] = WRITING | {"reward_funcs": ["exact_answer"]}

IN_GROUPS = REWARDED | {"num_generations": 8, "per_device_train_batch_size": 256}
FROM_TEACHER: dict[str, Any] = WRITING | {"per_device_train_batch_size": 128, "learning_rate": 1e-3}

OF_ROWS_TAUGHT: dict[str, Any] = OF_ROWS | {
    "temperature": 1.0,
    "learning_rate": 2e-3,
    "warmup_steps": 10,
    "per_device_train_batch_size": 128,
}

LESSONS: dict[str, Lesson] = {
    "sft": Lesson(
        steps=360,
        settings=OF_ROWS | {"assistant_only_loss": True, "learning_rate": 4e-3, "per_device_train_batch_size": 128},
        rows=dialogue_rows,
        examine=_written,
        measure="exact_match",
        words="exact answers",
        asked=lambda question: question.text,
    ),
    "pretrain": Lesson(
        steps=300,
        settings={
            "max_length": 128,
            "per_device_train_batch_size": 32,
            "learning_rate": 4e-3,
            "lr_scheduler_type": "warmup_stable_decay",
            "warmup_steps": 0.1,
            "decay_steps": 0.3,
        },
        rows=sentence_rows,
        examine=_continued,
        measure="exact_match",
        words="exact answers",
        asked=lambda question: question.text,
        note="how each question is continued; before: random weights",
        base=save_beginning,
    ),
    "dpo": _preference(
        steps=300,
        settings=OF_ROWS
        | {
            "beta": 0.5,
            "precompute_ref_log_probs": True,
            "learning_rate": 4e-3,
            "per_device_train_batch_size": 128,
        },
        rows=pair_rows,
    ),
    "kto": _preference(
        steps=300,
        settings=OF_ROWS
        | {
            "beta": 0.1,
            "desirable_weight": 3.0,  # from random weights, pushing every answer down would be the easiest
            "precompute_ref_log_probs": True,
            "learning_rate": 6e-3,
            "per_device_train_batch_size": 128,
        },
        rows=labelled_rows,
    ),
    "reward": _preference(
        steps=280,
        settings=OF_ROWS | {"learning_rate": 4e-3, "per_device_train_batch_size": 128},
        rows=pair_rows,
        head=Value,
    ),
    "prm": Lesson(
        steps=300,
        settings=OF_ROWS | {"learning_rate": 4e-3, "per_device_train_batch_size": 128},
        rows=judged_rows,
        examine=_judged,
        measure="exact_judgements",
        words="rightly judged",
        asked=lambda question: f"{question.left} + {question.right}: {'; '.join(shown(question)['completions'])}",
        note="the number of the step that is held to be wrong",
    ),
    "token-classification": Lesson(
        steps=240,
        settings=OF_ROWS | {"learning_rate": 3e-3, "per_device_train_batch_size": 128},
        rows=tagged_rows,
        examine=_tagged,
        measure="exact_labels",
        words="all labels right",
        asked=lambda question: " ".join(tagged(question)[0]),
        note="the digits that are marked as the larger number",
        base=save_tagger,
    ),
    "distillation": _written_after(150, teacher=300, steps=60, settings=FROM_TEACHER),
    "gkd": _written_after(
        150,
        teacher=300,
        steps=80,
        settings=OF_ROWS_TAUGHT | {"max_new_tokens": 16},
        rows=dialogue_rows,
    ),
    "gold": _written_after(
        150,
        teacher=300,
        teacher_base=functools.partial(save, make=make_with_other_tokens),
        steps=80,
        settings=OF_ROWS_TAUGHT | {"max_completion_length": 16, "use_uld_loss": True, "uld_use_hybrid_loss": True},
        rows=dialogue_rows,
    ),
    "iw-opd": _written_after(
        150,
        teacher=300,
        steps=150,
        settings=WRITING | {"per_device_train_batch_size": 256, "learning_rate": 6e-4},
    ),
    "a2po": _written_after(190, steps=150, settings=REWARDED | {"per_device_train_batch_size": 256}),
    "sdpo": _written_after(
        190,
        steps=120,
        settings=REWARDED
        | {
            "distillation_mode": "full_logits",
            "distillation_alpha": 0.5,
            "reprompt_template": "{prompt}{solution}{feedback}",  # as `told_rows` tell it
            "solution_template": "\n{successful_previous_attempt}",
            "num_generations": 4,
            "per_device_train_batch_size": 256,
        },
        taught_rows=told_rows,
    ),
    "grpo": _written_after(190, steps=240, settings=IN_GROUPS),
    "gmpo": _written_after(190, steps=240, settings=IN_GROUPS),
    "seq2seq": Lesson(
        steps=400,
        settings={"learning_rate": 3e-3, "per_device_train_batch_size": 128},
        rows=pair_of_texts,
        examine=_answered,
        measure="exact_match",
        words="exact answers",
        asked=lambda question: question.text,
        base=functools.partial(save, make=make_encoder_decoder),
    ),
    "masked-lm": Lesson(
        steps=300,
        settings=OF_ROWS | {"mlm_probability": 0.3, "learning_rate": 4e-3, "per_device_train_batch_size": 128},
        rows=text_rows,
        examine=_filled,
        measure="exact_match",
        words="rightly filled in",
        asked=lambda question: f"{question.left} + {question.right}: {question.left % 10} + {question.right % 10} =",
        note="what is filled in where the sum of the last digits is hidden",
        base=functools.partial(save, make=make_encoder),
    ),
    "replaced-token-detection": Lesson(
        steps=500,
        settings=OF_ROWS
        | {
            "mlm_probability": 0.3,
            "generator_size": 0.1,  # a better one leaves few wrong digits to learn from
            "discriminator_weight": 10.0,
            "learning_rate": 4e-3,
            "per_device_train_batch_size": 128,
        },
        rows=text_rows,
        examine=_suspected,
        measure="exact_match",
        words="wrong digit found",
        asked=lambda question: with_wrong_digit(question).replace("\n", "; "),
        note="the token that is held to be replaced before all others, in brackets",
        base=functools.partial(save, make=make_discriminator),
    ),
    "tpo": _preference(steps=300, settings=PREFERENCE | {"beta": 0.5}, rows=triple_rows),
    "sdft": _written_after(
        150,
        steps=120,
        settings=WRITING
        | {
            "teacher_prompt_template": "{prompt}\n{privileged_context}",
            "per_device_train_batch_size": 128,
            "learning_rate": 1e-3,
        },
        rows=_told,
        taught_rows=told_rows,
    ),
}
