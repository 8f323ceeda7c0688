"""Devices that a run may be planned for: how much memory they have, how fast they compute, read and send.

Of a GPU that is not there the manufacturer's data sheet speaks; of the machine at hand (`cpu`, `cuda`) the system does,
and what it computes and copies in a second is measured when somebody asks. torch is imported for these alone: a
mistyped name is told before.
"""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from lowtide.memory.allocators.measure import system_memory_bytes
from lowtide.spelling import nearest

GIB = 1 << 30
MIB = 1 << 20
TERA, GIGA = 1e12, 1e9
CONTEXT_BYTES = {7: 128 * MIB, 8: 512 * MIB, 9: 512 * MIB, 10: 640 * MIB, 12: 640 * MIB}
"""What a process holds on a GPU beside what torch's allocator has, by major compute capability: the context and the
kernels that were loaded. From the figures of torch's own messages in public reports of exhausted memory ("this process
has ... in use" less "allocated" and "reserved"): 0.1 GiB on a T4, 0.46 to 0.49 on a 4090 and an L40, 0.58 to 0.6 on a
5090. An assumption for the others; libraries for several GPUs (NCCL) come on top."""
CUBLAS_WORKSPACE = {9: 32 * MIB, 10: 32 * MIB, 12: 32 * MIB}
CUBLAS_WORKSPACE_BEFORE = (2 * 4096 + 8 * 16) << 10
"""What cuBLAS gets from torch's allocator for each handle, by major compute capability: `parseChosenWorkspaceSize` of
`aten/src/ATen/cuda/CublasHandlePool.cpp`."""
CUBLAS_HANDLES = 2
"""A thread has its own handle: one computes forward, autograd's own computes backward."""
MEASURED_SECONDS = 0.06
"""How long a rate is measured for."""
ADDITIONS = 1000
"""That are timed together."""
HOST_MEMORY = 256 * GIB
"""Host memory for each GPU of a machine: 2 TB for 8, as a DGX H100 has; assumed for all."""
NETWORK = 100 / 8 / 8 * GIGA
"""Bytes a second to other machines for each GPU, where a data sheet does not say it: a link of 100 Gbit/s for 8;
assumed."""
DISPATCH_SECONDS = 36e-6
"""What a GPU's host takes for an operation of a training step, with Python, autograd and the dispatcher: of five runs
on the virtual machine of an H200 four are within 11% with it, one 22% too slow. Other hosts take less or more."""
DISPATCH_TIMES = 6.5
"""So many times as long as one addition in place: 6 on that machine (36 for 6 us), 6.5 to 7.9 on an Intel Xeon, for
four kinds of layers."""
DISK = 1 * GIGA
"""Bytes a second of a disk, to which a run on a CPU offloads, and of a network: assumed, not measured."""


@dataclass(frozen=True)
class Rates:
    """What a device does in a second."""

    flops: Mapping[str, float]
    """Of a large matrix product, by the dtype of its factors (`float32`, `bfloat16`, `float16`); float32 without TF32,
    as is torch's default."""
    memory_bandwidth: float
    """Bytes read or written."""
    host_link: float
    """Bytes to or from host memory (a disk where the device is a CPU)."""
    interconnect: float
    """Bytes to the other devices of the machine, in one direction."""
    network: float = NETWORK
    """Bytes to devices of other machines, in one direction, while all of a machine's devices send."""
    dispatch: float = DISPATCH_SECONDS
    """Seconds of the host for an operation. A GPU computes meanwhile, a CPU does not."""
    measured: bool = False
    """Whether they were reached, rather than promised by a data sheet."""


@dataclass(frozen=True)
class Device:
    """Where a run is planned to be."""

    name: str
    kind: str
    """Of a torch device: `cpu` or `cuda`."""
    memory_bytes: int
    """All that torch says there is."""
    capability: tuple[int, int] | None = None
    """Compute capability of a CUDA device."""
    sheet: Rates | None = None
    """What its data sheet says; None for a device at hand."""
    timed: Rates | None = None
    """What a device at hand was measured to do, where it is told to another process."""
    listed: bool = False
    """Whether it is a row of `DEVICES`, and not at hand."""
    also: tuple[str, ...] = ()
    """Other names that people have for it."""

    @property
    def rates(self) -> Rates:
        """What it does in a second, as far as a data sheet says; else what this machine reaches, which the first call
        measures for a fifth of a second."""
        return self.sheet or self.timed or measured_rates(self.kind)

    def with_rates(self) -> Device:
        """The device with its rates, which another process then need not measure."""
        return self if self.sheet else replace(self, timed=self.rates)

    @property
    def has_bf16(self) -> bool:
        """Whether it is a GPU that computes in bfloat16."""
        return (self.capability or (0, 0)) >= (8, 0)

    @property
    def context_bytes(self) -> int:
        """What a process holds there beside what the allocator has; see `CONTEXT_BYTES`."""
        return 0 if self.capability is None else CONTEXT_BYTES.get(self.capability[0], max(CONTEXT_BYTES.values()))

    @property
    def workspaces(self) -> tuple[int, ...]:
        """Bytes of each block that libraries take from the allocator, and keep from the first product on."""
        if self.capability is None:
            return ()
        return (CUBLAS_WORKSPACE.get(self.capability[0], CUBLAS_WORKSPACE_BEFORE),) * CUBLAS_HANDLES

    @property
    def available_bytes(self) -> int:
        """What the allocator can reserve."""
        return self.memory_bytes - self.context_bytes


