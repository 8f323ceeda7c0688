"""Ranks that have rows of unequal length run the same passes in the same order, each part of a rank once."""

from __future__ import annotations

import itertools

import pytest
import torch

from lowtide.ragged import RaggedBatch
from lowtide.step import even_turns
from lowtide.step.even_turns import EvenTurns, Turn, pieces_first
from lowtide.step.pieces import LEAST, LongRow, idle_part, in_pieces

MOST = 16
RANKS = {
    "one row in pieces": ([70], [5, 6, 7]),
    "rows in pieces on both": ([70, 40, 9], [33, 90]),
    "many short ones": ([40], [9] * 7),
    "only short ones on one": ([100, 3], [12, 13]),
}


def batch(lengths: list[int]) -> RaggedBatch:
    return RaggedBatch.from_rows([{"input_ids": list(range(1, length + 1))} for length in lengths])


def parts_of(rows: RaggedBatch) -> list[RaggedBatch | LongRow]:
    return pieces_first(in_pieces(rows.split(MOST, 2, long_rows=True), MOST))


def agreed(monkeypatch, everyones: list[list[RaggedBatch | LongRow]]) -> EvenTurns:
    """What the first of these ranks hears of all."""
    device = torch.device("cpu")
    longest = max(sum(isinstance(part, LongRow) for part in parts) for parts in everyones)
    said: list[torch.Tensor] = []
    monkeypatch.setattr(even_turns, "worst_of_ranks", lambda number, device: longest)
    monkeypatch.setattr(even_turns, "gathered", lambda mine: said.append(mine) or mine)
    for parts in everyones:
        EvenTurns.agreed(parts, first_of, device)
    monkeypatch.setattr(even_turns, "gathered", lambda mine: torch.cat(said))
    return EvenTurns.agreed(everyones[0], first_of, device)


def first_of(row: LongRow) -> int:
    return row.inner


def passes(turns: list[Turn]) -> str:
    """The passes of a rank, forwards without gradients as f and those with a backward as b."""
    found = ""
    for turn in turns:
        found += "f" * (turn.idle.count if turn.idle else 0)
        if isinstance(turn.part, LongRow):
            found += "f" * first_of(turn.part) + "b" * len(turn.part.pieces)
        elif turn.part is not None:
            found += "b"
    return found


@pytest.mark.parametrize("name", RANKS)
def test_ranks_run_the_same_passes_and_each_part_once(name, monkeypatch):
    batches = [batch(lengths) for lengths in RANKS[name]]
    everyones = [parts_of(each) for each in batches]
    even = agreed(monkeypatch, everyones)
    turns = [even.turns(parts, first_of, idle_part(rows, MOST)) for parts, rows in zip(everyones, batches, strict=True)]
    for one, other in itertools.pairwise(turns):
        assert passes(one) == passes(other)
    for parts, own in zip(everyones, turns, strict=True):
        run = [turn.part for turn in own if turn.part is not None and turn.part.scores]
        assert sorted(map(id, run)) == sorted(id(part) for part in parts if part.scores)
        assert all(turn.part is parts[turn.number] for turn in own if turn.number < len(parts))


def test_an_empty_micro_batch_is_short_however_long_the_rows_are():
    assert idle_part(batch([50, 40]), MOST).tokens == LEAST
    assert idle_part(batch([50, 4]), MOST).tokens == 4
    assert idle_part(batch([50, 40]), None).tokens == 40
    assert idle_part(batch([50, 40]), MOST).scores == 0
