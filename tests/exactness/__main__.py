"""`python -m tests.exactness` writes docs/matrix.md: every memory technique in every trainer, as training says.

With `--ranks` it writes docs/matrix-ranks.md: every technique on two ranks, in each way to spread a run. `make docs`
draws their pictures. With `--families` it writes docs/families.md: what each family of models trains with.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import tempfile

from tests.support.heap import young_heap
from tests.support.matrix import family_page
from tests.support.matrix.family_page import row_of, row_without_training, rows, trainer_of
from tests.support.matrix.matrix import TECHNIQUES, Cell, cell
from tests.support.matrix.matrix_models import EVERY_TRAINER
from tests.support.matrix.matrix_page import OF_RANKS, OPENING_OF_RANKS, PAGE, page
from tests.support.matrix.ranks_matrix import WAYS, cells_of, techniques
from tests.support.models.causal_families import REFUSED, TRAINED, UNTRIED, tiny_causal


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.exactness", description=__doc__)
    parser.add_argument("--ranks", action="store_true", help="write the page of techniques over ranks")
    parser.add_argument("--families", action="store_true", help="write the page of families of models")
    asked = parser.parse_args()
    if asked.ranks:
        write_ranks()
        return
    if asked.families:
        write_families()
        return
    cells: dict[tuple[str, str], Cell] = {}
    with young_heap(), contextlib.redirect_stdout(io.StringIO()):
        for technique in TECHNIQUES.values():
            for kind in EVERY_TRAINER:
                cells[technique.name, kind] = cell(kind, technique)
    PAGE.write_text(page(TECHNIQUES, EVERY_TRAINER, cells), encoding="utf-8")
    print(f"wrote {PAGE.name}: {len(cells)} cells")


def write_ranks() -> None:
    """Every way's packages have to be there."""
    found = {(name, way): cell for way in WAYS for name, cell in cells_of(way).items()}
    tried = {name: TECHNIQUES[name] for name in techniques()}
    OF_RANKS.write_text(page(tried, tuple(WAYS), found, OPENING_OF_RANKS), encoding="utf-8")
    print(f"wrote {OF_RANKS.name}: {len(found)} cells")


def write_families() -> None:
    found = {kind: row_without_training(kind) for kind in (*REFUSED, *UNTRIED)}
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        for kind in TRAINED:
            found[kind] = row_of(trainer_of(tiny_causal(kind), rows(), folder))
    family_page.PAGE.write_text(family_page.page(found), encoding="utf-8")
    print(f"wrote {family_page.PAGE.name}: {len(found)} families")


if __name__ == "__main__":
    main()
