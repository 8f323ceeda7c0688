"""What is doubtful in rows that are trained on all the same: noted beside each row, and said once of a dataset.

TRL trains on such rows without a word: an empty answer, of which the model learns to end at once; labels that are not
the row's tokens; token ids without a token that ends them. A number and the first row are enough to find them.
"""

import json
import logging
import re
from collections.abc import Mapping, Sequence
from enum import IntFlag
from typing import Any

import numpy as np
import pyarrow as pa
from datasets import Value
from jaxtyping import Bool, Int
from transformers import PreTrainedTokenizerBase

from lowtide.data.batches.token_rows import IGNORED, TokenRows
from lowtide.data.formats.conversation import TRAINED
from lowtide.data.formats.samples import ChatSample, Sample, TextSample

logger = logging.getLogger(__name__)


class Doubt(IntFlag):
    """What is doubtful in a row."""

    NO_ANSWER = 1
    NO_PROMPT = 2
    OTHER_LABELS = 4
    NO_END = 8
    """Said only where no row of a dataset has an end: rows may be pieces of a longer text."""
    OTHER_MASK = 16
    NOT_SHOWN = 32
    EMPTY_THOUGHT = 64
    SEVERAL_TURNS = 128
    EMPTY_WORD = 256
    MASKED = 512
    BROKEN_CALL = 1024


NO_DOUBT = Doubt(0)
SEEN = re.compile("[^\\s\u00ad\u200b-\u200f\u2060\ufeff]")
"""A character that shows: no space, and none of the marks of width 0."""
SAID = {
    Doubt.NO_ANSWER: "the text, the completion or a message of the assistant is empty or missing, or has special "
    "tokens alone, so that no more than an end token is learned of it. Remove such rows, or give them an answer.",
    Doubt.NO_PROMPT: "the prompt or a message of the user is empty, and the model learns to answer what was not asked. "
    "Remove such rows, or give them a prompt.",
    Doubt.OTHER_LABELS: "'labels' has other tokens than 'input_ids', and they are learned as they are. A token's label "
    "is the token itself, or -100: labels are shifted later. Remove the column 'labels' if that is not meant.",
    Doubt.OTHER_MASK: "'labels' scores other tokens than 'completion_mask' or 'assistant_masks', and the labels are "
    "followed, as by TRL. Remove the columns that are not meant.",
    Doubt.NOT_SHOWN: "the chat template leaves something out: tools, tool calls, the thoughts of a message that is "
    "scored, or what messages of a role say. Nothing is learned of it. Set chat_template_path to a template that "
    "writes it, or remove it.",
    Doubt.EMPTY_THOUGHT: "a message without thoughts is scored with the empty ones that the chat template writes, as "
    "the model has to write them. Where the prompt is to have them already, give the rows chat_template_kwargs such as "
    "{'enable_thinking': False}.",
    Doubt.SEVERAL_TURNS: "a completion is not one message of the assistant alone, and it is taken as the chat template "
    "writes the whole conversation, and not as it is generated. Keep the messages that both sides have in the prompt; "
    "with images, let completions have one turn.",
    Doubt.EMPTY_WORD: "a word with a label is empty, or the tokenizer gives it no token, and nothing is learned of its "
    "label. Remove such words with their labels.",
    Doubt.MASKED: "'attention_mask' leaves out tokens at an end that are no padding token, and the model does not see "
    "them. Remove the column 'attention_mask' if that is not meant.",
    Doubt.BROKEN_CALL: "the arguments of a tool call are a text that is no JSON, and the model learns to write it. "
    "Remove such rows, or mend them.",
    Doubt.NO_END: "no token ends the completion or the text, and the model does not learn to stop: rows that are token "
    "ids get no end token. Put the tokenizer's end token after them.",
}
DOUBT_NOTES = {"doubts": Value("int16"), "row": Value("int64")}
"""Columns of prepared rows: `Doubt`, and the number of the row in the dataset."""
Found = dict[Doubt, tuple[int, int]]
"""By doubt: how many rows it is about, and the number of the first."""


def doubts_of(samples: Sequence[Sample]) -> Int[np.ndarray, " rows"]:
    """What texts and conversations show by themselves, a `Doubt` each."""
    return np.array([_doubt_of(sample) for sample in samples], dtype=np.int64)


def _doubt_of(sample: Sample) -> Doubt:
    broken = False
    if isinstance(sample, TextSample):
        asked, answered = [sample.prompt], [sample.text]
    elif isinstance(sample, ChatSample):
        asked = [each.get("content") for each in sample.messages if each["role"] == "user"]
        answers = [each for each in sample.messages[sample.prompt_messages or 0 :] if each["role"] == "assistant"]
        answered = [_said(message) for message in answers] or [""]
        broken = any(map(_is_broken, (call for message in answers for call in message.get("tool_calls") or ())))
    else:
        return Doubt.NO_PROMPT if sample.prompt_tokens == 0 else Doubt(0)
    no_prompt = any(isinstance(text, str) and not SEEN.search(text) for text in asked)
    no_answer = any(not SEEN.search(text) for text in answered)
    return Doubt(Doubt.NO_PROMPT * no_prompt | Doubt.NO_ANSWER * no_answer | Doubt.BROKEN_CALL * broken)


