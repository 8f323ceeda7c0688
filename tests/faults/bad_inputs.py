"""input that means nothing ends in one clear message"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from lowtide.cli.main import main

from .case import Case

COMMAND_LINES = {
    "no model": (["sft", "--dataset", "x.jsonl"], "--model is missing"),
    "an unknown method": (["stf"], "there is no command 'stf'"),
}
"""By name: the words of a command line, and what its message has to contain."""


def check_command_line(words: list[str], wanted: str, folder: Path) -> None:
    """A command line ends with exit status 2 and one message, and writes nothing."""
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors):
        status = main(words)
    message = errors.getvalue()
    assert status == 2, f"exit status {status}: {message}"
    assert wanted in message, f"{wanted!r} is not in {message!r}"
    assert "Traceback" not in message, message
    assert not list(folder.iterdir()), f"it left {sorted(each.name for each in folder.iterdir())}"


def cases(seed: int) -> Iterator[Case]:
    """Command lines."""
    for name, (words, wanted) in COMMAND_LINES.items():
        yield Case(name, partial(check_command_line, words, wanted))
