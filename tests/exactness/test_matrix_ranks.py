"""Every memory technique on two ranks trains what it trains on one, and docs/matrix-ranks.md says so."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from docs_site.matrix_table import words_of
from tests.support.matrix.matrix import TECHNIQUES
from tests.support.matrix.matrix_page import OF_RANKS
from tests.support.matrix.ranks_matrix import NEEDS, WAYS, cells_of, techniques


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_every_technique_over_ranks(way):
    if find_spec(NEEDS.get(way, "torch")) is None:
        pytest.skip(f"needs {NEEDS[way]}")
    page = words_of(OF_RANKS)
    stale = "docs/matrix-ranks.md is stale: `python -m tests.exactness --ranks` writes it anew"
    found = {name: told(name, cell.word) for name, cell in cells_of(way).items()}
    assert {name: told(name, page[name, way]) for name in techniques()} == found, stale


def told(name: str, word: str) -> str:
    """A technique that rounds may be exact or not, as a machine rounds; that it is trained is not up to the machine."""
    return word if TECHNIQUES[name].changes is None or word == "refused" else "trained"
