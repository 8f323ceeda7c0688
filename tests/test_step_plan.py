"""A step's plan: caps hold, each row and each piece runs once, and all ranks run the same passes."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.ragged import Segment
from lowtide.step_plan import (
    IDLE,
    LEAST,
    Join,
    Limits,
    MicroBatch,
    Needs,
    Score,
    StepPlan,
    Summary,
    Train,
    cut_rows,
    even_acts,
    local_acts,
    pieces_first,
    smaller,
)

prompted = st.tuples(st.integers(1, 70), st.lists(st.integers(1, 70), max_size=3))
rows_of = st.lists(prompted, min_size=1, max_size=7)


def laid(rows: list[tuple[int, list[int]]], keys: list[int] | None = None) -> list[Segment]:
    """Rows of a prompt and completions that go on from it; each token of a completion is scored."""
    found: list[Segment] = []
    token = score = 0
    for row, (prompt, completions) in enumerate(rows):
        before = len(found)
        alone = prompt if not completions else 0
        key = keys[row] if keys is not None else 0
        found.append(Segment(token, token + prompt, -1, row, score, score + alone, key))
        token, score = token + prompt, score + alone
        for length in completions:
            found.append(Segment(token, token + length, before, row, score, score + length))
            token, score = token + length, score + length
    return found


def tokens_of(segments: list[Segment], rows: tuple[int, ...]) -> int:
    return sum(part.length for part in segments if part.row in rows)


@settings(max_examples=150, deadline=None)
@given(rows=rows_of, rows_at_most=st.integers(1, 4), cap=st.integers(LEAST, 150), least=st.integers(1, 9))
def test_caps_hold_and_each_token_is_in_one_forward(rows, rows_at_most, cap, least):
    segments = laid(rows)
    plan = cut_rows(segments, Limits(rows_at_most, cap), least=least)
    assert sorted(row for part in plan for row in part.rows) == list(range(len(rows)))
    assert len(plan) >= min(least, len(rows))
    for part in plan:
        assert part.tokens == tokens_of(segments, part.rows)
        assert part.heaviest <= cap
        assert len(part.rows) <= rows_at_most
        spans = sorted((each.start, each.stop) for piece in part.pieces for each in piece.spans)
        if spans and part.scores:
            assert len(part.rows) == 1
            assert sum(stop - start for start, stop in spans) == part.tokens
            assert all(one[1] <= other[0] for one, other in itertools.pairwise(spans))
            assert all(piece.after < number for number, piece in enumerate(part.pieces))


def test_a_prefix_that_rows_repeat_counts_once():
    segments = laid([(20, [5, 5])] * 4, keys=[7, 7, 8, 8])
    plan = cut_rows(segments, Limits(tokens=60))
    assert [part.rows for part in plan] == [(0, 1), (2, 3)]
    assert [part.tokens for part in plan] == [40, 40]


def test_attention_counts_by_its_pairs():
    segments = laid([(20, [])] * 3 + [(60, [])] + [(20, [])] * 3)
    by_tokens, by_cost = (cut_rows(segments, Limits(tokens=120), least=2, pairs=pairs) for pairs in (0, 10))
    assert [part.tokens for part in by_tokens] == [100, 80]
    assert [part.rows for part in by_cost] == [(3,), (0, 1, 2, 4, 5, 6)]  # 20 tokens cost 40, and 60 cost 240


def test_the_heaviest_micro_batches_come_first():
    plan = cut_rows(laid([(5, []), (40, []), (9, []), (70, []), (12, [])]), Limits(tokens=20))
    assert [part.rows for part in plan] == [(3,), (1,), (0, 2), (4,)]


@pytest.mark.parametrize("cap", range(LEAST, 60))
def test_no_piece_begins_where_scores_are_read_together(cap):
    uncut = frozenset({*range(24, 36), *range(50, 60), 61, 90})
    (plan,) = cut_rows([Segment(7, 107, -1, 0, 0, 100, uncut=uncut)], Limits(None, cap))
    starts, stops = zip(*((piece.spans[0].start - 7, piece.spans[0].stop - 7) for piece in plan.pieces), strict=True)
    assert (starts[0], *stops) == (*starts, 100)
    assert plan.heaviest <= cap
    assert uncut.isdisjoint(starts)
    with pytest.raises(ValueError, match="more than 16 neighbouring tokens of a row are compared as one span"):
        cut_rows([Segment(0, 100, -1, 0, 0, 100, uncut=frozenset(range(30, 60)))], Limits(None, 16))


def test_rows_above_the_budget_are_refused_where_they_cannot_be_cut():
    segments = laid([(9, []), (40, [3])])
    with pytest.raises(ValueError, match=r"row 1 .* 43 tokens, above the token budget of 20 .*since it is so"):
        cut_rows(segments, Limits(tokens=20), why_whole_rows="it is so")
    with pytest.raises(ValueError, match="a piece has at least 16 tokens"):
        cut_rows(segments, Limits(tokens=15))
    assert len(cut_rows(segments, Limits(tokens=43), why_whole_rows="it is so")) == 2


# -- acts ------------------------------------------------------------------------------------------------------------


def trained(acts: list) -> Counter:
    return Counter((act.part, act.piece, act.term) for act in acts if isinstance(act, Train) and act.part != IDLE)


def wanted(parts: list[MicroBatch], terms: int) -> Counter:
    each = ((number, piece) for number, part in enumerate(parts) for piece in range(part.forwards))
    return Counter((*one, term) for one in each for term in range(terms))


def check_order(acts: list, parts: list[MicroBatch], needs: Needs) -> None:
    """Pieces go backward after all that go on from them, once these and their loss are there."""
    done: set = set()
    for act in acts:
        if isinstance(act, Train) and act.part != IDLE and parts[act.part].pieces:
            part = parts[act.part]
            later = [n for n, piece in enumerate(part.pieces) if piece.after == act.piece]
            assert all(Train(act.part, n, act.term) in done for n in later)
            kept = {each.piece for each in done if isinstance(each, Score) and each.keeps and each[0] == act.part}
            assert {*part.inner} <= kept
            if needs.loss_over == "row" and len(part.pieces) > 1:
                assert Join((act.part,), act.term) in done
        done.add(act)


@pytest.mark.parametrize("over", ["score", "row", "step"])
@settings(max_examples=60, deadline=None)
@given(rows=rows_of, terms=st.integers(1, 2), stages=st.integers(1, 2))
def test_one_rank_runs_each_piece_once_for_each_loss(over, rows, terms, stages):
    needs = Needs(over, 1 if over == "step" else terms, stages=stages)
    parts = cut_rows(laid(rows), Limits(3, 20))
    acts = local_acts(parts, needs)
    assert trained(acts) == wanted(parts, needs.terms)
    check_order(acts, parts, needs)
    plan = StepPlan(Limits(3, 20), tuple(parts), tuple(acts), over)
    assert all(isinstance(act, Train) and act[:2] == acts[-1][:2] for act in acts[plan.last :])
    if over == "step":
        before = acts[: plan.until_joined]
        assert isinstance(before[-1], Join)
        assert {act.part for act in before[:-1]} == {*before[-1].parts}
        assert {*before[-1].parts} == {number for number, part in enumerate(parts) if part.scores}


@pytest.mark.parametrize("terms", [1, 2])
def test_empty_micro_batches_are_not_the_last_one_together(terms):
    acts = local_acts(cut_rows(laid([(4, [])]), Limits()), Needs(terms=terms), 3)
    assert [act.part for act in acts] == [number for number in (0, IDLE, IDLE) for _ in range(terms)]
    assert StepPlan(Limits(), (), tuple(acts)).last == 2 * terms


def test_a_rank_without_rows_runs_an_empty_micro_batch():
    assert local_acts([], Needs("row")) == [Train(IDLE)]
    assert local_acts([], Needs("step")) == [Join(()), Train(IDLE)]


def passes(acts: list) -> str:
    """Forwards without gradients as f and those with a backward as b."""
    kinds = {Score: "f", Train: "b", Join: ""}
    return "".join(kinds[type(act)] for act in acts)


@pytest.mark.parametrize("over", ["score", "row", "step"])
@settings(max_examples=80, deadline=None)
@given(ranks=st.lists(rows_of, min_size=2, max_size=4), terms=st.integers(1, 2))
def test_ranks_that_wait_for_one_another_run_the_same_passes(over, ranks, terms):
    needs = Needs(over, 1 if over == "step" else terms, meet="each forward")
    parts = [pieces_first(cut_rows(laid(rows), Limits(2, 16))) for rows in ranks]
    everyones = [Summary.of(each, needs) for each in parts]
    acts = [even_acts(each, needs, everyones) for each in parts]
    assert len({passes(each) for each in acts}) == 1
    for own, each in zip(parts, acts, strict=True):
        assert trained(each) == wanted(own, needs.terms)
        check_order(each, own, needs)


@settings(max_examples=60, deadline=None)
@given(ranks=st.lists(rows_of, min_size=2, max_size=4))
def test_ranks_whose_backwards_meet_go_backward_equally_often(ranks):
    needs = Needs("row", meet="each backward")
    parts = [pieces_first(cut_rows(laid(rows), Limits(2, 16))) for rows in ranks]
    acts = [even_acts(each, needs, [Summary.of(own, needs) for own in parts]) for each in parts]
    assert len({passes(each).count("b") for each in acts}) == 1


def test_a_smaller_budget_cuts_rows_last():
    assert smaller(100, 30, cuttable=True) == 50
    assert smaller(50, 30, cuttable=True) == 30
    assert smaller(30, 30, cuttable=False) is None
    assert smaller(40, 40, cuttable=True) == 20
    assert smaller(LEAST, 40, cuttable=True) is None