def _is_broken(call: Any) -> bool:
    """Whether the arguments of a tool call are a text that is no JSON."""
    own = call.get("function") or call if isinstance(call, dict) else None
    arguments = own.get("arguments") if isinstance(own, dict) else None
    if not isinstance(arguments, str) or not arguments.strip():
        return False
    try:
        json.loads(arguments)
    except (ValueError, RecursionError):
        return True
    return False


def _said(message: dict[str, Any]) -> str:
    """What a message of the assistant says, its thoughts and its calls of tools among it."""
    own = {name: value for name, value in message.items() if name not in ("role", *TRAINED) and value}
    return " ".join(map(str, own.values()))


def special_ids(tokenizer: PreTrainedTokenizerBase) -> Int[np.ndarray, " special"]:
    """The tokens that say nothing; the one for unknown words stands for a word."""
    return np.array(
        sorted(each for each in tokenizer.all_special_ids if each != tokenizer.unk_token_id), dtype=np.int64
    )


def ending_ids(tokenizer: PreTrainedTokenizerBase) -> Int[np.ndarray, " special"]:
    """The special tokens that may end a text or a turn."""
    special, begins = special_ids(tokenizer), tokenizer.bos_token_id
    return special[special != begins] if begins not in (None, tokenizer.eos_token_id) else special


def without(rows: TokenRows, these: Int[np.ndarray, " special"], *, others: bool = False) -> Bool[np.ndarray, " rows"]:
    """Rows whose completion, or whose scored tokens where they have no prompt, holds none of these tokens; or, with
    `others`, none but these."""
    counted = (rows.labels != IGNORED) & (np.isin(rows.token_ids, these) != others)
    if rows.prompt_lengths is not None:
        place = np.arange(len(rows.token_ids)) - np.repeat(rows.offsets[:-1], rows.lengths)
        counted &= place >= np.repeat(rows.prompt_lengths, rows.lengths)
    return ~rows_with(counted, rows.offsets)


def relabelled(rows: TokenRows) -> Bool[np.ndarray, " rows"]:
    """Rows with a label that is neither its token nor -100."""
    return rows_with((rows.labels != IGNORED) & (rows.labels != rows.token_ids), rows.offsets)


def rows_with(marks: Bool[np.ndarray, " tokens"], offsets: Int[np.ndarray, " rows+1"]) -> Bool[np.ndarray, " rows"]:
    """Rows of which a token has a mark."""
    total = np.zeros(len(marks) + 1, dtype=np.int64)
    np.cumsum(marks, out=total[1:])
    return total[offsets[1:]] > total[offsets[:-1]]


def doubt_column(sides: Sequence[TokenRows]) -> pa.Array:
    """The note `doubts`, of rows with these sides."""
    noted = [np.zeros(len(side), dtype=np.int64) if side.doubts is None else side.doubts for side in sides]
    return pa.array(np.bitwise_or.reduce(noted), pa.int16())


def with_numbers(table: pa.Table, numbers: Sequence[int]) -> pa.Table:
    """Noted rows with the note `row`; each row of the dataset, by its number, made one of them, or two in a row."""
    each = table.num_rows // max(len(numbers), 1)
    return table.append_column("row", pa.array(np.repeat(np.asarray(numbers, dtype=np.int64), each)))


def find_doubts(table: pa.Table | pa.RecordBatch, found: Found) -> Found:
    """What was found, with what is noted in these rows, of those that are trained on."""
    notes = {name: table.column(name).to_numpy(zero_copy_only=False) for name in (*DOUBT_NOTES, "dropped")}
    kept = np.where(notes["dropped"] == 0, notes["doubts"], 0)
    total = dict(found)
    for doubt in Doubt:
        rows = notes["row"][(kept & doubt) != 0]
        if len(rows):
            count, first = total.get(doubt, (0, int(rows.min())))
            total[doubt] = (count + len(rows), min(first, int(rows.min())))
    return total


def warn_of_doubts(source: str, found: Found, kept: int) -> None:
    """Says what is doubtful in rows of a dataset, `kept` of which are trained on."""
    for doubt, (count, first) in found.items():
        if doubt is not Doubt.NO_END or count == kept:
            logger.warning("%s: in %s of %s rows (the first is row %s) %s", source, count, kept, first, SAID[doubt])


def doubt_of_mask(tokens: Sequence[int], attended: slice, padding: Any) -> Doubt:
    """Whether a mask, which attends to this range of a row's tokens, leaves out others than padding."""
    left_out = {*tokens[: attended.start], *tokens[attended.stop :]}
    return Doubt.MASKED if left_out - {padding} else NO_DOUBT


def warn_of_absent_labels(source: str, rows_by_label: Mapping[str, int]) -> None:
    """Says which labels no row of a dataset has, of those that a classifier is to tell apart."""
    absent = [name for name, rows in rows_by_label.items() if not rows]
    if absent:
        named = ", ".join(absent[:12]) + (", ..." if len(absent) > 12 else "")
        logger.warning(
            "%s: nothing has %s of the %s labels (%s), so that the model only learns not to give them. Look whether "
            "labels and rows belong together.",
            source,
            len(absent),
            len(rows_by_label),
            named,
        )
