"""Micro-batches are views of a batch that is laid out once, and equal those that are selected one by one."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import fields

import pytest
import torch

from lowtide.compat.torch import TorchDispatchMode
from lowtide.data.batches.values import LENGTHS
from lowtide.engine.forward import install
from lowtide.methods import METHODS
from lowtide.ragged import RaggedBatch
from lowtide.step.cut import cut, idle_part, split
from lowtide.step.train_step import train_step
from lowtide.step_plan import LEAST, Limits, cut_rows
from tests.support.models.tiny_llama import tiny_llama


def pairs(numbers: Sequence[int], least: int = 3, most: int = 60, seed: int = 0, prompts: int = 99) -> RaggedBatch:
    """Some of many rows, each of one of the prompts and two completions, with values of rows and scores."""
    tokens, prefix, row, margins, old = [], [], [], [], []
    for place, number in enumerate(numbers):
        prefix += [-1, len(tokens), len(tokens)]
        row += [place] * 3
        for part in range(3):
            draw = random.Random((number % prompts if part == 0 else number) * 100 + seed * 10 + part)
            tokens.append([draw.randrange(99) for _ in range(draw.randint(least, most))])
            old += [[draw.random(), draw.random()] for _ in tokens[-1]] if part else []
        margins.append(number / 3)
    labels = [[-100] * len(each) if before < 0 else each for each, before in zip(tokens, prefix, strict=True)]
    values = {"row_values": {"margin": torch.tensor(margins)}, "score_values": {"old": torch.tensor(old)}}
    return RaggedBatch.from_segments(tokens, labels, prefix=prefix, row=row, **values)


def rows(numbers: Sequence[int], least: int = 3, most: int = 60, seed: int = 0) -> RaggedBatch:
    def tokens(number: int) -> list[int]:
        draw = random.Random(number * 100 + seed)
        return [draw.randrange(99) for _ in range(draw.randint(least, most))]

    return RaggedBatch.from_segments([tokens(number) for number in numbers])


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
    batch = make(range(1 + seed % 9), seed=seed)
    limits = Limits((None, 1, 2)[seed % 3], (None, 200, 20)[seed % 3])
    plan = cut_rows(batch.segments, limits)
    for part, planned in zip(cut(batch, plan), plan, strict=True):
        assert_equal(part.batch, make(planned.rows, seed=seed))
        assert_equal(part.batch, batch.select_rows(planned.rows))
        assert len(part.pieces) == planned.forwards


def contexts(batch: RaggedBatch) -> list[tuple[list[int], int, int, list[float]]]:
    """Of each score the tokens that it is predicted from, the last one's position, its target, and its values."""
    found = []
    for part in batch.segments:
        for score in range(part.score_start, part.score_stop):
            index = int(batch.score_index[score])
            before = batch.segments[part.prefix]
            start = before.start if index < part.start else part.start
            tokens = batch.token_ids[start : index + 1].tolist()
            tokens = tokens if index < part.start else batch.token_ids[before.start : before.stop].tolist() + tokens
            position, target = int(batch.position_ids[index]), int(batch.score_target[score])
            found.append((tokens, position, target, batch.score_values["old"][score].tolist()))
    return found


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("prompts", [1, 2, 3])
def test_a_forward_sees_a_repeated_prompt_once(prompts, seed):
    batch = pairs(range(3 + seed), seed=seed, prompts=prompts)
    plan = cut_rows(batch.segments, Limits(tokens=300 if seed % 2 else None))
    for part, planned in zip(cut(batch, plan), plan, strict=True):
        seen = part.pieces[0].batch
        assert_equal(part.batch, pairs(planned.rows, seed=seed, prompts=prompts))
        assert contexts(seen) == contexts(part.batch)
        assert sum(each.prefix < 0 for each in seen.segments) == len({row % prompts for row in planned.rows})
        assert seen.tokens == planned.tokens
        assert_equal(seen, part.batch.share_prefixes())
    for part in cut(batch, plan, share=False):
        assert part.pieces[0].batch is part.batch


def test_only_a_micro_batch_that_repeats_a_prompt_is_laid_out_again():
    batch = pairs(range(3), prompts=2)
    plan = cut_rows(batch.segments, Limits(rows=2))
    laid = {each.rows: part.pieces[0].batch is part.batch for each, part in zip(plan, cut(batch, plan), strict=True)}
    assert laid == {(0, 2): False, (1,): True}


def test_the_loss_of_rows_with_one_prompt_is_that_of_each_row():
    """Rows are told apart by what the loss is read from, not by what the forward sees."""
    tokens = [[5, 6, 7], [1, 2], [3, 4, 5], [5, 6, 7], [2, 2, 3], [6]]
    batch = RaggedBatch.from_segments(
        tokens,
        [[-100] * 3 if number % 3 == 0 else each for number, each in enumerate(tokens)],
        prefix=[-1, 0, 0, -1, 3, 3],
        row=[(0, -1), (0, 0), (0, 1), (1, -1), (1, 0), (1, 1)],
        row_values={LENGTHS: torch.tensor([[2, 3], [3, 1]])},
    )
    method = METHODS["orpo"]
    losses, gradients = [], []
    for limits in (Limits(), Limits(rows=1)):
        model = tiny_llama(dtype=torch.float64)
        install(model)
        losses.append(train_step(model, batch, method.objective(method.options()), limits=limits))
        gradients.append([each.grad for each in model.parameters()])
    torch.testing.assert_close(*losses)
    torch.testing.assert_close(*gradients)


def test_positions_on_axes_go_along():
    batch = rows(range(7))
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
    batch = make(range(256), 30, 300)
    with Operations() as operations:
        parts = split(batch, Limits(tokens=8192))
    assert len(parts) > 4
    assert operations.count < 50


def test_an_empty_micro_batch_is_short_however_long_the_rows_are():
    def tokens(*lengths: int, most: int | None) -> int:
        part = idle_part(RaggedBatch.from_segments([[1] * length for length in lengths]), most)
        assert part.batch.scores == 0
        return part.batch.tokens

    assert tokens(50, 40, most=16) == LEAST
    assert tokens(50, 4, most=16) == 4
    assert tokens(50, 40, most=None) == 40
