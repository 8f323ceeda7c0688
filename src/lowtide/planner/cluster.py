"""The devices that a run is planned for: `8xH100` in each of so many nodes."""

from __future__ import annotations

import re
from dataclasses import dataclass

from lowtide.planner.devices import HOST_MEMORY, Device, device_named

MOST_IN_A_NODE = 16
"""Devices of one node: more are a slip, since links between nodes are other ones."""


@dataclass(frozen=True)
class Cluster:
    """Nodes with equally many devices of one kind each."""

    device: Device
    per_node: int
    nodes: int = 1
    host_bytes: int = 0
    """Host memory of one node."""

    @property
    def devices(self) -> int:
        """Of the whole run."""
        return self.per_node * self.nodes

    @classmethod
    def of(cls, devices: str, nodes: int = 1, host_bytes: int | None = None) -> Cluster:
        """From what people write.

        Args:
            devices: those of one node, `"8xH100"`.
            nodes: machines with so many each.
            host_bytes: memory of one node's host; by default 256 GiB for each device.

        Raises:
            ValueError: it is no number of GPUs that are known; there are none, or more than a node has.
        """
        match = re.fullmatch(r"\s*([0-9]+)\s*[xX*]\s*(\S.*)", str(devices))
        if match is None:
            raise ValueError(f"devices {devices!r} are no number of GPUs: write '8xH100', those of one node")
        count, device = int(match[1]), device_named(match[2].strip())
        if device.kind != "cuda":
            raise ValueError(f"devices {devices!r}: processes on one CPU share its memory; plan for '--device cpu'")
        if nodes < 1 or count < 1:
            raise ValueError(f"devices {devices!r} in {nodes} nodes are none: give at least 1 of both")
        if count > MOST_IN_A_NODE:
            raise ValueError(
                f"devices {devices!r} are those of one node, which has {MOST_IN_A_NODE} at most"
                + _way(count, match[2], nodes)
            )
        return cls(device.with_rates(), count, nodes, host_bytes or count * HOST_MEMORY)

    def node(self) -> Cluster:
        """One node of it."""
        return Cluster(self.device, self.per_node, 1, self.host_bytes)

    def __str__(self) -> str:
        nodes = f" in each of {self.nodes} nodes" if self.nodes > 1 else ""
        return f"{self.per_node} x {self.device.name}{nodes}"


def _way(count: int, name: str, nodes: int) -> str:
    """What to write for so many of a whole run."""
    each = count // nodes
    if nodes > 1 and count % nodes:
        return f", and {count} do not divide by {nodes} nodes"
    if nodes == 1 or each > MOST_IN_A_NODE:
        each = next(size for size in (8, 4, 2, 1) if count % size == 0)
    return f": for {count} in all, write --devices {each}x{name.strip()} --nodes {count // each}"
