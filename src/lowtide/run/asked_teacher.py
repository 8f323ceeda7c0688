"""From options to whom a teacher's log-probabilities are asked of."""

from __future__ import annotations

from typing import Any

from lowtide.data.teacher_logprobs import Teacher, WrittenTeacher, WrittenTeachers
from lowtide.methods.shared.asked_teacher import NamingTeacherOptions, ServedTeacherOptions
from lowtide.rollout.served_teacher import ServedTeacher


def make_asked(
    options: Any, *, vocabulary: int, tokenizer: Any, temperature: float
) -> tuple[list[Teacher], str] | None:
    """Who is asked, each of several of its own rows, and what the start-up report says of that; None where the teacher
    is loaded.

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
    how: dict[str, Any] = {"top": top, "temperature": temperature, "vocabulary": vocabulary}
    folders = getattr(options, "teacher_logprobs", None)
    if folders is not None:
        written = [WrittenTeacher(each, **how) for each in ([folders] if isinstance(folders, str) else folders)]
        told = ", ".join(f"what {each.facts.teacher} said before, in {each.folder}" for each in written)
        return [WrittenTeachers(written)], f"{told}; {what}"
    how["timeout"] = options.teacher_model_server_timeout
    urls = options.teacher_model_server_urls or {"": options.teacher_model_server_url or ""}
    made = {name: ServedTeacher(str(url), tokenizer=tokenizer, **how) for name, url in urls.items()}
    told = ", ".join(
        f"{name}{': ' if name else ''}{each.model}, behind {each.calls.url}" for name, each in made.items()
    )
    return [*made.values()], f"{told}; {what}"
