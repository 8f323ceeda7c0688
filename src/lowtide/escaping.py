"""Text from data, models and templates without the characters that control terminals: as it is logged.

A prompt, a completion or a template's error may hold sequences that clear the screen, set the title or the clipboard,
or turn the direction of text. They are shown escaped (`\\x1b`), into pipes and files too. `lowtide.terminal` has what
commands add: consoles, and the records of other packages.
"""

from __future__ import annotations

import logging
import re
import traceback
from typing import Any

_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
"""C0 and C1 but tabs and ends of lines, and what directs text."""
OWN = "lowtide"
"""The logger of this package, above those of its modules."""


def shown(text: str) -> str:
    """A text whose control characters are written as escapes."""
    return _CONTROLS.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def escape_own_records() -> None:
    """What this package logs from here on, tracebacks too, holds no control characters."""
    given = logging.getLogRecordFactory()

    def record_of(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = given(*args, **kwargs)
        if record.name.partition(".")[0] == OWN:
            _escape(record)
        return record

    logging.setLogRecordFactory(record_of)


def _escape(record: logging.LogRecord) -> None:
    text = record.getMessage()
    if (escaped := shown(text)) != text:
        record.msg, record.args = escaped, ()
    if record.exc_info:
        record.exc_text = shown("".join(traceback.format_exception(*record.exc_info)).rstrip("\n"))
