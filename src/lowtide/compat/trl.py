"""What the benchmarks take from the inside of TRL; lowtide itself never imports it."""

from __future__ import annotations

from typing import Any


def packed_block(table: Any, capacity: int, strategy: str) -> Any:
    """Packs one block of rows as `trl.pack_dataset` does, without what `Dataset.map` adds to the time.

    Args:
        table: of pyarrow, with lists in its columns.
        capacity: tokens of a bin.
        strategy: "bfd", "bfd_split" or "wrapped".
    """
    from trl import data_utils

    if strategy == "wrapped":
        return data_utils._pack_wrapped(table, capacity)
    return data_utils._pack_bfd(table, capacity, "split" if strategy == "bfd_split" else "truncate")
