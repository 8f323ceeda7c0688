"""`python -m tests.exactness` writes docs/matrix.md: every memory technique in every trainer, as training says.

With `--ranks` it writes docs/matrix-ranks.md: every technique on two ranks, in each way to spread a run. `make docs`
draws their pictures.
"""

from __future__ import annotations

import argparse
import contextlib
import io

from tests.support.heap import young_heap
from tests.support.matrix.matrix import TECHNIQUES, Cell, cell
from tests.support.matrix.matrix_models import EVERY_TRAINER
from tests.support.matrix.matrix_page import OF_RANKS, OPENING_OF_RANKS, PAGE, page
from tests.support.matrix.ranks_matrix import WAYS, cells_of, techniques


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.exactness", description=__doc__)
    parser.add_argument("--ranks", action="store_true", help="write the page of techniques over ranks")
    if parser.parse_args().ranks:
        write_ranks()
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


if __name__ == "__main__":
    main()
