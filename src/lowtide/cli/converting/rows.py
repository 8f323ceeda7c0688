"""The rows of a run as its file names them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

OF_ONE = {"path": "dataset", "name": "dataset_config", "split": "dataset_split", "columns": "columns"}
"""What a single dataset is told by, by the keys of an entry of `datasets`."""


def named_rows(entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The options that name some datasets: those of a single one where it needs no more, else `datasets`."""
    if len(entries) == 1 and entries[0].keys() <= OF_ONE.keys():
        return {option: entries[0][key] for key, option in OF_ONE.items() if key in entries[0]}
    return {"datasets": list(entries)} if entries else {}
