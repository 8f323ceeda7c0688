"""What is shown on a terminal: text from data, models and templates without the characters that control terminals.

A prompt, a completion or a template's error may hold sequences that clear the screen, set the title or the clipboard,
or turn the direction of text. They are shown escaped (`\\x1b`), into pipes and files too.
"""

from __future__ import annotations

import logging
import sys
import traceback
import warnings
from collections.abc import Iterable
from typing import Any

from rich import console as rich_console
from rich.segment import Segment

from lowtide.escaping import shown


class Console(rich_console.Console):
    """rich's, which writes the control characters of what it is given as escapes; its own stay. What the encoding of
    its stream does not have is a question mark, where rich would raise."""

    def render(self, *args: Any, **kwargs: Any) -> Iterable[Segment]:
        for segment in super().render(*args, **kwargs):
            text = shown(segment.text).encode(self.encoding, "replace").decode(self.encoding)
            yield segment if segment.control else segment._replace(text=text)

    def say(self, text: str, style: str | None = None) -> None:
        """A part of a line, at once and without wrapping: what comes next goes on behind it."""
        self.out(
            shown(text).encode(self.encoding, "replace").decode(self.encoding), style=style, end="", highlight=False
        )


class _Record(logging.LogRecord):
    def getMessage(self) -> str:
        return shown(super().getMessage())


def show_safely() -> None:
    """This process's logs, warnings and tracebacks, those of other packages too, hold no control characters."""
    logging.setLogRecordFactory(_Record)
    given = warnings.formatwarning
    if given.__module__ != __name__:
        warnings.formatwarning = _formatter(given)
    sys.excepthook = lambda kind, error, trace: print(
        shown("".join(traceback.format_exception(kind, error, trace))), end="", file=sys.stderr
    )


def _formatter(given: Any) -> Any:
    def formatwarning(*args: Any, **kwargs: Any) -> str:
        return shown(given(*args, **kwargs))

    return formatwarning
