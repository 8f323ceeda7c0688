"""Packing against its definitions: a row-by-row best fit, TRL's bins, and properties of any plan."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.data.batches.packing import Packing, pack

STRATEGIES = ("bfd", "bfd_split", "wrapped")
row_lengths = st.lists(st.integers(0, 60), max_size=80)
capacities = st.integers(1, 40)


def bins_of(packing: Packing) -> list[list[tuple[int, int, int]]]:
    """Each bin's pieces as (row, start, stop)."""
    pieces = list(zip(packing.row.tolist(), packing.start.tolist(), packing.stop.tolist(), strict=True))
    offsets = packing.bin_offsets.tolist()
    return [pieces[a:b] for a, b in pairwise(offsets)]


def best_fit_by_row(lengths: list[int], capacity: int) -> list[list[int]]:
    """The textbook: longest row first, each into the fullest bin that takes it, else into a new one."""
    bins: list[list[int]] = []
    space: list[int] = []
    since: list[int] = []  # when the bin came to have its space: the tie is the oldest's
    rows = sorted((row for row, length in enumerate(lengths) if length), key=lambda row: -min(lengths[row], capacity))
    for step, row in enumerate(rows):
        length = min(lengths[row], capacity)
        fits = [b for b in range(len(bins)) if space[b] >= length]
        if fits:
            chosen = min(fits, key=lambda b: (space[b], since[b]))
        else:
            chosen = len(bins)
            bins.append([])
            space.append(capacity)
            since.append(step)
        bins[chosen].append(row)
        space[chosen] -= length
        since[chosen] = step
    return bins


@given(row_lengths, capacities, st.sampled_from(STRATEGIES))
@settings(max_examples=100, deadline=None)
def test_every_token_is_there_once_or_counted_as_cut(lengths, capacity, strategy):
    packing = pack(np.array(lengths, dtype=int), capacity, strategy)
    pieces = [piece for pieces in bins_of(packing) for piece in pieces]
    seen = [(row, token) for row, start, stop in pieces for token in range(start, stop)]
    assert len(seen) == len(set(seen)) == packing.tokens
    kept = {(row, t) for row, n in enumerate(lengths) for t in range(min(n, capacity) if strategy == "bfd" else n)}
    assert set(seen) == kept
    assert packing.tokens + packing.tokens_cut == sum(lengths)
    assert strategy == "bfd" or packing.tokens_cut == 0


@given(row_lengths, capacities, st.sampled_from(STRATEGIES))
@settings(max_examples=100, deadline=None)
def test_no_bin_is_empty_or_above_the_capacity(lengths, capacity, strategy):
    packing = pack(np.array(lengths, dtype=int), capacity, strategy)
    sizes = [sum(stop - start for _, start, stop in pieces) for pieces in bins_of(packing)]
    assert all(0 < size <= capacity for size in sizes)
    assert all(stop > start for pieces in bins_of(packing) for _, start, stop in pieces)
    assert packing.bins == len(sizes)
    assert packing.fill == (sum(sizes) / (len(sizes) * capacity) if sizes else 1.0)


@given(row_lengths, capacities)
@settings(max_examples=100, deadline=None)
def test_bfd_is_the_best_fit_row_by_row(lengths, capacity):
    packing = pack(np.array(lengths, dtype=int), capacity, "bfd")
    assert [[row for row, _, _ in pieces] for pieces in bins_of(packing)] == best_fit_by_row(lengths, capacity)


@given(row_lengths, capacities)
@settings(max_examples=100, deadline=None)
def test_bfd_split_packs_the_pieces_as_if_they_were_rows(lengths, capacity):
    pieces = [
        (row, start, min(start + capacity, n)) for row, n in enumerate(lengths) for start in range(0, n, capacity)
    ]
    expected = best_fit_by_row([stop - start for _, start, stop in pieces], capacity)
    packing = pack(np.array(lengths, dtype=int), capacity, "bfd_split")
    assert bins_of(packing) == [[pieces[piece] for piece in pieces_of_bin] for pieces_of_bin in expected]


