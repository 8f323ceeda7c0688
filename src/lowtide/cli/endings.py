"""With which status a command ends at an error: what the user can mend, another rank's failure, or a bug."""

from __future__ import annotations

import sys

from lowtide.users_functions import is_from_user

DOES_NOT_FIT = 1
NOT_READY = 1
USER_ERROR = 2
RANK_FAILED = 3
INTERRUPTED = 130


class UsageError(ValueError):
    """The command line or a configuration file says something that means nothing."""


def status_of(error: BaseException) -> int | None:
    """The exit status of an error that ends in one message; None for a bug, which ends in its traceback.

    Running out of memory counts as an error that the user can correct, and so does what a function of theirs raised.
    The modules of the error types are looked up, not imported. A module that is not loaded yet cannot have raised an
    error, and importing it could need more memory than is left.
    """
    failures, memory = (
        sys.modules.get("lowtide.ranks.failures"),
        sys.modules.get("lowtide.memory.allocators.out_of_memory"),
    )
    if failures is not None and isinstance(error, failures.RankFailed):
        return RANK_FAILED
    rank_sync = sys.modules.get("lowtide.step.rank_sync")
    if rank_sync is not None and isinstance(error, rank_sync.OutOfMemory):
        return USER_ERROR
    exhausted = memory is not None and memory.is_out_of_memory(error)
    named = ValueError | OSError | MemoryError | RecursionError | FloatingPointError
    return USER_ERROR if exhausted or is_from_user(error) or isinstance(error, named) else None
