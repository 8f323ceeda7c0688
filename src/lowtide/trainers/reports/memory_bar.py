"""The bytes of a run as one bar against its device, for a terminal."""

from __future__ import annotations

from collections.abc import Mapping

from rich.text import Text

from lowtide.memory.allocators.measure import bytes_text

SHADES = (("█", "blue"), ("▓", "green"), ("▒", "yellow"), ("░", "magenta"))
"""A character and a colour for each part; they differ without colours too."""
FREE = "·"
WIDTH = 48
"""Of the bar in characters."""


def memory_bar(parts: Mapping[str, int], capacity: int) -> Text:
    """A bar of the parts against a device's memory, and a legend beneath.

    Args:
        parts: bytes by name, at most four; those of 0 are left out.
        capacity: bytes of the device.
    """
    total = sum(parts.values())
    scale = WIDTH / max(capacity, total, 1)
    cells = {name: max(1, round(size * scale)) for name, size in parts.items() if size}
    if cells and (over := sum(cells.values()) - WIDTH) > 0:
        cells[max(cells, key=lambda name: cells[name])] -= over
    bar, legend = Text(), Text()
    for (name, size), (block, colour) in zip(parts.items(), SHADES, strict=False):
        if size:
            bar.append(block * cells[name], colour)
            legend.append(f"{block} ", colour).append(f"{name} {bytes_text(size)}  ")
    bar.append(FREE * (WIDTH - sum(cells.values())), "dim")
    too_much = total > capacity
    share = f" {bytes_text(total)} of {bytes_text(capacity)}{': too much' if too_much else ''}"
    return Text("\n").join([bar.append(share, "bold red" if too_much else ""), legend])
