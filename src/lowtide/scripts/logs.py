"""Quieter logs for command-line scripts."""

from __future__ import annotations

import logging
import warnings
from typing import Any


def init_zero_verbose() -> None:
    """Shows errors alone, by rich, and sends warnings through logging. To be called before other imports."""
    from rich.logging import RichHandler

    logging.basicConfig(format="%(message)s", datefmt="[%X]", handlers=[RichHandler()], level=logging.ERROR)

    def log(message: Any, category: type, filename: str, lineno: int, *_: Any, **__: Any) -> None:
        logging.warning(f"{filename}:{lineno}: {category.__name__}: {message}")

    warnings.showwarning = log
