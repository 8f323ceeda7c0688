"""How much memory the process holds, and how much it may: the allocator's word on CUDA, resident memory on a CPU."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from lowtide.memory.allocators.control_groups import memory_limits

if TYPE_CHECKING:
    import torch

_STATUS = Path("/proc/self/status")
_MEMINFO = Path("/proc/meminfo")


def resident_bytes() -> int:
    """The process's resident memory now, in bytes (its peak where the system does not say)."""
    return _status("VmRSS") or peak_resident_bytes()


def peak_resident_bytes() -> int:
    """The most resident memory that the process has had, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return _status("VmHWM") or peak * (1 if sys.platform == "darwin" else 1024)


def system_memory_bytes() -> int:
    """The machine's memory, or less where a control group of the process (a container's) has a limit; in bytes."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([machine, *(limit.most for limit in memory_limits())])


def unused_bytes() -> int:
    """Host memory that nobody uses, of the process's control groups where these have limits; in bytes."""
    free = [system_memory_bytes() - resident_bytes(), *(limit.most - limit.used for limit in memory_limits())]
    if _MEMINFO.exists():
        lines = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines())
        free.append(int(lines["MemAvailable"].split()[0]) * 1024)
    return min(free)


def peak_bytes(device: torch.device) -> int:
    """The peak of the run: allocated on a CUDA device, resident on a CPU; in bytes."""
    if device.type != "cuda":
        return peak_resident_bytes()
    import torch

    return torch.cuda.max_memory_allocated(device)


def peak_held_bytes(device: torch.device) -> int:
    """The peak of what holds the tensors: reserved by the allocator on CUDA, resident on a CPU; in bytes."""
    if device.type != "cuda":
        return peak_resident_bytes()
    import torch

    return torch.cuda.max_memory_reserved(device)


def bytes_text(count: float) -> str:
    """A number of bytes for people."""
    for unit in ("B", "KiB", "MiB"):
        if abs(count) < 1024:
            return f"{count:,.0f} {unit}" if unit == "B" else f"{count:,.1f} {unit}"
        count /= 1024
    return f"{count:,.2f} GiB"


def _status(field: str) -> int:
    if not _STATUS.exists():
        return 0
    for line in _STATUS.read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    return 0
