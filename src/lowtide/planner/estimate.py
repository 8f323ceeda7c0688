"""Predicts the peak of a run before any weight is made: the trainer's own step, on tensors without memory.

The step is traced once (`fake_run`), unrolled to the model's depth, and its births and deaths are replayed in the order
of a run through a model of the memory that the run will have: glibc's heap on a CPU, the caching allocator on CUDA. On
top comes what the process holds beside tensors. Spread over devices, formulas take the place of the replay.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from lowtide.memory.allocators import host_heap
from lowtide.memory.allocators.measure import bytes_text
from lowtide.memory.allocators.settings import has_thread_cache
from lowtide.planner.allocators.cuda_allocator import CudaAllocator
from lowtide.planner.allocators.glibc_heap import GlibcHeap
from lowtide.planner.allocators.replay import Allocator, peaks, run_of, start_of
from lowtide.planner.cluster import Cluster
from lowtide.planner.devices import Device
from lowtide.planner.parallel import counting_references
from lowtide.planner.process import process_bytes
from lowtide.planner.sharding.layout import Layout, byte_sum
from lowtide.planner.sharding.moment import OneDevice
from lowtide.planner.sharding.sharded import shard
from lowtide.planner.sharding.step_time import StepTime, step_time
from lowtide.planner.sharding.tensor_parallel import local_layout, one_rank
from lowtide.planner.sharding.traced_step import one_device
from lowtide.planner.tracing.fake_run import FakeRun, TracedRun
from lowtide.planner.tracing.host_memory import host_bytes
from lowtide.planner.tracing.trace import Event
from lowtide.ranks.sharding import Sharding

PACKED = 32 << 20
"""Bytes at most into which a CPU's library packs the head's weight for its products; and into which it converts numbers
of 16 bits, where the CPU has no instructions for them."""
BESIDE_TENSORS = ("cache", "runtime")
"""The categories of an estimate that no tensor is part of."""
WHOLE = ("none", "ddp")
"""Kinds of sharding with which each rank holds all that one device would."""
BANDS = {"cpu": 0.06, "cuda": 0.05}
"""By how much of itself a peak may be wrong."""


@dataclass(frozen=True)
class Estimate:
    """What a run will take on each device, in bytes."""

    peak_bytes: int
    """Of the process: its resident memory on a CPU; on CUDA what it takes of the device, its context included."""
    phase: str
    """In which the peak falls."""
    phases: Mapping[str, Mapping[str, int]]
    """For each phase, the bytes by category when it holds most. "cache" is what the allocator holds and no tensor has,
    "runtime" what the process holds beside it."""
    device: str
    start_bytes: int = 0
    """The peak before the first forward, as `peak_bytes` counts: the model is loaded, and adapters, references and the
    optimizer are made."""
    host_bytes: int = 0
    """What lies in host memory for a device: what is offloaded, and on CUDA the rows of a step, which are copied."""
    tokens_per_second: float | None = None
    """Of one device; None where it is not known."""
    band: float = 0.06
    """By how much of itself the peak may be wrong."""
    notes: tuple[str, ...] = ()
    time: StepTime | None = None
    """Of a step, where several devices share the work."""
    room_bytes: int | None = None
    """What the run may take of each device; None where nobody asked whether it fits."""
    assumptions: tuple[str, ...] = ()
    """What was taken for granted."""
    heaviest_tokens: int | None = None
    """Of the heaviest micro-batch, a long row that is run in pieces whole; None where nobody counted them."""

    @property
    def fits(self) -> bool | None:
        """Whether the peak is within what the run may take; None where nobody said what that is."""
        return None if self.room_bytes is None else self.peak_bytes <= self.room_bytes

    @property
    def spare_bytes(self) -> int | None:
        """What is left beside the peak; below 0 where it does not fit."""
        return None if self.room_bytes is None else self.room_bytes - self.peak_bytes

    @property
    def verdict(self) -> str:
        """Whether it fits, and by how much, in one line."""
        if self.room_bytes is None:
            return f"peak {bytes_text(self.peak_bytes)} on {self.device}"
        return verdict_of(self.peak_bytes, self.room_bytes, self.device, self.band)

    @property
    def tensor_bytes(self) -> int:
        """The most that living tensors hold."""
        return max(
            sum(size for name, size in held.items() if name not in BESIDE_TENSORS) for held in self.phases.values()
        )

    @property
    def reserved_bytes(self) -> int:
        """What CUDA's allocator reserves at most."""
        return self.peak_bytes - self.phases[self.phase].get("runtime", 0)

    def to_dict(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return asdict(self) | {"fits": self.fits, "spare_bytes": self.spare_bytes}

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {bytes_text(size)}" for name, size in self.phases[self.phase].items() if size)
        speed = f"; {self.tokens_per_second:,.0f} tokens/s" if self.tokens_per_second else ""
        return f"peak {bytes_text(self.peak_bytes)} on {self.device}, in {self.phase}: {parts}{speed}"


def verdict_of(peak: int, room: int, device: str, band: float) -> str:
    """Whether a predicted peak fits, and by how much, in one line.

    Args:
        peak: bytes.
        room: bytes that it may take.
        device: of which.
        band: by how much of itself the peak may be wrong.
    """
    of = f"{bytes_text(peak)} of {bytes_text(room)} on {device}"
    if peak > room:
        return f"does not fit: {of}, {bytes_text(peak - room)} too much"
    left = f"{bytes_text(room - peak)} left"
    if peak * (1 + band) > room:
        return f"fits narrowly: {of}, {left}, which is less than the {band:.0%} that an estimate may miss"
    return f"fits: {of}, {left}"


@counting_references()
def estimate_run(
    run: FakeRun, device: Device, *, sharding: Sharding | None = None, beside: int | None = None
) -> Estimate:
    """What a run will take on a device, or on each of several.

    Args:
        run: what is trained, how, on which rows.
        device: where.
        sharding: how it is spread over devices of this kind.
        beside: what a process holds on a CPU beside tensors; by default as it is measured here.

    Raises:
        ValueError: an operation has no form without values, so that the step cannot be traced; names it.
    """
    sharding = sharding or Sharding()
    if device.kind == "cuda":
        beside = device.context_bytes
    elif beside is None:
        beside = process_bytes(run.peft_config is not None, sharding)
    if sharding.devices > 1:
        cluster = Cluster(device, sharding.devices // sharding.nodes, sharding.nodes)
        return RankTrace.of(run, device, sharding).estimate(sharding, cluster, beside)
    traced = run.traced(device)
    events = list(run_of(traced.events, rehearsal=run.rehearsal))
    allocator = partial(allocator_of, run, traced.events, device, device.workspaces)
    phases = peaks(events, allocator())
    at_start = _heap_at_start(run, traced.events) if device.kind == "cpu" else allocator()
    start = peaks(start_of(traced.events), at_start)
    found = _estimate(phases, device, traced.tokens_per_second(device), beside, traced.notes)
    return replace(
        found, start_bytes=_peak(start) + beside, host_bytes=host_bytes(events), heaviest_tokens=traced.tokens
    )


def _peak(phases: Mapping[str, Mapping[str, int]]) -> int:
    return max((sum(held.values()) for held in phases.values()), default=0)


def allocator_of(run: FakeRun, events: Iterable[Event], device: Device, workspaces: Iterable[int]) -> Allocator:
    """That of a device, with blocks of so many bytes as the workspaces of its libraries."""
    allocator: Allocator = CudaAllocator() if device.kind == "cuda" else heap_of(run, events)
    for number, size in enumerate(workspaces):
        allocator.born(("workspace", number), size)
    return allocator


def heap_of(run: FakeRun, events: Iterable[Event]) -> GlibcHeap:
    """A CPU's, with the workspaces of its libraries."""
    heap = _heap_at_start(run, events)
    packed = min(PACKED, 4 * run.method.head.packed_elements(run.described))
    heap.born("workspace", packed + (PACKED if run.has_16_bits else 0))
    return heap


def _heap_at_start(run: FakeRun, events: Iterable[Event]) -> GlibcHeap:
    """A CPU's, as it is set up for a model that is large or not; libraries take their workspaces in the first step."""
    trims = any(event.block is None and not event.born for event in events)
    large = trims and byte_sum(run.layout().parameters) >= host_heap.LARGE
    return GlibcHeap(
        host_heap.MMAP_ABOVE_OF_LARGE if large else host_heap.MMAP_ABOVE,
        host_heap.TRIM_ABOVE,
        near=1 if run.gathers else host_heap.NEAR,  # it is trimmed before the head in any case, where most is held
        thread_cache=has_thread_cache(),
    )


@dataclass(frozen=True)
class RankTrace:
    """What one trace says of all ways to share states between ranks that compute the same: see `estimate`."""

    traced: TracedRun
    one_device: OneDevice
    layout: Layout
    start: int
    """Bytes of a rank that holds all of it, at most, before its first forward."""

    @classmethod
    @counting_references()
    def of(cls, run: FakeRun, device: Device, sharding: Sharding) -> RankTrace:
        """Traces what a rank computes, which goes by how layers and sequences are split.

        Raises:
            ValueError: they cannot be split so, or the step cannot be traced.
        """
        part = run if sharding.tensor_parallel == 1 else _of_split_layers(run, sharding.tensor_parallel)
        part = part.split(sharding.sequence_parallel).gathering(sharding.cuts_weights or sharding.by_deepspeed)
        traced = part.traced(device)
        heap = heap_of(part, traced.events) if device.kind == "cpu" else None
        events = list(run_of(traced.events, rehearsal=run.rehearsal and not sharding.by_deepspeed))
        found = one_device(events, heap, tokens=traced.tokens, micro_batches=traced.micro_batches)
        found = replace(found, sent=traced.sent_bytes, on_host=host_bytes(events))
        if sharding.tensor_parallel > 1 and any("reference" in held for held in found.phases.values()):
            local = local_layout(run.reference_layout(), sharding.tensor_parallel)
            share = byte_sum(local.parameters) / byte_sum(part.reference_layout().parameters)
            found = replace(found, reference_share=share)
        start = peaks(start_of(traced.events), _heap_at_start(part, traced.events) if heap is not None else None)
        # many are kept, and events are large
        return cls(replace(traced, events=()), found, run.layout(), _peak(start))

    def repeated(self, times: float) -> RankTrace:
        """The same with so many times the micro-batches in a step."""
        several = int(self.traced.micro_batches * times)
        traced = replace(self.traced, micro_batches=several)
        return replace(self, traced=traced, one_device=replace(self.one_device, micro_batches=several))

    def estimate(self, sharding: Sharding, cluster: Cluster, beside: int) -> Estimate:
        """Of a rank.

        Args:
            sharding: which splits layers and sequences as the trace does.
            cluster: over what.
            beside: bytes that a process holds beside tensors.
        """
        device = cluster.device
        on_cpu = device.kind == "cpu"
        found = shard(self.layout, self.one_device, _over_gloo(sharding) if on_cpu else sharding, cluster.nodes)
        if on_cpu:  # what is offloaded lies in the same memory
            found = found.with_host_bytes()
        time = step_time(self.traced, self.layout, found.traffic, sharding, cluster)
        tokens = self.traced.tokens * self.traced.micro_batches * sharding.data_ranks
        speed = tokens / time.seconds / sharding.devices
        notes = (*self.traced.notes, *found.notes)
        start = sum(found.phases["loading"].values())
        if sharding.kind in WHOLE:
            start = max(start, self.start)
        estimate = _estimate(found.phases, device, speed, beside, notes)
        return replace(estimate, start_bytes=start + beside, host_bytes=found.host_bytes, time=time)


def _of_split_layers(run: FakeRun, ranks: int) -> FakeRun:
    """A run of models that compute what a rank does of layers that so many split."""
    teacher = run.teacher
    if teacher is not None:
        teacher = replace(teacher, config=one_rank(teacher.config, ranks))
    return run.of(one_rank(run.described, ranks), teacher)


def _over_gloo(sharding: Sharding) -> Sharding:
    """The same on a CPU, where `fully_shard` offloads nothing."""
    offloads = {} if sharding.by_deepspeed else {"offload_weights": False, "offload_optimizer": False}
    return replace(sharding, backend="gloo", **offloads)


def _estimate(
    phases: Mapping[str, Mapping[str, int]],
    device: Device,
    speed: float | None,
    beside: int,
    notes: tuple[str, ...],
) -> Estimate:
    whole = {name: {**held, "runtime": beside} for name, held in phases.items()}
    # An allocator that keeps what it has taken holds as much in all later phases: the peak is where tensors peak.
    phase = max(whole, key=lambda name: sum(whole[name].values()) - whole[name].get("cache", 0))
    beyond = max(sum(held.values()) for held in whole.values()) - sum(whole[phase].values())
    if beyond:
        whole[phase]["cache"] = whole[phase].get("cache", 0) + beyond
    return Estimate(
        peak_bytes=sum(whole[phase].values()),
        phase=phase,
        phases=whole,
        device=device.name,
        tokens_per_second=speed,
        band=BANDS[device.kind],
        notes=notes,
    )
