"""Tracing in a process of its own, so that nothing of it can touch a training in this one.

A trace patches modules, sets modes and seeds, and takes some hundred megabytes. What crosses is a description (options,
the model's config, rows), by pickle; what comes back is an estimate, a plan, or the error.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import IO, Any, NamedTuple, ParamSpec, TypeVar

from lowtide.escaping import shown
from lowtide.methods import METHODS
from lowtide.process.deferred_imports import defer_imports
from lowtide.python_process import python_calling

P = ParamSpec("P")
R = TypeVar("R")

ROOM_BYTES = 448 << 20
"""Host memory that a process takes for the traces of a model of some hundred million parameters."""
OF_A_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_", "ACCELERATE_", "FSDP_")
"""How environment variables begin that make a process one of several."""
_here = ContextVar("tracing_here", default=False)


class Reply(NamedTuple):
    """What the process answers."""

    found: Any
    """What the function returned; the exception that it raised."""
    failed: bool
    records: Sequence[tuple[str, int, str]]
    """What lowtide logged: (logger, level, message)."""
    warned: Sequence[str]
    """Messages of warnings."""


@contextlib.contextmanager
def tracing_here() -> Iterator[None]:
    """What is traced within is traced in this process: for one in which nothing else goes on.

    Not where there is a GPU: autograd has threads for it from the first backward on, and a process that has them can
    fork no other which computes.
    """
    import torch

    token = _here.set(not torch.cuda.is_available())
    try:
        yield
    finally:
        _here.reset(token)


def in_tracing_process(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Calls a function of lowtide in a process of its own, and returns what it returns.

    Args:
        function: found by its name; arguments and result can be pickled.

    Raises:
        Exception: what the function raised.
        ValueError: an argument cannot be sent to another process; says which, and what to do.
        RuntimeError: the process ended before it answered; says how, and what it printed last.
    """
    if _here.get():
        return function(*args, **kwargs)
    reply = _asked(function, args, kwargs)
    for name, level, message in reply.records:
        logging.getLogger(name).log(level, message)
    for message in reply.warned:
        warnings.warn(shown(message), stacklevel=2)
    if reply.failed:
        raise reply.found
    return reply.found


def _asked(function: Callable, args: tuple, kwargs: dict[str, Any]) -> Reply:
    command = python_calling(__name__, "serve")
    with tempfile.TemporaryFile() as printed:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=printed, env=_environment()
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            with contextlib.suppress(BrokenPipeError), process.stdin as pipe:
                pickle.dump(METHODS.rows, pipe)
                _send((function, args, kwargs), pipe)
            with process.stdout as pipe:
                return pickle.load(pipe)
        except EOFError:
            raise RuntimeError(_how_it_ended(process.wait(), printed)) from None
        finally:
            process.kill()
            process.wait()


def _send(request: tuple, pipe: IO[bytes]) -> None:
    try:
        pickle.dump(request, pipe, protocol=pickle.HIGHEST_PROTOCOL)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise ValueError(
            f"a run is traced in a process of its own, and what it is made of cannot be sent there: {error}"
        ) from error


def _environment() -> dict[str, str]:
    """This process's, of one process alone, which is not to take up a GPU: tensors without memory lie on the CPU."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(OF_A_LAUNCHER)}
    return kept | {"CUDA_VISIBLE_DEVICES": ""}


def _how_it_ended(status: int, printed: IO[bytes]) -> str:
    printed.seek(0)
    lines = printed.read().decode(errors="replace").strip().splitlines()
    last = f". It printed last: {' / '.join(lines[-3:])}" if lines else ""
    if status >= 0:
        return f"the process that traces the run ended with status {status}{last}"
    how = f"the process that traces the run was ended by {signal.Signals(-status).name}"
    return f"{how}, as a system does that runs out of memory{last}" if -status == signal.SIGKILL else f"{how}{last}"


# -- the other side ---------------------------------------------------------------------------------------------------


def serve() -> None:
    """Answers the one request that comes through standard input."""
    defer_imports()
    asks, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever is printed is no answer
    METHODS.rows = pickle.load(asks)
    with answers:
        answers.write(_pickled(_reply(asks)))


def _reply(asks: IO[bytes]) -> Reply:
    heard = _Heard()
    logging.getLogger("lowtide").addHandler(heard)
    with warnings.catch_warnings(record=True) as warned, tracing_here():
        try:
            function, args, kwargs = _request(asks)
            found, failed = function(*args, **kwargs), False
        except Exception as error:
            found, failed = error, True
    messages = [str(each.message) for each in warned if each.category is UserWarning]
    return Reply(found, failed, heard.records, messages)


def _request(asks: IO[bytes]) -> tuple[Callable, tuple, dict[str, Any]]:
    try:
        return pickle.load(asks)
    except (AttributeError, ImportError) as error:
        raise ValueError(
            f"a run is traced in a process of its own, which does not know part of what it is made of: {error}. What "
            "is defined in the script or the notebook that runs is not there: put it into a module that is imported"
        ) from None


def _pickled(reply: Reply) -> bytes:
    try:
        packed = pickle.dumps(reply)
        pickle.loads(packed)
    except Exception:  # an exception that cannot be made again from its arguments
        packed = pickle.dumps(reply._replace(found=RuntimeError(f"{type(reply.found).__name__}: {reply.found}")))
    return packed


class _Heard(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[tuple[str, int, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append((record.name, record.levelno, record.getMessage()))
