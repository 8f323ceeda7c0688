"""Precision, recall and F1 of the entities in sequences of tags, by the definition of seqeval 1.2.2 (its default mode,
which is that of the CoNLL script `conlleval`): an entity is right if its type and its bounds are.

The library itself would bring scikit-learn and SciPy into the process; a test compares the two where it is installed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

PREFIXES = ("B-", "I-", "E-", "S-")
BEGINS, ENDS, OUTSIDE = ("B", "S"), ("E", "S"), ("O", ".")

Entity = tuple[str, int, int]
"""Type, first word, last word."""


def entities(tags: Sequence[str]) -> set[Entity]:
    """The entities of one sequence of tags such as B-PER, I-PER, O; also under IOBES and without B."""
    found: set[Entity] = set()
    begin, before, before_kind = 0, "O", ""
    for place, tag in enumerate([*tags, "O"]):
        mark, kind = tag[:1], tag[1:].split("-", 1)[-1] or "_"
        changed = before_kind != kind
        if before in ENDS or (before in ("B", "I") and mark in (*BEGINS, "O")) or (before not in OUTSIDE and changed):
            found.add((before_kind, begin, place - 1))
        if mark in BEGINS or (before in (*ENDS, "O") and mark in ("E", "I")) or (mark not in OUTSIDE and changed):
            begin = place
        before, before_kind = mark, kind
    return found


def entity_scores(documents: Iterable[tuple[Sequence[str], Sequence[str]]]) -> dict[str, dict[str, float]]:
    """By type, and over all under the empty name: `precision`, `recall`, `f1`, and `number`, that of entities.

    Args:
        documents: of each, the tags that are right and those that were predicted, as long as each other.
    """
    right: Counter[str] = Counter()
    there: Counter[str] = Counter()
    predicted: Counter[str] = Counter()
    for truth, guess in documents:
        wanted, found = entities(truth), entities(guess)
        for counted, which in ((right, wanted & found), (there, wanted), (predicted, found)):
            counted.update(kind for kind, _, _ in which)
    for counted in (right, there, predicted):
        counted[""] = counted.total()
    return {kind: _scores(right[kind], there[kind], predicted[kind]) for kind in sorted({*there, *predicted})}


def _scores(right: int, there: int, predicted: int) -> dict[str, float]:
    """0 where nothing could be right."""
    return {
        "precision": right / predicted if predicted else 0.0,
        "recall": right / there if there else 0.0,
        "f1": 2 * right / (there + predicted) if there + predicted else 0.0,
        "number": there,
    }
