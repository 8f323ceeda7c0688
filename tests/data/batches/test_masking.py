"""Masks: how many, of which lengths, what stands in their places; and that they depend on seed, epoch, row and place
alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lowtide.data.batches.masking import ONE_TOKEN, Masking, geometric, harmonic
from lowtide.data.batches.values import NUMBER, WORDS
from lowtide.ragged import RaggedBatch
from lowtide.score_rules import IGNORE, OWN_TOKEN
from tests.support.marks import slow_but

MASK, VOCABULARY, PLAIN = 3, 100, 5
SPECIAL = (0, 1, 2, MASK, 50, 99)
KINDS = {"tokens": ONE_TOKEN, "spans": geometric(0.2, 10), "n-grams": harmonic(3)}


def batch_of(rows: int, length: int, *, first: int = 0, words: list[int] | None = None) -> RaggedBatch:
    """Rows of one token between two special ones."""
    labels = [IGNORE, *[PLAIN] * length, IGNORE]
    made = RaggedBatch.from_segments([[1, *[PLAIN] * length, 2]] * rows, [labels] * rows, score_rule=OWN_TOKEN)
    values = {} if words is None else {WORDS: torch.tensor(words * rows)}
    return replace(made, row_values={NUMBER: torch.arange(first, first + rows)}, score_values=values)


def masking(kind: str = "tokens", **more: object) -> Masking:
    settings = {
        "probability": 0.15,
        "mask_token": MASK,
        "vocabulary": VOCABULARY,
        "special": SPECIAL,
        "lengths": KINDS[kind],
    }
    return Masking(**{**settings, "as_one": kind != "tokens", **more})


def marks(batch: RaggedBatch, rows: int) -> torch.Tensor:
    """[rows, tokens]: which are masked."""
    marked = torch.zeros(batch.tokens, dtype=torch.bool)
    marked[batch.score_index] = True
    return marked.view(rows, -1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", slow_but(["tokens"], KINDS))
def test_each_token_is_masked_with_the_probability(kind: str):
    rows, length = 20_000, 14
    found = marks(masking(kind)(batch_of(rows, length), epoch=0), rows).float().mean(0)
    assert found[0] == found[-1] == 0, "special tokens are never masked"
    assert (found[1:-1] - 0.15).abs().max() < 0.012, "first and last tokens as those between"


@pytest.mark.slow
@pytest.mark.parametrize("kind", slow_but(["tokens"], KINDS))
def test_masked_tokens_become_mask_tokens_or_random_ones_or_stay(kind: str):
    rows = 20_000
    before = batch_of(rows, 14)
    batch = masking(kind)(before, epoch=0)
    found = batch.token_ids[batch.score_index]
    masked, same = found == MASK, found == PLAIN
    assert abs(masked.float().mean() - 0.8) < 0.01
    assert abs(same.float().mean() - 0.1 - 0.1 / VOCABULARY) < 0.01
    drawn = torch.bincount(found[~masked & ~same], minlength=VOCABULARY)
    others = [n for n in range(VOCABULARY) if n not in (*SPECIAL, PLAIN)]
    assert drawn[others].min() > 0
    assert drawn[[*SPECIAL]].sum() == 0
    assert (batch.score_target == PLAIN).all()
    unmasked = torch.ones(batch.tokens, dtype=torch.bool)
    unmasked[batch.score_index] = False
    assert torch.equal(batch.token_ids[unmasked], before.token_ids[unmasked])


@pytest.mark.parametrize("kind", ["spans", "n-grams"])
def test_runs_have_the_lengths_of_their_distribution(kind: str):
    """Where runs are so rare that they don't touch."""
    rows, length = 2_000, 200
    found = marks(masking(kind, probability=0.004)(batch_of(rows, length), epoch=0), rows)[:, 12:-12]
    edges = torch.diff(found.int(), dim=1)
    starts, stops = torch.nonzero(edges == 1), torch.nonzero(edges == -1)
    lengths = [
        int(stops[(stops[:, 0] == row) & (stops[:, 1] > place)][0, 1] - place)
        for row, place in starts.tolist()
        if ((stops[:, 0] == row) & (stops[:, 1] > place)).any()
    ]
    expected = sum(share * n for n, share in enumerate(KINDS[kind], start=1))
    assert len(lengths) > 200
    assert max(lengths) >= len(KINDS[kind])
    assert abs(sum(lengths) / len(lengths) - expected) < 0.15 * expected