def _gpu(
    name: str,
    capability: tuple[int, int],
    gib: float,
    half: float,
    single: float,
    memory: float,
    *links: float,
    also: tuple[str, ...] = (),
) -> Device:
    """A row of a data sheet: TFLOPS of dense 16-bit products summed in float32, and of float32; GB/s of its memory, to
    the host, to the other devices, to other machines. Devices without links of their own send through the host's."""
    flops = {"float16": half * TERA, "bfloat16": half * TERA, "float32": single * TERA}
    if capability < (8, 0):  # no tensor cores for it: torch computes in float32
        flops["bfloat16"] = flops["float32"]
    host, *own = (GIGA * each for each in links)
    between, network = [*own, *[host, NETWORK][len(own) :]]
    rates = Rates(flops, memory * GIGA, host, between, network)
    return Device(name, "cuda", int(gib * GIB), capability, rates, listed=True, also=also)


def _host(name: str, gib: float, *also: str) -> Device:
    """A machine whose CPU computes, with so much memory."""
    return Device(name, "cpu", int(gib * GIB), listed=True, also=also)


DEVICES: dict[str, Device] = {
    device.name: device
    for device in (
        _gpu("B200-180GB", (10, 0), 178.3, 2250, 75, 8000, 64, 900, 50),
        _gpu("RTX-PRO-6000-96GB", (12, 0), 94.9, 503.8, 126, 1792, 64, also=("rtx pro 6000 blackwell",)),
        _gpu("H200-141GB", (9, 0), 139.8, 989, 67, 4800, 64, 450, 50),
        _gpu("H100-80GB", (9, 0), 79.1, 989, 67, 3350, 64, 450, 50),
        _gpu("H100-PCIe-80GB", (9, 0), 79.1, 756, 51, 2000, 64),
        _gpu("A100-80GB", (8, 0), 79.1, 312, 19.5, 2039, 32, 300, 25),
        _gpu("A100-PCIe-80GB", (8, 0), 79.1, 312, 19.5, 1935, 32),
        _gpu("A100-40GB", (8, 0), 39.4, 312, 19.5, 1555, 32, 300, 25),
        _gpu("L40S-48GB", (8, 9), 44.4, 362, 91.6, 864, 32),
        _gpu("L40-48GB", (8, 9), 44.4, 181, 90.5, 864, 32),
        _gpu("L4-24GB", (8, 9), 22.0, 121, 30.3, 300, 32),
        _gpu("A10-24GB", (8, 6), 22.0, 125, 31.2, 600, 32),
        _gpu("A10G-24GB", (8, 6), 22.0, 70, 35, 600, 32),
        _gpu("T4-16GB", (7, 5), 14.6, 65, 8.1, 320, 16),
        _gpu("V100-32GB", (7, 0), 31.7, 125, 15.7, 900, 16, 150),
        _gpu("V100-16GB", (7, 0), 15.7, 125, 15.7, 900, 16, 150),
        _gpu("RTX-5090", (12, 0), 31.3, 209.5, 104.8, 1792, 64),
        _gpu("RTX-4090", (8, 9), 23.6, 165.2, 82.6, 1008, 32),
        _gpu("RTX-3090", (8, 6), 23.6, 71, 35.6, 936, 32),
        _gpu("RTX-6000-Ada", (8, 9), 47.5, 364.2, 91.1, 960, 32),
        _gpu("RTX-A6000", (8, 6), 47.5, 154.8, 38.7, 768, 32),
        *(_host(f"CPU-{gib}GB", gib) for gib in (16, 32, 64, 128, 256, 512)),
        *(_host(f"Apple-{gib}GB", gib, f"mac {gib} gb") for gib in (16, 24, 36, 48, 64, 96, 128, 192)),
    )
}
"""By name. Rates are NVIDIA's: the data sheets of B200 (HGX), H200, H100, A100, L40S, L40, L4, A10, A10G, T4, V100, RTX
6000 Ada and RTX A6000, and the architecture papers "Ampere GA102", "Ada" and "RTX Blackwell" for the GeForce cards;
PCIe and NVLink in one direction. To other machines the boards of B200, H200, H100 and A100 have a network card for each
GPU, as in NVIDIA's DGX. Memory is what torch reports as a card's total, which is some percent below its name. Machines
whose CPU computes have no rates: they are taken to be as fast as this one. Apple's share their memory between CPU and
GPU, and are planned for as a CPU, since what Metal's allocator keeps beside tensors is not modelled."""
CALLED = {
    *("nvidia", "geforce", "tesla", "generation", "workstation", "server", "edition"),
    *("sxm", "sxm2", "sxm4", "sxm5", "hbm2", "hbm2e", "hbm3", "hbm3e"),
}
"""Words in the names that drivers give GPUs, which change nothing here. A Quadro RTX 6000 is none of `DEVICES`."""


