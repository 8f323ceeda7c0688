"""Sizes of ZeRO's buffers go by the model where a DeepSpeed config has no number for them; a number stays."""

import pytest

from lowtide.ranks.sharding import Sharding
from lowtide.run.options.deepspeed import sized

WIDTH = 64
BY_WIDTH = {
    "reduce_bucket_size": 4096,
    "stage3_prefetch_bucket_size": 3686,
    "stage3_param_persistence_threshold": 640,
}


def zero_of(**given):
    return {"zero_optimization": {"stage": 3, **given}}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, BY_WIDTH),
        (dict.fromkeys(BY_WIDTH, "auto"), BY_WIDTH),
        ({"reduce_bucket_size": 500_000_000}, BY_WIDTH | {"reduce_bucket_size": 500_000_000}),
        ({"stage3_prefetch_bucket_size": 0}, BY_WIDTH | {"stage3_prefetch_bucket_size": 0}),
        ({"prefetch_bucket_size": "auto"}, BY_WIDTH),
        (
            {"param_persistence_threshold": 7},
            {"param_persistence_threshold": 7, **{k: v for k, v in BY_WIDTH.items() if "persistence" not in k}},
        ),
        ({"sub_group_size": 5, "overlap_comm": True}, BY_WIDTH | {"sub_group_size": 5, "overlap_comm": True}),
    ],
)
def test_engine_and_planner_have_the_same_sizes(given, expected):
    made = sized(zero_of(**given), WIDTH)
    assert made == zero_of(**expected)
    planned = Sharding.read(zero_of(**given), devices=2).resolved(WIDTH)
    assert planned == Sharding.read(made, devices=2)


def test_the_given_config_is_left_as_it_was():
    given = zero_of(reduce_bucket_size="auto")
    sized(given, WIDTH)
    assert given == zero_of(reduce_bucket_size="auto")
