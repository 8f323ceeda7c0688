"""A memory budget in words: `24GiB`, `24GB`, `24g`, `auto`, or a number of bytes."""

from __future__ import annotations

import math
import re
from typing import NamedTuple

from lowtide.memory.allocators.measure import bytes_text, resident_bytes, unused_bytes
from lowtide.option_values import shown
from lowtide.planner.devices import Device

UNITS = {
    unit + suffix: factor
    for suffixes, base in ((("", "ib"), 1024), (("b",), 1000))
    for power, unit in enumerate("kmgt", start=1)
    for suffix, factor in ((each, base**power) for each in suffixes)
} | {"": 1, "b": 1}
"""Bytes of a unit; one letter is the binary one."""
AUTO = "auto"


class Budget(NamedTuple):
    """A budget as a device can keep it."""

    bytes: int
    notes: tuple[str, ...] = ()
    """What there is to say of it."""


def read_budget(budget: str | int | float | None, device: Device) -> Budget:
    """A budget; one above the memory of its device is as much as that has.

    Args:
        budget: a number with a unit, or bytes; `auto`, or None, for what the device has free now.
        device: that it is of.

    Raises:
        ValueError: it is none of these.
    """
    if budget is None or is_auto(budget):
        return Budget(free_bytes(device))
    count = bytes_of(budget)
    if count <= device.memory_bytes:
        return Budget(count)
    has = bytes_text(device.memory_bytes)
    return Budget(device.memory_bytes, (f"the budget of {budget} is more than {device.name} has: {has} is used",))


AMOUNT = re.compile(r"((?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9][0-9_]*)(?:\.[0-9]+)?|\.[0-9]+)\s*([a-z]*)")
"""A number and its unit. A comma stands between thousands alone: `1,5` may be meant as one and a half."""


def is_auto(budget: object) -> bool:
    """Whether a budget is the word for what the device has free."""
    return isinstance(budget, str) and budget.strip().lower() == AUTO


def bytes_of(budget: str | int | float) -> int:
    """The bytes of a number with a unit, or of a number of bytes.

    Raises:
        ValueError: it is none of these, or 0.
    """
    match = AMOUNT.fullmatch(str(budget).strip().lower())
    if match is None or match[2] not in UNITS or isinstance(budget, bool):
        raise ValueError(
            f"memory budget {budget!r} is no amount of memory: write '24GiB', '24GB', a number of bytes, or '{AUTO}' "
            "for what the device has free"
        )
    count = float(match[1].replace("_", "").replace(",", "")) * UNITS[match[2]]
    if not 1 <= count < math.inf:
        raise ValueError(f"memory budget {shown(budget)} must be above 0 and finite")
    return int(count)


def free_bytes(device: Device) -> int:
    """What a run may take of a device: all of one that is not here, else what is free, with what this process has."""
    if device.listed:
        return device.memory_bytes
    if device.kind == "cuda":
        import torch

        return torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()
    return min(device.memory_bytes, unused_bytes() + resident_bytes())
