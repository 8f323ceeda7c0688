"""What truncation leaves of preferences and what is noted down of it, against the plain rule, one row at a time."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lowtide.data.batches.token_rows import TokenRows, flatten
from lowtide.data.encode.preference_rows import UNPAIRED_PARTS, pair_parts, pair_table, unpaired_table, whole_pair_table
from lowtide.data.encode.sides import EncodedSides
from lowtide.data.encode.truncation import Truncation
from lowtide.data.formats.preferences import SIDES, PreferenceSample

THREE = (*SIDES, "reference")


def cut_plainly(prompt, completions, truncation):
    """What the limits leave of one row, as the issue words it; None for a row that is dropped."""
    if truncation.max_prompt_length is not None:
        prompt = prompt[-truncation.max_prompt_length :]
    completions = [completion[: truncation.max_completion_length] for completion in completions]
    limit = truncation.max_length
    if limit is not None and truncation.mode == "keep_start":
        completions = [completion[: max(limit - len(prompt), 0)] for completion in completions]
        prompt = prompt[:limit]
    elif limit is not None:
        room = max(limit - max(map(len, completions)), 0)
        prompt = prompt[len(prompt) - room :] if room < len(prompt) else prompt
        completions = [completion[-limit:] for completion in completions]
    if any(len(completion) < (1 if prompt else 2) for completion in completions):
        return None
    return [prompt, *completions]


LISTS = st.lists(st.integers(0, 2), max_size=7)
LIMITS = st.none() | st.integers(1, 9)
TRUNCATIONS = st.builds(
    Truncation,
    max_length=LIMITS,
    mode=st.sampled_from(["keep_start", "keep_end"]),
    max_prompt_length=LIMITS,
    max_completion_length=LIMITS,
)


def encoded(rows):
    """Rows of a prompt and completions, as the encoder gives them."""
    prompts = np.array([len(prompt) for prompt, *_ in rows], dtype=np.int64)
    sides = []
    for side in zip(*(completions for _, *completions in rows), strict=True):
        flat, offsets = flatten([row[0] + completion for row, completion in zip(rows, side, strict=True)])
        sides.append(TokenRows(flat, flat, offsets, prompts, np.zeros(len(rows), dtype=bool)))
    return EncodedSides([PreferenceSample((), label=True) for _ in rows], sides, THREE[: len(sides)])


def assert_noted(table, rows, parts, truncation):
    """Each row of a table is what `cut_plainly` leaves of it, and every token is counted as kept, cut or dropped."""
    for row, noted in zip(rows, table.to_pylist(), strict=True):
        kept = cut_plainly(row[0], row[1:], truncation)
        same = len(row) > 2 and (row[1] == row[2] or (kept is not None and kept[1] == kept[2]))
        is_dropped = kept is None or same
        assert (noted["dropped"] != 0) == is_dropped
        assert (noted["dropped"] == 1) == (same and (row[1] == row[2] or kept is not None))
        kept = [[] for _ in row] if kept is None or is_dropped else kept
        assert [noted[f"{part}_ids"] for part in parts] == kept
        assert [noted[f"cut_{part}"] for part in parts] == [len(a) - len(b) for a, b in zip(row, kept, strict=True)]
        assert noted["cut"] + sum(map(len, kept)) == sum(map(len, row))
        if not is_dropped:
            assert noted["scored"] == sum(len(completion) - (not kept[0]) for completion in kept[1:])


@given(st.sampled_from([SIDES, THREE]), st.data(), TRUNCATIONS)
def test_pairs_are_cut_as_the_plain_rule_says(sides, data, truncation):
    rows = data.draw(st.lists(st.tuples(LISTS, *[LISTS for _ in sides]), min_size=1, max_size=5))
    assert_noted(pair_table(encoded(rows), truncation, margins=False), rows, pair_parts(sides), truncation)


@given(st.lists(st.tuples(LISTS, LISTS), min_size=1, max_size=5), TRUNCATIONS)
def test_labelled_completions_are_cut_as_the_plain_rule_says(rows, truncation):
    table = unpaired_table(encoded(rows), truncation, whole_completions=False)
    assert_noted(table, rows, UNPAIRED_PARTS, truncation)


@given(st.lists(st.tuples(LISTS, LISTS, LISTS), min_size=1, max_size=5), LIMITS)
def test_whole_pairs_are_kept_or_dropped(rows, max_length):
    table = whole_pair_table(encoded(rows), max_length, margins=False)
    for (prompt, chosen, rejected), noted in zip(rows, table.to_pylist(), strict=True):
        lengths = len(prompt + chosen), len(prompt + rejected)
        fits = max_length is None or max(lengths) <= max_length
        assert (noted["dropped"] == 0) == (chosen != rejected and min(lengths) > 0 and fits)
        assert [noted[f"{part}_ids"] for part in pair_parts(SIDES)] == (
            [prompt, chosen, rejected] if noted["dropped"] == 0 else [[], [], []]
        )
