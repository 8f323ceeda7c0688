"""The ragged batch: what it says of its tokens, and that cutting and joining lose none of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.ragged import RaggedBatch
from lowtide.score_rules import IGNORE, LastToken


def preference_pair() -> RaggedBatch:
    """A prompt of 5 tokens with completions of 4 and 3, and an unrelated row."""
    return RaggedBatch.from_segments(
        [[1, 2, 3, 4, 5], [6, 7, 8, 9], [10, 11, 12], [13, 14]],
        [[IGNORE] * 5, [6, 7, 8, 9], [10, 11, 12], [13, 14]],
        prefix=[-1, 0, 0, -1],
        row=[0, 0, 0, 1],
    )


def facts(batch: RaggedBatch) -> list:
    """What the batch says, row by row, whatever its order: tokens, positions, prefix, and what each score reads."""
    rows: dict[int, list] = {}
    for number, part in enumerate(batch.segments):
        scores = range(part.score_start, part.score_stop)
        before = batch.segments[part.prefix] if part.prefix >= 0 else None
        seen = None if before is None else batch.token_ids[before.start : before.stop].tolist()
        if seen is not None and part.prefix_length >= 0:
            seen = seen[: part.prefix_length]
        rows.setdefault(part.row, []).append(
            (
                batch.token_ids[part.start : part.stop].tolist(),
                batch.position_ids[part.start : part.stop].tolist(),
                seen,
                [(int(batch.token_ids[batch.score_index[s]]), int(batch.score_target[s])) for s in scores],
                all(int(batch.score_segment[s]) == number for s in scores),
            )
        )
    return [rows[row] for row in sorted(rows)]


def test_a_shared_prompt_predicts_the_first_token_of_each_completion():
    batch = preference_pair()
    assert (batch.tokens, batch.rows, batch.scores) == (14, 2, 8)
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 5, 6, 7, 0, 1]
    assert batch.score_index.tolist() == [4, 5, 6, 7, 4, 9, 10, 12]
    assert batch.score_target.tolist() == [6, 7, 8, 9, 10, 11, 12, 14]
    assert batch.score_segment.tolist() == [1, 1, 1, 1, 2, 2, 2, 3]
    assert batch.lengths.tolist() == [5, 4, 3, 2]
    assert batch.row_tokens == [12, 2]


def test_packed_rows_are_several_segments_of_one_row():
    batch = RaggedBatch.from_rows(
        [{"input_ids": [1, 2, 3, 4, 5], "labels": [1, 2, 3, IGNORE, 5], "seq_lengths": [2, 3]}, {"input_ids": [6, 7]}]
    )
    assert [part.row for part in batch.segments] == [0, 0, 1]
    assert batch.position_ids.tolist() == [0, 1, 0, 1, 2, 0, 1]
    assert batch.score_target.tolist() == [2, 5, 7]


row_lists = st.lists(
    st.lists(st.tuples(st.integers(0, 99), st.booleans()), min_size=1, max_size=12), min_size=1, max_size=9
)


@settings(max_examples=30, deadline=None)
@given(first=row_lists, second=row_lists)
def test_joining_keeps_the_rows_of_each(first, second):
    one, other = (RaggedBatch.from_segments([[token for token, _ in row] for row in rows]) for rows in (first, second))
    assert facts(RaggedBatch.concat([one, other])) == facts(one) + facts(other)


def test_prefixes_survive_selecting_and_joining():
    batch = preference_pair()
    joined = RaggedBatch.concat([batch, batch])
    assert facts(joined) == facts(batch) * 2
    assert facts(joined.select_rows([2])) == facts(batch)[:1]


def test_a_segment_goes_on_from_the_part_of_a_prefix_that_it_sees():
    batch = RaggedBatch.from_segments(
        [[1, 2, 3, 4, 5], [6, 7], [8, 9], [10]], prefix=[-1, (0, 3), 0, -1], row=[0, 0, 0, 1]
    )
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 4, 3, 4, 5, 6, 0]
    assert batch.score_index.tolist() == [0, 1, 2, 3, 2, 5, 4, 7]
    assert batch.score_target.tolist() == [2, 3, 4, 5, 6, 7, 8, 9]
    assert batch.repeated_tokens == batch.tokens
    joined = RaggedBatch.concat([batch, batch])
    assert facts(joined) == facts(batch) * 2
    assert facts(joined.select_rows([2])) == facts(batch)[:1]


def test_the_last_token_is_that_of_the_part_of_a_prefix_that_is_seen():
    tokens, prefix = [[5, 6, 7], [0]], [-1, (0, 2)]
    batch = RaggedBatch.from_segments(tokens, prefix=prefix, row=[0, 0], score_rule=LastToken(0))
    assert batch.score_index.tolist() == [1]


def test_moving_keeps_the_host_side():
    moved = preference_pair().to("meta")
    assert moved.token_ids.device.type == "meta"
    assert moved.segments == preference_pair().segments


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RaggedBatch.from_segments([[1], []]), "segment 1 .* holds no token"),
        (lambda: RaggedBatch.from_segments([[1, 2]], [[1]]), "segment 0 .* 2 tokens but 1 labels"),
        (lambda: RaggedBatch.from_segments([[1], [2]], prefix=[-1, 1]), "segment 1 names segment 1 as its prefix"),
        (lambda: RaggedBatch.from_segments([[1], [2]], row=[0]), "2 segments but 1 entries in `row`"),
        (lambda: RaggedBatch.from_segments([[1], [2]], row=[0, 2]), "belongs to row 2 after row 0"),
        (lambda: RaggedBatch.from_segments([[1], [2]], prefix=[-1, 0]), "segment 1 has prefix 0, .* another row"),
        (
            lambda: RaggedBatch.from_segments([[1, 2], [2]], prefix=[-1, (0, 3)], row=[0, 0]),
            "segment 1 sees 3 tokens of prefix 0, of 1 to 2",
        ),
        (lambda: RaggedBatch.from_segments([[1, 2]], prefix=[(-1, 2)]), "segment 0 sees 2 tokens of prefix -1"),
        (
            lambda: RaggedBatch.from_rows([{"input_ids": [1, 2, 3, 4], "seq_lengths": [2, 2], "prefix": [-1]}]),
            "row 0 of the batch: 2 seq_lengths, 1 entries in prefix, 2 in prefix_length",
        ),
        (lambda: RaggedBatch.from_segments([]), "no segments"),
        (lambda: RaggedBatch.from_rows([{"text": "a"}]), "row 0 .* no `input_ids`"),
        (
            lambda: RaggedBatch.from_rows([{"input_ids": [1, 2], "seq_lengths": [1]}]),
            "row 0 .* 2 input_ids, 2 labels, 1 tokens by seq_lengths",
        ),
    ],
)
def test_contradictions_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.unchecked_shapes
def test_a_field_of_the_wrong_length_is_named():
    with pytest.raises(ValueError, match=r"`score_target` has shape \(3,\), but the segments say \(8,\)"):
        replace(preference_pair(), score_target=torch.zeros(3, dtype=torch.long))


def test_a_value_is_read_at_the_last_token_that_is_not_padding():
    batch = RaggedBatch.from_segments(
        [[5, 6], [7, 0, 0], [0], [0, 0], [8, 0, 9]],
        prefix=[-1, 0, 0, -1, -1],
        row=[0, 0, 0, 1, 2],
        score_rule=LastToken(pad_id=0),
    )
    assert batch.score_index.tolist() == [2, 1, 6, 10]
    assert batch.score_segment.tolist() == [1, 2, 3, 4]
    assert batch.select_rows([0]).score_index.tolist() == [2, 1]
    whole = RaggedBatch.from_segments([[5, 6], [7, 0, 0]], prefix=[-1, 0], row=[0, 0], score_rule=LastToken())
    assert whole.score_index.tolist() == [4]


@pytest.mark.parametrize(("most", "left"), [
    (100, [2, 9, 29]), (40, [2, 9, 29]), (20, [2, 9, 9]), (21, [2, 9, 10]), (13, [2, 5, 6]), (1, [1, 1, 1]),
])  # fmt: skip
def test_scores_are_thinned_where_a_segment_has_most(most: int, left: list[int]):
    batch = RaggedBatch.from_segments([[1] * 3, [2] * 10, [3] * 30])
    thin = batch.thinned(most)
    assert [part.score_stop - part.score_start for part in thin.segments] == left
    starts = [part.score_start for part in batch.segments]
    places = [batch.score_index[at : at + count] for at, count in zip(starts, left, strict=True)]
    assert torch.equal(thin.score_index, torch.cat(places))
    assert thin.tokens == batch.tokens


def test_a_batch_several_times_shares_no_prefix_between_two():
    pair = RaggedBatch.from_segments([[1, 2, 3], [4], [1, 2, 3], [5]], prefix=[-1, 0, -1, 2], row=[0, 0, 1, 1])
    pair = pair.unscored()
    keyed = replace(pair, segments=tuple(s._replace(key=7 if s.prefix < 0 else 0) for s in pair.segments))
    shared = keyed.share_prefixes().tokens
    assert shared < keyed.tokens
    again = keyed.times(3)
    assert again.token_ids.tolist() == keyed.token_ids.tolist() * 3
    assert again.share_prefixes().tokens == 3 * shared
