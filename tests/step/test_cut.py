"""Micro-batches are views of a batch that is laid out once, and equal those that are selected one by one."""

from __future__ import annotations

import random
from dataclasses import fields

import pytest
import torch

from lowtide.compat.torch import TorchDispatchMode
from lowtide.ragged import RaggedBatch
from lowtide.step.cut import cut, idle_part, split
from lowtide.step_plan import LEAST, Limits, cut_rows


def pairs(count: int, least: int = 3, most: int = 60, seed: int = 0) -> RaggedBatch:
    """Rows of a prompt and two completions, with values of rows and of scores."""
    draw = random.Random(seed)
    tokens, prefix, row = [], [], []
    for number in range(count):
        prefix += [-1, len(tokens), len(tokens)]
        row += [number] * 3
        tokens += [[draw.randrange(99) for _ in range(draw.randint(least, most))] for _ in range(3)]
    scores = RaggedBatch.from_segments(tokens, prefix=prefix, row=row).scores
    values = {"row_values": {"margin": torch.rand(count)}, "score_values": {"old": torch.rand(scores, 2)}}
    return RaggedBatch.from_segments(tokens, prefix=prefix, row=row, **values)


def rows(count: int, least: int = 3, most: int = 60, seed: int = 0) -> RaggedBatch:
    draw = random.Random(seed)
    return RaggedBatch.from_segments(
        [[draw.randrange(99) for _ in range(draw.randint(least, most))] for _ in range(count)]
    )


def assert_equal(ours: RaggedBatch, theirs: RaggedBatch) -> None:
    for each in fields(ours):
        mine, other = getattr(ours, each.name), getattr(theirs, each.name)
        if isinstance(mine, torch.Tensor):
            assert mine.dtype == other.dtype
            assert torch.equal(mine, other), each.name
        elif isinstance(mine, dict):
            assert mine.keys() == other.keys()
            assert all(torch.equal(mine[name], other[name]) for name in mine)
        else:
            assert mine == other, each.name


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("make", [rows, pairs])
def test_micro_batches_equal_selected_rows(make, seed):
    batch = make(1 + seed % 9, seed=seed)
    limits = Limits((None, 1, 2)[seed % 3], (None, 200, 20)[seed % 3])
    plan = cut_rows(batch.segments, limits)
    for part, planned in zip(cut(batch, plan), plan, strict=True):
        assert_equal(part.batch, batch.select_rows(planned.rows))
        assert len(part.pieces) == planned.forwards


def test_positions_on_axes_go_along():
    batch = rows(7)
    axes = torch.arange(3 * batch.tokens).view(3, -1)
    batch = type(batch)(**{each.name: getattr(batch, each.name) for each in fields(batch)} | {"axis_positions": axes})
    plan = cut_rows(batch.segments, Limits(rows=2))
    for part, planned in zip(cut(batch, plan), plan, strict=True):
        assert_equal(part.batch, batch.select_rows(planned.rows))


class Operations(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("make", [rows, pairs])
def test_a_batch_is_laid_out_with_few_operations(make):
    batch = make(256, 30, 300)
    with Operations() as operations:
        parts = split(batch, Limits(tokens=8192))
    assert len(parts) > 4
    assert operations.count < 30 + 10 * len(parts)


def test_an_empty_micro_batch_is_short_however_long_the_rows_are():
    def tokens(*lengths: int, most: int | None) -> int:
        part = idle_part(RaggedBatch.from_segments([[1] * length for length in lengths]), most)
        assert part.batch.scores == 0
        return part.batch.tokens

    assert tokens(50, 40, most=16) == LEAST
    assert tokens(50, 4, most=16) == 4
    assert tokens(50, 40, most=None) == 40
