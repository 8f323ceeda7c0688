"""Every memory technique in every trainer does what the table of techniques says of it, and so does docs/matrix.md."""

from __future__ import annotations

import functools

import pytest
import torch

from docs_site.matrix_table import words_of
from lowtide.methods import METHODS
from tests.support.marks import slow_or_sweep
from tests.support.matrix.matrix import TECHNIQUES, cell, check_pair, pairs
from tests.support.matrix.matrix_models import EVERY_TRAINER
from tests.support.matrix.matrix_page import PAGE

page = functools.cache(lambda: words_of(PAGE))


FAST = [("SFT", name) for name in TECHNIQUES if not name.startswith("compiled layers")]
PARTS = 24
"""Of so many parts of the cells the first is slow, and the others are for the sweep."""
CELLS = {
    (kind, name): (row + column) % PARTS
    for row, name in enumerate(TECHNIQUES)
    for column, kind in enumerate(EVERY_TRAINER)
    if (kind, name) not in FAST
}
"""The part of each cell: each technique is slow in as large a part of the trainers as each trainer with techniques."""
PAIRS = [(kind, *pair) for kind in ("SFT", "DPO") for pair in pairs(kind)]


@pytest.mark.parametrize(
    ("kind", "technique"), [*FAST, *slow_or_sweep(CELLS, [cell for cell, part in CELLS.items() if part == 0])]
)
def test_a_technique_in_a_trainer(kind, technique):
    found = cell(kind, TECHNIQUES[technique])
    if found.word.startswith("needs "):
        pytest.skip(found.word)
    assert page()[technique, kind] == found.word, "docs/matrix.md is stale: `python -m tests.exactness` writes it anew"


def test_every_method_is_a_column():
    assert {row.public for row in METHODS.rows.values()} == {*EVERY_TRAINER}


def test_the_page_has_no_other_rows():
    assert page().keys() == {(technique, kind) for technique in TECHNIQUES for kind in EVERY_TRAINER}


@pytest.mark.parametrize(("kind", "first", "second"), slow_or_sweep(PAIRS, PAIRS[::32]))
def test_two_techniques_together(kind, first, second):
    if any(name.startswith("compiled layers") for name in (first, second)):
        # else a layer is recomputed by a graph of an earlier test, which keeps other tensors (pytorch/pytorch#166926)
        torch._dynamo.reset()
    check_pair(kind, TECHNIQUES[first], TECHNIQUES[second])
