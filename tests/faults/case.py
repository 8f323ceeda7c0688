"""What a fault case is, and how its check starts further processes.

A module of this folder with a function `cases(seed: int) -> Iterable[Case]` is a kind of fault; the first line of its
docstring is what the table prints for it. The names of cases are unique in a kind, and depend on the seed alone, since
each case is looked up by its name in the process that runs it.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

CONTEXT = multiprocessing.get_context("forkserver")
"""Processes are forked from a server that has imported lowtide and computed nothing, so that one starts in
milliseconds."""
FORK = multiprocessing.get_context("fork")
"""From the process of a case, which has computed nothing either, further ones are forked: it has no server."""


@dataclass(frozen=True)
class Case:
    """One fault."""

    name: str
    check: Callable[[Path], object]
    """Called in a process of its own, with an empty folder that is the working directory. Raises, with the reason,
    where lowtide did wrong."""
    seconds: float = 60
    """Time limit. A case that takes longer is wrong: it hangs."""


def started(target: Callable[..., object], *args: Any, output: Path | None = None) -> BaseProcess:
    """A process that calls a function of a module's top level; it can be killed by its `pid`.

    Args:
        output: a file for what it prints, standard output and error together.
    """
    process = FORK.Process(target=_called, args=(target, args, output))
    process.start()
    return process


def _called(target: Callable[..., object], args: tuple, output: Path | None) -> None:
    if output is not None:
        print_to(output)
    target(*args)


def print_to(path: Path) -> None:
    """Sends what this process prints from now on to a file."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
