"""What separates the columns of a CSV file, as its first line tells: spreadsheets write semicolons where a comma is the
decimal sign."""

from __future__ import annotations

import contextlib
import functools
import logging
import re
from pathlib import Path
from typing import Any

from lowtide.data.sources.json_lines import BROKEN, OPENERS

OTHERS = (";", "\t", "|")
MOST_HEADER_BYTES = 1 << 16
_QUOTED = re.compile(r'"[^"]*"')

logger = logging.getLogger(__name__)


def separator_of(path: Path) -> dict[str, Any]:
    """The separator of a CSV file as an option of `datasets`; empty where it is a comma, or the file has one column.

    A first line with a comma outside quotes is separated by commas, whatever else is in it.
    """
    opened: Any = OPENERS.get(path.suffix, functools.partial(Path.open, mode="rb"))
    header = ""
    with contextlib.suppress(*BROKEN), opened(path) as file:  # what is broken is said when it is read
        header = file.readline(MOST_HEADER_BYTES).decode("utf-8", "replace")
    names = _QUOTED.sub("", header).strip("\r\n")
    found = {} if "," in names else {sign: names.count(sign) for sign in OTHERS if sign in names}
    if not found:
        return {}
    sign = max(found, key=lambda each: found[each])
    logger.warning(f"{path}: the first line has no comma, and columns are separated by {sign!r}")
    return {"sep": sign}
