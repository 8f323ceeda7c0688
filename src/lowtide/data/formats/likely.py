"""Which columns are likely to be meant, by the words in their names: proposed where a dataset fits no format."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from lowtide.process.ways_out import in_python

WORDS: dict[str, set[str]] = {
    "prompt": {"prompt", "question", "query", "instruction", "input", "user", "human", "request", "problem", "asked"},
    "completion": {"completion", "answer", "response", "reply", "output", "assistant", "bot", "gpt", "solution"},
    "chosen": {"chosen", "preferred", "accepted", "better", "best", "winner", "good", "win"},
    "rejected": {"rejected", "dispreferred", "worse", "worst", "loser", "bad", "lose"},
    "reference": {"reference", "gold", "golden", "ideal", "target", "truth"},
    "label": {"label", "desirable", "liked", "thumb", "thumbs", "vote"},
    "messages": {"messages", "message", "conversation", "conversations", "chat", "dialog", "dialogue", "turns"},
    "text": {"text", "content", "document", "body", "article", "passage", "story"},
}
"""By the column that a format needs: words in the names that people give it."""


def likely_columns(columns: Sequence[str], wanted: Sequence[str]) -> dict[str, str]:
    """The columns that may stand for those that are wanted; empty unless each has one, and another one.

    Args:
        columns: of the dataset.
        wanted: columns of a format, of `WORDS`.
    """
    found: dict[str, str] = {}
    for name in wanted:
        exact = [each for each in columns if each == name]
        near = [each for each in columns if each not in found.values() and WORDS[name] & {*_words(each)}]
        if not exact and not near:
            return {}
        found[name] = (exact or near)[0]
    return found if len({*found.values()}) == len(wanted) else {}


def proposal(columns: Sequence[str], *formats: Sequence[str]) -> str:
    """` If ...`: the first of the formats whose columns may be there by other names, as a clause for messages that
    ends with a full stop; where no name tells, how the columns of the first format are named, if there are so many."""
    found = next(filter(None, (likely_columns(columns, wanted) for wanted in formats)), {})
    if not found and len(columns) < len(formats[0]):
        return ""
    opening = "If their names say what they hold" if found else "To say which is which"
    said = found or dict.fromkeys(formats[0], "...")
    in_file = ", ".join(f"{name}: {json.dumps(source, ensure_ascii=False)}" for name, source in said.items())
    renamed = {source: name for name, source in found.items() if source != name}
    on_line = json.dumps(said, ensure_ascii=False)
    in_code = in_python(f", or dataset.rename_columns({renamed})") if found else ""
    return f" {opening}: columns: {{{in_file}}} in a run file, --columns '{on_line}'{in_code}."


def _words(column: str) -> list[str]:
    """Of a name such as `userQuestion`, `user_question` or `User Question`."""
    return re.findall(r"[a-z]+", re.sub(r"(?<=[a-z])(?=[A-Z])", " ", column).lower())
