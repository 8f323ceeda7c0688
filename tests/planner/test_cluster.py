"""The devices of a plan, from what people write."""

from __future__ import annotations

import pytest

from lowtide.planner.cluster import Cluster
from lowtide.planner.devices import GIB


@pytest.mark.parametrize("text", ["8xH100", "8 x h100-80gb", "8XH100", "8*H100"])
def test_devices_are_those_of_one_node(text):
    found = Cluster.of(text, nodes=4)
    assert (found.device.name, found.per_node, found.devices) == ("H100-80GB", 8, 32)
    assert found.host_bytes == 8 * 256 * GIB
    assert str(found) == "8 x H100-80GB in each of 4 nodes"
    assert str(found.node()) == "8 x H100-80GB"


def test_the_hosts_memory_may_be_said():
    assert Cluster.of("2xL4", host_bytes=64 * GIB).host_bytes == 64 * GIB


@pytest.mark.parametrize(
    ("text", "nodes", "message"),
    [
        ("8xH1000", 1, "unknown device 'H1000'; did you mean 'H100-80GB'"),
        ("H100", 1, "are no number of GPUs: write '8xH100'"),
        ("8", 1, "are no number of GPUs"),
        ("0xH100", 1, "give at least 1 of both"),
        ("8xH100", 0, "give at least 1 of both"),
        ("8xcpu", 1, "share its memory; plan for '--device cpu'"),
        ("32xH100", 4, "16 at most: for 32 in all, write --devices 8xH100 --nodes 4"),
        ("1024xH100", 1, "for 1024 in all, write --devices 8xH100 --nodes 128"),
        ("30xH100", 4, "30 do not divide by 4 nodes"),
        ("8xV100", 1, "may be any of V100-32GB, V100-16GB"),
    ],
)
def test_bad_words_are_named(text, nodes, message):
    with pytest.raises(ValueError, match=message):
        Cluster.of(text, nodes)
