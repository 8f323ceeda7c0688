"""Loggers that say less for a while."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator


@contextlib.contextmanager
def only_from(level: int, name: str) -> Iterator[None]:
    """While it lasts, a logger says nothing below a level; then it has its own again.

    Args:
        level: as `logging.ERROR`.
        name: of the logger.
    """
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.setLevel(before)
