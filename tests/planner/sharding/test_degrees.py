"""The ways to spread a run, and the options that say each of them in a run file."""

from __future__ import annotations

import pytest
import yaml

from lowtide import SFTConfig
from lowtide.cli.training.run_file import read_run_file
from lowtide.option_values import options_of as options_of_class
from lowtide.planner.cluster import Cluster
from lowtide.planner.sharding.degrees import options_of, sharding_name, shardings_over
from lowtide.ranks.sharding import Sharding
from lowtide.run.options.sharding import sharding_said

OPTIONS = options_of_class(SFTConfig)
CLUSTERS = [("8xH100", 1), ("8xH100", 4), ("2xL4", 1), ("4xA100-80GB", 6), ("8xH100", 128)]


@pytest.mark.parametrize(("devices", "nodes"), CLUSTERS)
def test_a_run_file_is_read_back_as_the_way_that_it_says(devices, nodes, tmp_path):
    cluster = Cluster.of(devices, nodes)
    ways = shardings_over(cluster, heads=32)
    for way in ways:
        path = tmp_path / "run.yaml"
        path.write_text(yaml.safe_dump(options_of(way)))
        values = read_run_file(path, OPTIONS)
        assert sharding_said(values, cluster.devices) == way
    assert len({sharding_name(way) for way in ways}) == len(ways)


def test_whole_copies_come_first():
    ways = shardings_over(Cluster.of("8xH100", 4), heads=32)
    assert [way.kind for way in ways[:3]] == ["ddp", "fsdp2", "fsdp2"]
    assert [way.nodes for way in ways if way.hybrid and way.same_rows == 1] == [4, 2]
    degrees = [way.sequence_parallel for way in ways]
    assert {1, 2, 4, 8} == set(degrees)
    assert all(8 % way.tensor_parallel == 0 for way in ways)


def test_sequences_are_split_over_what_divides_devices_and_fills_up_few_heads():
    assert {way.sequence_parallel for way in shardings_over(Cluster.of("8xH100"), heads=14)} == {1, 2, 4, 8}
    assert {way.tensor_parallel for way in shardings_over(Cluster.of("8xH100"), heads=14)} == {1, 2}
    assert {way.sequence_parallel for way in shardings_over(Cluster.of("8xH100"), heads=9)} == {1, 2}
    assert {way.sequence_parallel for way in shardings_over(Cluster.of("6xH100"), heads=32)} == {1, 2}


def test_one_device_has_one_way():
    assert shardings_over(Cluster.of("1xH100"), heads=32) == [Sharding()]
    assert options_of(Sharding()) == {}