@given(row_lengths, capacities)
@settings(max_examples=100, deadline=None)
def test_wrapped_is_the_rows_end_to_end_cut_each_capacity(lengths, capacity):
    stream = [(row, token) for row, n in enumerate(lengths) for token in range(n)]
    expected = [stream[at : at + capacity] for at in range(0, len(stream), capacity)]
    packing = pack(np.array(lengths, dtype=int), capacity, "wrapped")
    got = [[(row, t) for row, start, stop in pieces for t in range(start, stop)] for pieces in bins_of(packing)]
    assert got == expected
    rows_of_bins = [[row for row, _, _ in pieces] for pieces in bins_of(packing)]
    assert all(len(rows) == len(set(rows)) for rows in rows_of_bins)  # a row is cut at bins' ends and nowhere else


@pytest.mark.parametrize("strategy", ["bfd", "bfd_split", "wrapped"])
@given(lengths=st.lists(st.integers(1, 60), min_size=1, max_size=120), capacity=capacities)
@settings(max_examples=40, deadline=None)
def test_bins_are_those_of_trl(strategy, lengths, capacity):
    """One block of TRL's (1,000 rows at most): the same bins in the same order, the same tokens in each."""
    data_utils = pytest.importorskip("trl.data_utils", reason="trl is not installed")
    pa = pytest.importorskip("pyarrow")
    tokens = [[1000 * row + t for t in range(n)] for row, n in enumerate(lengths)]
    table = pa.table({"input_ids": tokens})
    if strategy == "wrapped":
        theirs = data_utils._pack_wrapped(table, capacity)
    else:
        overflow = {"bfd": "truncate", "bfd_split": "split"}[strategy]
        theirs = data_utils._pack_bfd(table, capacity, overflow)
    packing = pack(np.array(lengths), capacity, strategy)
    ours = [[t for row, start, stop in pieces for t in tokens[row][start:stop]] for pieces in bins_of(packing)]
    assert ours == theirs["input_ids"].to_pylist()
    if strategy != "wrapped":
        assert [[stop - start for _, start, stop in pieces] for pieces in bins_of(packing)] == theirs[
            "seq_lengths"
        ].to_pylist()


@pytest.mark.parametrize("capacity", [256, 1024, 4096])
def test_bins_are_those_of_trl_for_a_whole_block_of_long_tailed_rows(capacity):
    data_utils = pytest.importorskip("trl.data_utils", reason="trl is not installed")
    pa = pytest.importorskip("pyarrow")
    lengths = np.random.default_rng(1).lognormal(5, 1, 1000).astype(int) + 1
    table = pa.table({"input_ids": [[row] * n for row, n in enumerate(lengths.tolist())]})
    theirs = data_utils._pack_bfd(table, capacity)
    ours = [[row for row, a, b in pieces for _ in range(b - a)] for pieces in bins_of(pack(lengths, capacity))]
    assert ours == theirs["input_ids"].to_pylist()


def test_long_tailed_lengths_fill_their_bins():
    lengths = np.random.default_rng(0).lognormal(5.5, 1.0, 100_000).astype(int) + 1
    for strategy in STRATEGIES:
        assert pack(lengths, 2048, strategy).fill >= 0.999


def test_the_plan_depends_on_nothing_but_its_arguments():
    lengths = np.random.default_rng(0).integers(1, 200, 5000)
    first, second = pack(lengths, 512), pack(lengths.copy(), 512)
    for field in ("row", "start", "stop", "bin_offsets"):
        np.testing.assert_array_equal(getattr(first, field), getattr(second, field))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("lengths", [[], [0, 0]])
def test_nothing_to_pack_is_no_bin(strategy, lengths):
    packing = pack(np.array(lengths, dtype=np.int64), 8, strategy)
    assert (packing.bins, packing.tokens, packing.tokens_cut, packing.fill) == (0, 0, 0, 1.0)


@pytest.mark.unchecked_shapes
@pytest.mark.parametrize(
    ("lengths", "capacity", "strategy", "message"),
    [
        ([3], 0, "bfd", "capacity of at least 1 token, not 0"),
        ([3, -1], 8, "bfd", "row 1 has a negative length, -1"),
        ([3.5], 8, "bfd", "whole numbers"),
        ([[3]], 8, "bfd", "flat list"),
        ([3], 8, "bdf", "'bdf' is unknown.*nearest: 'bfd'"),
    ],
)
def test_what_cannot_be_packed_is_refused(lengths, capacity, strategy, message):
    with pytest.raises(ValueError, match=message):
        pack(np.array(lengths), capacity, strategy)
