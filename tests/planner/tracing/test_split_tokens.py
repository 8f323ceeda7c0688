"""The trace of a rank that computes a slice of the tokens: what it holds, and what it sends."""

from __future__ import annotations

from typing import Any

import pytest
from datasets import Dataset
from transformers import LlamaConfig

from lowtide.methods import METHODS
from lowtide.planner.answers.row_lengths import rows_of
from lowtide.planner.candidate import PlannedRun
from lowtide.planner.devices import device_named
from lowtide.planner.estimate import RankTrace
from lowtide.planner.tracing.fake_run import FakeRun
from lowtide.ranks.sharding import Sharding
from lowtide.run.options.configs import method_named
from tests.support.marks import slow_but

LAYERS, HEADS, KV_HEADS, DIM, TOKENS = 6, 8, 4, 16, 4096
MODEL = LlamaConfig(
    vocab_size=256, hidden_size=HEADS * DIM, intermediate_size=256, num_hidden_layers=LAYERS,
    num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, max_position_embeddings=TOKENS,
)  # fmt: skip


def run(method: str = "sft", **options: Any) -> FakeRun:
    layers = {"fused_layers": False}  # as those of ranks that split rows
    given = {"per_device_train_batch_size": 1, "bf16": False, **layers, **options}
    planned = PlannedRun(method_named(method), MODEL, given, device_named("H100"))
    lengths = [TOKENS] if method == "sft" else [(TOKENS // 2, TOKENS // 4, TOKENS // 4)]
    return planned.faked(Dataset.from_list(rows_of(lengths)), {})


@pytest.mark.parametrize(
    ("ranks", "heads", "kv_heads"), slow_but([(2, 8, 4)], [(2, 8, 4), (3, 9, 9), (4, 8, 4), (8, 8, 8)])
)
def test_heads_are_sent_as_often_as_they_are_exchanged(ranks, heads, kv_heads):
    """In forward, in the forward of checkpointing, in backward; heads that do not divide are repeated or filled up."""
    for checkpointing, times in ((False, 2), (True, 3)):
        traced = run(gradient_checkpointing=checkpointing).split(ranks).traced(device_named("H100"))
        one = TOKENS // ranks * (2 * heads + 2 * kv_heads) * DIM * 4 * (ranks - 1) // ranks
        assert traced.sent_bytes == pytest.approx(times * LAYERS * one, rel=0.03)  # and the scores, which are few


@pytest.mark.slow
def test_a_rank_holds_its_slice_and_what_it_exchanges():
    ways = [Sharding(kind="ddp", devices=4, sequence_parallel=ranks) for ranks in (1, 4)]
    device = device_named("H100")
    whole, split = (RankTrace.of(run(gradient_checkpointing=False), device, way).one_device for way in ways)
    assert whole.sent == 0
    assert split.sent > 0
    assert whole.saved_per_layer / 4 <= split.saved_per_layer < whole.saved_per_layer / 3
    kept = split.phases["forward"]["activations"] / whole.phases["forward"]["activations"]
    assert 1 / 4 <= kept < 1 / 3


@pytest.mark.slow
def test_what_layers_compute_is_shared_out():
    device = device_named("H100")
    one, four = (run().split(ranks).traced(device) for ranks in (1, 4))
    assert four.tokens == one.tokens == TOKENS
    assert four.costs["layers"].flops == pytest.approx(one.costs["layers"].flops / 4, rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("method", [name for name in ("sft", "dpo") if name in METHODS])
def test_pairs_are_split_too(method):
    assert run(method).split(2).traced(device_named("H100")).sent_bytes > 0
