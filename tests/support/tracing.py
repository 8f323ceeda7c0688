"""Functions that tests call in the process that traces."""

from __future__ import annotations

import logging
import os
import sys
import warnings


class Peculiar(Exception):
    """Cannot be made again from its arguments."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


def warn_and_log(number: int) -> int:
    warnings.warn(f"{number} is odd", stacklevel=1)
    logging.getLogger("lowtide.test").warning("%d squared", number)
    return number**2


def die(by: int) -> None:
    print("before", file=sys.stderr, flush=True)
    os.kill(os.getpid(), by)


def report(_: str) -> None:
    raise Peculiar(1, 2)


def answer(text: str) -> str:
    print(text, flush=True)
    os.write(1, text.encode())
    return "answered"
