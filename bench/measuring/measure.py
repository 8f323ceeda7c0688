"""What the machine does: peak memory above a starting point, time per step, and the rate of a bare matmul."""

import gc
import platform
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

GIGABYTE = 1e9


class PeakMeter:
    """The peak of the memory held since `start`, and what was held then; in bytes.

    On a CPU this is the process's resident memory, by the kernel's own high-water mark where it can be reset, else
    by sampling; on CUDA it is what torch's allocator has handed out.
    """

    def __init__(self, device: str):
        self.device = device
        self.sampler: _Sampler | None = None

    def start(self) -> None:
        gc.collect()
        if self.device == "cuda":
            import torch

            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            self.start_bytes = torch.cuda.memory_allocated()
            return
        if not reset_high_water_mark():
            self.sampler = _Sampler()
        self.start_bytes = resident_bytes("VmRSS")

    def stop(self) -> dict[str, int]:
        """Returns `start_bytes`, `peak_bytes` and `above_start_bytes`."""
        report = {"start_bytes": self.start_bytes, "peak_bytes": self._peak()}
        report["above_start_bytes"] = report["peak_bytes"] - self.start_bytes
        if self.device == "cuda":
            import torch

            report["reserved_bytes"] = torch.cuda.max_memory_reserved()
        return report

    def _peak(self) -> int:
        if self.device == "cuda":
            import torch

            return torch.cuda.max_memory_allocated()
        return self.sampler.finish() if self.sampler else resident_bytes("VmHWM")


class _Sampler(threading.Thread):
    """Watches the resident memory every 2 ms, for kernels that do not let a process reset its high-water mark."""

    def __init__(self):
        super().__init__(daemon=True)
        self.peak, self.running = 0, True
        self.start()

    def run(self) -> None:
        while self.running:
            self.peak = max(self.peak, resident_bytes("VmRSS"))
            time.sleep(0.002)

    def finish(self) -> int:
        self.running = False
        self.join()
        return self.peak


def resident_bytes(field: str) -> int:
    """Returns `VmRSS` (held now) or `VmHWM` (the most held) of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"/proc/self/status has no field {field}: resident memory can only be measured on Linux")


class PhasePeaks:
    """The peak of the process's resident memory in each phase, in bytes; a listener of `lowtide.step.phases.Phases`.

    It begins in the phase "loading", for which it takes all that was before it. Where the high-water mark cannot be
    reset, a phase has the peak of all that came before it.
    """

    def __init__(self) -> None:
        self.bytes: dict[str, int] = {}
        self("loading", "")

    def __call__(self, ended: str, begins: str) -> None:
        self.bytes[ended] = max(self.bytes.get(ended, 0), resident_bytes("VmHWM"))
        reset_high_water_mark()


def reset_high_water_mark() -> bool:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return resident_bytes("VmHWM") < 1.01 * resident_bytes("VmRSS") + 2**20


def matmul_rate(device: str, dtype: str, seconds: float = 2.0) -> float:
    """Returns the FLOP/s of the fastest square matrix product seen within `seconds`."""
    import torch

    size = 8192 if device == "cuda" else 2048
    left = torch.randn(size, size, device=device, dtype=getattr(torch, dtype))
    right = torch.randn_like(left)
    best, deadline = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < deadline:
        began = now(device)
        torch.mm(left, right)
        best = min(best, now(device) - began)
    return 2 * size**3 / best


def now(device: str) -> float:
    """Returns the time in seconds, after the device has finished what it was given."""
    if device == "cuda":
        import torch

        torch.cuda.synchronize()
    return time.perf_counter()


def hardware(device: str) -> dict[str, str | int | float]:
    """Returns the names and sizes of what a result depends on."""
    import torch

    facts: dict[str, str | int | float] = {
        "cpu": _cpu_model(),
        "threads": torch.get_num_threads(),
        "memory_gb": round(_total_memory() / GIGABYTE, 1),
        "system": f"{platform.system()} {platform.machine()}",
    }
    if device == "cuda":
        card = torch.cuda.get_device_properties(0)
        facts |= {"gpu": card.name, "gpu_memory_gb": round(card.total_memory / GIGABYTE, 1)}
    return facts


def where_measured(machine: Mapping[str, Any]) -> str:
    """A machine of `hardware` in few words: its GPU, or its CPU without the marks of its maker."""
    if "gpu" in machine:
        return machine["gpu"]
    return machine["cpu"].replace("(R)", "").removesuffix(" Processor")


def _cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")


def _total_memory() -> int:
    return int(Path("/proc/meminfo").read_text().split()[1]) * 1024
