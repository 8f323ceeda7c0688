"""Every memory technique in every trainer does what the table of techniques says of it, and so does docs/matrix.md."""

from __future__ import annotations

import functools

import pytest

from docs_site.matrix_table import words_of
from tests.support.marks import slow_but
from tests.support.matrix.matrix import TECHNIQUES, cell, check_pair, pairs
from tests.support.matrix.matrix_models import EVERY_TRAINER
from tests.support.matrix.matrix_page import PAGE

page = functools.cache(lambda: words_of(PAGE))


@pytest.mark.parametrize(
    "technique", slow_but([name for name in TECHNIQUES if not name.startswith("compiled layers")], TECHNIQUES)
)
@pytest.mark.parametrize("kind", slow_but(["SFT"], EVERY_TRAINER))
def test_a_technique_in_a_trainer(kind, technique):
    found = cell(kind, TECHNIQUES[technique])
    if found.word.startswith("needs "):
        pytest.skip(found.word)
    assert page()[technique, kind] == found.word, "docs/matrix.md is stale: `python -m tests.exactness` writes it anew"


def test_the_page_has_no_other_rows():
    assert page().keys() == {(technique, kind) for technique in TECHNIQUES for kind in EVERY_TRAINER}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "first", "second"), [(kind, *pair) for kind in ("SFT", "DPO") for pair in pairs(kind)]
)
def test_two_techniques_together(kind, first, second):
    check_pair(kind, TECHNIQUES[first], TECHNIQUES[second])
