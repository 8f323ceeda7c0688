"""Rows of Stanford Alpaca's columns: an `instruction`, an `input` that it may be about, and the answer to it.

With a chat template the row is a conversation: the instruction and, in a line of its own, the input, then the answer,
as LLaMA-Factory reads these columns; `system` and `history` are its names too. Without a template the row is a text of
the format that Alpaca itself was trained on (https://github.com/tatsu-lab/stanford_alpaca). Only the answer is scored
by default, as of any prompt with its completion.
"""

from collections.abc import Mapping
from typing import Any

from lowtide.data.formats.conversation import Message, check_roles, describe
from lowtide.data.formats.samples import ChatSample, Sample, TextSample, text_of

ALPACA_COLUMNS = ("input", "system", "history")
"""Beside the instruction and the answer, where they are there."""
WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. Write a "
    "response that appropriately completes the request.\n\n### Instruction:\n{}\n\n### Input:\n{}\n\n### Response:\n"
)
WITHOUT_INPUT = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{}\n\n### Response:\n"
)


def alpaca_side(chats: bool, answer: str, row: Mapping[str, Any]) -> Sample:
    """The instruction of a row and the answer in the column `answer`.

    Raises:
        ValueError: a column is no text, or needs a chat template that is not there.
    """
    instruction, reply = text_of(row.get("instruction"), "instruction"), text_of(row.get(answer), answer)
    context = text_of(row.get("input") or "", "input")
    if not chats:
        for name in ("system", "history"):
            if row.get(name):
                raise ValueError(f"{name!r} needs a conversation: set chat_template_path to a chat template.")
        prompt = WITH_INPUT.format(instruction, context) if context else WITHOUT_INPUT.format(instruction)
        return TextSample(reply, prompt=prompt)
    question = f"{instruction}\n{context}" if context else instruction
    talk = with_system([*_history(row.get("history")), _message("user", question), _message("assistant", reply)], row)
    return ChatSample(check_roles(talk), len(talk) - 1)


def asked_side(chats: bool, question: str, answer: str, row: Mapping[str, Any]) -> Sample:
    """What was asked in one column and answered in another: a conversation with a chat template, else a text.

    Raises:
        ValueError: a column is no text.
    """
    asked, reply = text_of(row.get(question), question), text_of(row.get(answer), answer)
    if not chats:
        return TextSample(reply, prompt=asked)
    return ChatSample(check_roles([_message("user", asked), _message("assistant", reply)]), 1)


def with_system(messages: list[Message], row: Mapping[str, Any]) -> list[Message]:
    """A conversation that opens with the text of the row's column `system`, unless it has a system message itself."""
    system = row.get("system")
    if not system or messages[0]["role"] == "system":
        return messages
    return [_message("system", text_of(system, "system")), *messages]


def _history(turns: Any) -> list[Message]:
    """Earlier turns, as pairs of what was asked and answered."""
    messages = []
    for number, turn in enumerate(turns or []):
        if not isinstance(turn, list) or len(turn) != 2:
            raise ValueError(f"history[{number}] is {describe(turn)}; it must be a list of a question and its answer.")
        asked, answered = (text_of(each, f"history[{number}]") for each in turn)
        messages += [_message("user", asked), _message("assistant", answered)]
    return messages


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}
