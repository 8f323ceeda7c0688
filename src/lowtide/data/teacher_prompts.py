"""The prompt that a teacher reads in place of the student's: the same question, and beside it what the student is not
told, such as a demonstration. The tokens are those of TRL 1.16's `SDFTTrainer` and `SDPOTrainer`.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lowtide.data.formats.columns import PROMPT
from lowtide.data.prompts import PromptEncoder

PRIVILEGED = "privileged_context"
"""The column of what the teacher alone is told."""


@dataclass(frozen=True)
class TeacherPromptEncoder(PromptEncoder):
    """From a prompt, and what the teacher alone is told, to the token ids of the teacher's prompt."""

    template: str = "{prompt}"
    """A text with the places {prompt} and {privileged_context}; in a conversation, that of its last message."""

    def of_row(self, row: Mapping[str, Any], number: int) -> list[int]:
        """The token ids of the prompt that the teacher reads.

        Raises:
            ValueError: as of any prompt; or the row has no context, or a conversation does not end with a user.
        """
        told = as_told(row.get(PRIVILEGED))
        if told is None:
            raise ValueError(
                f"{self.where(number)}: `{PRIVILEGED}` is {row.get(PRIVILEGED)!r:.80}, and the teacher's prompt is "
                "made of it: give each row a text, or messages, such as a demonstration"
            )
        prompt = told_prompt(row[PROMPT], lambda text: filled(self.template, text, told), self.where(number))
        return self(prompt, number)


@dataclass(frozen=True)
class Reprompts:
    """The templates of a teacher's prompt that shows a solution, feedback, or both."""

    whole: str
    """With the places {prompt}, {solution} and {feedback}."""
    solution: str
    """With the place {successful_previous_attempt}."""
    feedback: str
    """With the place {feedback_raw}."""

    def filled(self, prompt: str, solution: str | None, feedback: str | None) -> str:
        """The text of a teacher's prompt; what there is not is left out."""
        solved = "" if solution is None else self.solution.format(successful_previous_attempt=solution)
        said = "" if feedback is None else self.feedback.format(feedback_raw=feedback)
        return self.whole.format(prompt=prompt, solution=solved, feedback=said)


@dataclass(frozen=True)
class RepromptEncoder(PromptEncoder):
    """From a prompt, a solution and feedback to the token ids of the teacher's prompt."""

    reprompts: Reprompts = Reprompts("{prompt}{solution}{feedback}", "", "")
    gives_feedback: bool = False
    """Whether the teacher is told the feedback of a row, in the column `privileged_context`."""

    @property
    def template(self) -> str:
        """What the tokens depend on beside the prompt."""
        return repr((self.reprompts, self.gives_feedback))

    def of_row(self, row: Mapping[str, Any], number: int) -> list[int]:
        """The token ids that the teacher reads where there is no solution.

        Raises:
            ValueError: as of any prompt; or a conversation does not end with a user.
        """
        return self.told(row, number, None, feedback_of(row) if self.gives_feedback else None)

    def told(self, row: Mapping[str, Any], number: int, solution: str | None, feedback: str | None) -> list[int]:
        """The token ids that the teacher reads; those of the prompt where there is neither."""
        fill = functools.partial(self.reprompts.filled, solution=solution, feedback=feedback)
        prompt = told_prompt(row[PROMPT], fill, self.where(number))
        return self(prompt if solution is not None or feedback is not None else copy.copy(row[PROMPT]), number)


def feedback_of(row: Mapping[str, Any]) -> str | None:
    """What a row says of an attempt, in the column `privileged_context`: a text, or messages; None where nothing."""
    given = row.get(PRIVILEGED)
    told = as_told(given) if isinstance(given, str | list) else None
    return told if told and told.strip() else None


def filled(template: str, prompt: str, told: str) -> str:
    """The text of a teacher's prompt."""
    return template.format(**{PROMPT: prompt, PRIVILEGED: told})


def as_told(told: Any) -> str | None:
    """What a teacher is told as a text: a text, or the contents of messages, a line each; None where there is none."""
    if told is None or isinstance(told, str):
        return told
    if isinstance(told, Sequence) and told and all(isinstance(each, Mapping) for each in told):
        return "\n".join(text for text in (content_text(each.get("content")) for each in told) if text)
    return str(told)


def told_prompt(prompt: Any, text_of: Callable[[str], str], where: str) -> Any:
    """A prompt with another text; of a conversation, with another last message.

    Raises:
        ValueError: the last message is not a user's.
    """
    if isinstance(prompt, str):
        return text_of(prompt)
    last = prompt[-1] if isinstance(prompt, Sequence) and prompt else None
    if not isinstance(last, Mapping) or last.get("role") != "user":
        raise ValueError(
            f"{where}: the teacher's prompt is made of a conversation that ends with a message of the user, and this "
            f"one ends with {last!r:.80}: mend or drop the row"
        )
    return [*prompt[:-1], {"role": "user", "content": text_of(content_text(last.get("content")))}]


def content_text(content: Any) -> str:
    """The text of a message's content: a text, or the texts among its parts."""
    if isinstance(content, str) or not isinstance(content, Sequence):
        return str(content or "")
    return " ".join(part.get("text") or "" for part in content if part.get("type") == "text")


def check_template(name: str, template: str, *places: str, needs: Sequence[str]) -> None:
    """Refuses a template that can't be filled in, or that leaves out what it is to say.

    Args:
        name: the option.
        places: the names that may stand in braces.
        needs: those that have to.

    Raises:
        ValueError: naming what is missing, or too much.
    """
    words = " and ".join(f"{{{each}}}" for each in places)
    try:
        made = template.format(**{each: f"\0{each}" for each in places})
    except (KeyError, IndexError, ValueError, AttributeError) as error:
        raise ValueError(
            f"{name}={template!r} can't be filled in ({error!r}): it takes {words}, and other braces are doubled"
        ) from error
    for each in needs:
        if f"\0{each}" not in made:
            raise ValueError(f"{name}={template!r} has no place {{{each}}}: put it in")