def device_named(text: str) -> Device:
    """The device of a name, in any case and with spaces or underscores for hyphens.

    Args:
        text: `cpu` or `cuda` for those at hand, or a name of `DEVICES`, of which words may be left out where it is
            unambiguous ("L4", "h200", "4090", "A6000", "NVIDIA RTX 4090", "a100 40"); "H100" is the H100-80GB.

    Raises:
        ValueError: nobody knows the name; several devices are meant; there is no GPU here.
    """
    words = _words(text)
    name = "-".join(words)
    if name == "cpu":
        return Device("cpu", "cpu", system_memory_bytes())
    if name == "cuda":
        return _present_gpu()
    begun = [each for each in DEVICES if f"{each}-".lower().startswith(f"{name}-")]
    begun = begun or [each.name for each in DEVICES.values() if any(_within(words, of) for of in _names(each))]
    if len(plain := [each for each in begun if each.count("-") == name.count("-") + 1]) == 1:
        begun = plain  # "H100" is the one of a server board, and no H100-PCIe
    if len(begun) == 1:
        return DEVICES[begun[0]]
    if begun:
        raise ValueError(f"device {text!r} may be any of {', '.join(begun)}: give one of these names")
    similar = nearest(name.upper(), DEVICES)
    raise ValueError(f"unknown device {text!r}{similar or ': choose cpu, cuda or one of ' + ', '.join(DEVICES)}")


def _words(text: str) -> list[str]:
    """Of a name: "RTX4090" as "rtx 4090", "80 G" as "80gb", and "A100 80GB PCIe" as "a100 pcie 80gb"."""
    spaced = re.sub(r"\b(rtx|gtx)(?=[0-9])", r"\1 ", text.lower().replace("_", " ").replace("-", " "))
    spaced = re.sub(r"\b([0-9]+) ?(?:gib|gb|g)\b", r"\1gb", spaced)
    words = [word for word in spaced.split() if word not in CALLED]
    return [words[0], "pcie", *(word for word in words[1:] if word != "pcie")] if "pcie" in words[1:] else words


def _names(device: Device) -> list[list[str]]:
    return [_words(each) for each in (device.name, *device.also)]


def _within(words: list[str], name: list[str]) -> bool:
    """Whether some words are all of a name, or neighbours in it; a number behind another word may be of gigabytes."""
    if len(words) > 1 and words[-1].isdecimal() and _within([*words[:-1], f"{words[-1]}gb"], name):
        return True
    return bool(words) and any(name[start : start + len(words)] == words for start in range(len(name)))


def _present_gpu() -> Device:
    import torch

    if not torch.cuda.is_available():
        raise ValueError(
            "device 'cuda' is the GPU of this machine, and torch finds none: name the one that is meant, "
            "such as 'H100-80GB', or plan for 'cpu'"
        )
    found = torch.cuda.get_device_properties(torch.cuda.current_device())
    return Device(found.name, "cuda", found.total_memory, (found.major, found.minor))


# -- measuring ----------------------------------------------------------------------------------------------------


@functools.cache
def measured_rates(kind: str) -> Rates:
    """What the device at hand reaches, with the threads that torch has now; measured once a process.

    Args:
        kind: `cpu` or `cuda`.
    """
    import torch

    side, count = (512, 1 << 24) if kind == "cpu" else (4096, 1 << 28)
    flops = {}
    for dtype in ("float32", "bfloat16"):
        factor = torch.ones(side, side, dtype=getattr(torch, dtype), device=kind)
        flops[dtype] = 2 * side**3 / _seconds(functools.partial(torch.mm, factor, factor), kind)
    flops["float16"] = flops["bfloat16"]
    source = torch.ones(count, dtype=torch.uint8, device=kind)
    target = torch.empty_like(source)
    memory = 2 * count / _seconds(lambda: target.copy_(source), kind)
    one = torch.zeros(1)
    dispatch = DISPATCH_TIMES * _seconds(lambda: [one.add_(1) for _ in range(ADDITIONS)], "cpu") / ADDITIONS
    if kind == "cpu":
        return Rates(flops, memory, DISK, DISK, dispatch=dispatch, measured=True)
    host = torch.empty(count, dtype=torch.uint8, pin_memory=True)
    link = count / _seconds(lambda: host.copy_(source, non_blocking=True), kind)
    return Rates(flops, memory, link, link, dispatch=dispatch, measured=True)


def _seconds(run: Callable[[], object], kind: str) -> float:
    """The time of the fastest call, of as many as fit `MEASURED_SECONDS`: whatever else runs here slows some down."""
    import torch

    wait = torch.cuda.synchronize if kind == "cuda" else lambda: None
    run()
    wait()
    times: list[float] = []
    while sum(times) < MEASURED_SECONDS:
        start = time.perf_counter()
        run()
        wait()
        times.append(time.perf_counter() - start)
    return min(times)
