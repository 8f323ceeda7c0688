"""The bytes on each link, and the time of a step that they leave."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch

from lowtide.planner.cluster import Cluster
from lowtide.planner.devices import Device, Rates
from lowtide.planner.sharding.layout import Layout, Parameter
from lowtide.planner.sharding.moment import OneDevice
from lowtide.planner.sharding.step_time import HOST_STEP_BYTES, HOST_STEP_RATE, RING_SECONDS, step_time
from lowtide.planner.sharding.traffic import Traffic, traffic_of
from lowtide.planner.speed import KERNEL_SECONDS, Operation, OperationCosts
from lowtide.planner.tracing.fake_run import TracedRun
from lowtide.ranks.sharding import Sharding

LAYERS, NUMEL = 4, 1 << 20
SIZE = LAYERS * NUMEL * 4
LAYOUT = Layout(
    tuple(Parameter(f"layers.{n}.weight", (NUMEL,), 4, True, f"layers.{n}") for n in range(LAYERS)), hidden_size=16
)
RATES = Rates({"float32": 1e12}, 1e15, 1e9, 1e9, network=1e8, measured=True)
DEVICE = Device("made up", "cuda", 1 << 40, (9, 0), sheet=RATES)
ONE = OneDevice(phases={}, tokens=1024, micro_batches=1)


def computing(seconds: float) -> TracedRun:
    """A step of one micro-batch that computes for so long."""
    operation = Operation(int(seconds * 1e12), 0, torch.float32)
    costs = {"layers": OperationCosts({0: Counter({operation: 1})})}
    costs |= {name: OperationCosts({0: Counter()}) for name in ("head", "optimizer")}
    return TracedRun([], costs, tokens=1024, micro_batches=1)


def test_what_crosses_between_machines():
    shards = Sharding(kind="fsdp2", devices=8)
    whole = traffic_of(LAYOUT, ONE, shards, 2)
    assert whole.between_nodes == whole.per_rank == 3 * SIZE * 7 / 8
    assert traffic_of(LAYOUT, ONE, shards, 1).between_nodes == 0
    copies = traffic_of(LAYOUT, ONE, replace(shards, hybrid=True, nodes=2), 2)
    assert copies.between_nodes == SIZE  # a node's four ranks each exchange a quarter, twice, halved by the ring
    pairs = traffic_of(LAYOUT, ONE, replace(shards, hybrid=True, nodes=2), 4)  # a copy is over two machines
    assert pairs.between_nodes == 3 * SIZE * 3 / 4 + 2 * (2 * SIZE / 2 / 4)
    equal = traffic_of(LAYOUT, ONE, Sharding(kind="ddp", devices=8), 2)
    assert equal.between_nodes == 2 * SIZE * 7 / 8


def test_copies_exchange_the_rows_of_an_embedding_that_came():
    vocabulary, wide = 100_000, 16
    table = Parameter("embedding.weight", (vocabulary, wide), 4, True)
    layout = replace(LAYOUT, parameters=(*LAYOUT.parameters, table), embedding=table.name)
    copies = Sharding(kind="ddp", devices=8)
    few = traffic_of(layout, replace(ONE, micro_batches=2), copies)
    assert few.per_rank == 2 * (SIZE + 8 * 2 * 1024 * wide * 4) * 7 / 8
    whole = 2 * (SIZE + vocabulary * wide * 4) * 7 / 8
    assert traffic_of(layout, replace(ONE, micro_batches=8), copies).per_rank == whole
    assert traffic_of(replace(layout, tied=True), ONE, copies).per_rank == whole


def test_ranks_wait_for_what_splits_a_sequence():
    split = Sharding(kind="ddp", devices=8, sequence_parallel=4)
    found = traffic_of(LAYOUT, replace(ONE, sent=1000, micro_batches=3), split)
    assert found.waited_for == 3000
    assert found.per_rank == 3000 + 2 * SIZE * 7 / 8


def test_gathering_is_hidden_as_far_as_there_is_something_to_compute():
    traffic = Traffic(per_rank=10**9, between_nodes=0, units=10)
    shards, cluster = Sharding(kind="fsdp2", devices=8), Cluster(DEVICE, 8)
    long, short = (step_time(computing(seconds), LAYOUT, traffic, shards, cluster) for seconds in (5.0, 0.25))
    kernels = KERNEL_SECONDS["cuda"]
    assert (long.sent, long.exposed) == (1.0, pytest.approx(0.1))  # one unit of ten has nothing beside it
    assert short.exposed == pytest.approx(1.0 - 0.25, abs=10 * kernels)
    assert short.seconds == pytest.approx(1.0, abs=10 * kernels)


def test_the_slower_link_counts_and_rings_have_steps():
    traffic = Traffic(per_rank=10**9, between_nodes=8 * 10**9, steps=1000, units=1)
    found = step_time(computing(1.0), LAYOUT, traffic, Sharding(kind="fsdp2", devices=16), Cluster(DEVICE, 8, 2))
    assert found.sent == pytest.approx(10.0 + 1000 * RING_SECONDS)


def test_copies_hide_their_exchange_in_the_last_backward_alone():
    traffic = Traffic(per_rank=10**9, between_nodes=0, units=100)
    found = step_time(computing(0.9), LAYOUT, traffic, Sharding(kind="ddp", devices=8), Cluster(DEVICE, 8))
    assert found.exposed == pytest.approx(1.0 - 0.6, abs=1e-3)


def test_offloaded_shards_are_stepped_on_the_host_and_brought_for_each_gathering():
    shards = Sharding(kind="fsdp2", devices=8, offload_weights=True, offload_optimizer=True)
    found = step_time(computing(1.0), LAYOUT, Traffic(0, 0), shards, Cluster(DEVICE, 8))
    assert found.stepping == pytest.approx(HOST_STEP_BYTES * SIZE / 8 / HOST_STEP_RATE)
    assert found.sent == pytest.approx(3 * SIZE / 8 / 1e9)
