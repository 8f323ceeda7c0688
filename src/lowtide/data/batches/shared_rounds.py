"""Rounds of a conversation as a tree: the tokens that they have in common are laid, and computed, once.

The rounds of one conversation begin alike: the next repeats what was said before, up to where its template renders the
past otherwise. The round that has most in common with the others is laid whole. Each of these goes on from its
beginning: from as much as both have in common, but no further than to its own first scored token, whose target is its
own. In a model whose tokens see only what stands before them, the numbers are those of whole rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
from jaxtyping import Int

from lowtide.data.batches.token_rows import IGNORED, PREFIX, PREFIX_LENGTH, SEGMENTS, WEIGHTS, TokenRows, range_index

Family = list[tuple[int, int]]
"""Rounds by their numbers, each with how many tokens of the first it goes on from; 0 of the first."""


@dataclass(frozen=True)
class Sharing:
    """How the rounds of a row are laid."""

    most: int | None = None
    """The most tokens that rounds which go on from one another take together: what a bin holds. None is no limit."""


def share_rounds(
    rows: TokenRows, sharing: Sharing | None
) -> tuple[TokenRows, Int[np.ndarray, " rows"], Int[np.ndarray, " rows"]]:
    """Rounds of conversations, each group those of one, laid so that what they share is there once.

    Args:
        sharing: None lays each round whole.

    Returns:
        The rows, without those that have no token, what goes on from another behind it; and of each the number of that
        other within the group, and how many of its tokens are seen, or -1.
    """
    assert rows.groups is not None
    lengths = rows.lengths
    order: list[int] = []
    groups, prefix, seen = [0], list[int](), list[int]()
    for start, stop in pairwise(rows.groups.tolist()):
        rounds = [number for number in range(start, stop) if lengths[number]]
        for family in _families(rows, rounds, sharing) if sharing else [[(number, 0)] for number in rounds]:
            first = len(order) - groups[-1]
            order += [number for number, _ in family]
            seen += [shared for _, shared in family]
            prefix += [first if shared else -1 for _, shared in family]
        groups.append(len(order))
    before, others = np.array(seen, dtype=np.int64), np.array(prefix, dtype=np.int64)
    index, offsets = range_index(rows.offsets[order] + before, lengths[order] - before)
    laid = replace(rows.take(index, offsets), groups=np.array(groups))
    return laid, others, np.where(others < 0, -1, before)


def _families(rows: TokenRows, rounds: Sequence[int], sharing: Sharing) -> Iterator[Family]:
    """Rounds in families, of each of which all but the first go on from it."""
    lengths, left = rows.lengths, list(rounds)
    shared = _shared(rows, left) if len(left) > 1 else {}
    while left:
        first = max(left, key=lambda each: (sum(shared[other, each] for other in left if other != each), each))
        family, total = [(first, 0)], int(lengths[first])
        for other in left:
            tokens = 0 if other == first else shared[other, first]
            rest = int(lengths[other]) - tokens
            if tokens and (sharing.most is None or total + rest <= sharing.most):
                family.append((other, tokens))
                total += rest
        taken = {number for number, _ in family}
        left = [number for number in left if number not in taken]
        yield family


def _shared(rows: TokenRows, rounds: Sequence[int]) -> dict[tuple[int, int], int]:
    """For each two rounds, from how many tokens of the second the first can go on."""
    bounds = [slice(*rows.offsets[number : number + 2]) for number in rounds]
    tokens = [rows.token_ids[each] for each in bounds]
    firsts = [int((rows.labels[each] != IGNORED)[1:].argmax()) + 1 for each in bounds]
    found = {}
    for one in range(len(rounds)):
        for other in range(one):
            most = min(len(tokens[one]), len(tokens[other]))
            differ = tokens[one][:most] != tokens[other][:most]
            alike = int(differ.argmax()) if differ.any() else most
            found[rounds[one], rounds[other]] = min(alike, firsts[one])
            found[rounds[other], rounds[one]] = min(alike, firsts[other])
    return found


def tokens_before(
    counts: Int[np.ndarray, " rows"],
    lengths: Int[np.ndarray, " segments"],
    prefix: Int[np.ndarray, " segments"] | None,
    seen: Int[np.ndarray, " segments"] | None,
) -> Int[np.ndarray, " segments"]:
    """From how many tokens of another each segment of rows goes on, by the columns of these.

    Args:
        counts: of segments in each row.
    """
    if prefix is None:
        return np.zeros_like(lengths)
    firsts = np.repeat(np.cumsum(counts) - counts, counts)
    whole = lengths[np.where(prefix < 0, 0, firsts + prefix)]
    return np.where(prefix < 0, 0, whole if seen is None else np.where(seen < 0, whole, seen))


def whole_rounds(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """A prepared row with what each of its segments goes on from repeated before it; its numbers are the same."""
    rest = {name: value for name, value in row.items() if name not in (PREFIX, PREFIX_LENGTH)}
    if not row.get(PREFIX):
        return rest
    lengths, prefix, seen = (np.array(row[name]) if name in row else None for name in (SEGMENTS, PREFIX, PREFIX_LENGTH))
    assert lengths is not None
    before = tokens_before(np.array([len(lengths)]), lengths, prefix, seen).tolist()
    ends = np.cumsum(lengths).tolist()
    starts = [0, *ends[:-1]]
    tokens, labels, weights = list[int](), list[int](), list[float]()
    given = row.get(WEIGHTS) or []
    for start, end, other, some in zip(starts, ends, row[PREFIX], before, strict=True):
        first = starts[other]  # its own where it goes on from none, of which nothing is repeated
        tokens += [*row["input_ids"][first : first + some], *row["input_ids"][start:end]]
        labels += [*[IGNORED] * some, *row.get("labels", row["input_ids"])[start:end]]
        weights += [*given[first : first + some], *given[start:end]]
    laid = {"input_ids": tokens, "labels": labels, SEGMENTS: (lengths + before).tolist()}
    return {**rest, **laid, **({WEIGHTS: weights} if weights else {})}


@dataclass(frozen=True)
class WholeRounds:
    """A collator that is given each round whole, for models that cannot compute once what rounds share."""

    collator: Callable[[Sequence[Any]], Any]
    sharing = False

    def __call__(self, rows: Sequence[Any]) -> Any:
        return self.collator([whole_rounds(row) for row in rows])