def test_what_stands_in_a_span_is_decided_for_the_whole():
    batch = masking("spans", probability=0.05, random_share=0.0)(batch_of(500, 50), epoch=0)
    masked = batch.token_ids[batch.score_index] == MASK
    beside = torch.diff(batch.score_index) == 1
    assert beside.any()
    assert torch.equal(masked[1:][beside], masked[:-1][beside])


@pytest.mark.parametrize("kind", KINDS)
def test_words_are_masked_whole_or_not_at_all(kind: str):
    words = [0, 0, 1, 2, 2, 2, 3, 4, 4, 5]
    rows = 5_000
    found = marks(masking(kind)(batch_of(rows, len(words), words=words), epoch=0), rows)[:, 1:-1]
    for place in range(1, len(words)):
        if words[place] == words[place - 1]:
            assert torch.equal(found[:, place], found[:, place - 1])
    assert (found.float().mean(0) - 0.15).abs().max() < 0.02


def test_masks_are_new_in_each_epoch_and_for_each_row_and_seed():
    batch = batch_of(50, 40)
    seen = [marks(masking(seed=seed)(batch, epoch), 50) for seed in (0, 1) for epoch in (0, 1, -1)]
    for number, one in enumerate(seen):
        assert len({tuple(row) for row in one.tolist()}) == 50
        assert not any(torch.equal(one, other) for other in seen[:number])


@pytest.mark.parametrize("kind", KINDS)
def test_masks_do_not_depend_on_what_else_is_in_the_batch(kind: str):
    whole = masking(kind)(batch_of(12, 30), epoch=2)
    for rows in ([3, 4], [0], [7, 11]):
        part, alone = whole.select_rows(rows), RaggedBatch.concat([batch_of(1, 30, first=row) for row in rows])
        found = masking(kind)(alone, epoch=2)
        assert torch.equal(found.token_ids, part.token_ids)
        assert torch.equal(found.score_index, part.score_index)


def test_spans_end_with_their_text():
    """Segments of a packed row are texts of their own."""
    tokens = [[PLAIN] * 6] * 400
    rows = [number // 2 for number in range(400)]
    made = RaggedBatch.from_segments(tokens, row=rows, score_rule=OWN_TOKEN)
    batch = masking("spans", probability=0.3)(replace(made, row_values={NUMBER: torch.arange(200)}), epoch=0)
    found = marks(batch, 400).view(200, 2, 6)
    last, next_first = found[:, 0, -1], found[:, 1, 0]
    both = (last & next_first).float().mean()
    assert abs(both - 0.3 * 0.3) < 0.06, "as often as by chance"


def test_rows_with_labels_of_their_own_stay_as_they_are():
    batch = batch_of(4, 10)
    given = replace(batch, row_values={NUMBER: torch.tensor([-1, 0, -1, 1])})
    found = masking()(given, epoch=0)
    for row in (0, 2):
        part, expected = found.select_rows([row]), batch.select_rows([row])
        assert torch.equal(part.token_ids, expected.token_ids)
        assert part.scores == expected.scores
    assert found.select_rows([1]).scores < batch.select_rows([1]).scores


def test_a_batch_without_a_token_to_mask_stays_without_scores():
    made = RaggedBatch.from_segments([[1, 2]], [[IGNORE, IGNORE]], score_rule=OWN_TOKEN)
    assert masking("spans")(replace(made, row_values={NUMBER: torch.tensor([0])}), epoch=0).scores == 0
