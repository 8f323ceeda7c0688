"""Runs commands of lowtide as a shell would, and shows them: in this process, so that torch is imported once."""

import contextlib
import io
import os
import shlex
import sys
from typing import NamedTuple
from unittest import mock

from lowtide.cli.main import main

os.environ.setdefault("OMP_NUM_THREADS", "1")  # of a tiny model, threads wait more than they compute


class Said(NamedTuple):
    """What a command printed."""

    out: str
    err: str


def lowtide(line: str, *, typed: str = "", status: int = 0) -> Said:
    """Run one command.

    Args:
        line: as it is typed, without the word `lowtide`.
        typed: what the command reads from standard input.
        status: the exit status that it has to end with.

    Raises:
        SystemExit: it ended with another status; says what it printed.
    """
    print(f"$ lowtide {line}", flush=True)
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), mock.patch("sys.stdin", io.StringIO(typed)):
        ended = main(shlex.split(line))
    said = Said(out.getvalue(), err.getvalue())
    if ended != status:
        sys.exit(f"lowtide {line}\nended with status {ended}, not {status}\n{said.out}{said.err}")
    return said
