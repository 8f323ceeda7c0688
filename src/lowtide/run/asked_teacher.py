"""From options to whom a teacher's log-probabilities are asked of."""

from __future__ import annotations

from typing import Any

from lowtide.data.teacher_logprobs import Teacher, WrittenTeacher
from lowtide.methods.shared.asked_teacher import NamingTeacherOptions, ServedTeacherOptions
from lowtide.rollout.served_teacher import ServedTeacher


def make_asked(options: Any, *, vocabulary: int, tokenizer: Any, temperature: float) -> tuple[Teacher, str] | None:
    """Who is asked, and what the start-up report says of that; None where the teacher is loaded.

    Args:
        vocabulary: the student's tokens.
        tokenizer: the student's.
        temperature: divisor of both models' logits.

    Raises:
        ServerError: no server answers.
        ValueError: the teacher has other tokens, or says less than is compared; says what to do.
    """
    if not isinstance(options, ServedTeacherOptions) or options.asked is None:
        return None
    top, compares = options.asks_for, isinstance(options, NamingTeacherOptions)
    what = f"its {top} likeliest of each place" if compares else "written tokens alone"
    folder = getattr(options, "teacher_logprobs", None)
    if folder is not None:
        written = WrittenTeacher(folder, top=top, temperature=temperature, vocabulary=vocabulary)
        return written, f"what {written.facts.teacher} said before, in {folder}; {what}"
    url = options.teacher_model_server_url
    assert url is not None
    made = ServedTeacher(
        url,
        top=top,
        temperature=temperature,
        timeout=options.teacher_model_server_timeout,
        vocabulary=vocabulary,
        tokenizer=tokenizer,
    )
    return made, f"{made.model}, behind {made.calls.url}; {what}"
