"""`python -m tests.exactness` writes docs/matrix.md: every memory technique in every trainer, as training says."""

from __future__ import annotations

import argparse
import contextlib
import io

from tests.support.heap import young_heap
from tests.support.matrix import EVERY_TRAINER, TECHNIQUES, Cell, cell
from tests.support.matrix_page import PAGE, page


def main() -> None:
    argparse.ArgumentParser(prog="python -m tests.exactness", description=__doc__).parse_args()
    cells: dict[tuple[str, str], Cell] = {}
    with young_heap(), contextlib.redirect_stdout(io.StringIO()):
        for technique in TECHNIQUES.values():
            for kind in EVERY_TRAINER:
                cells[technique.name, kind] = cell(kind, technique)
    PAGE.write_text(page(TECHNIQUES, EVERY_TRAINER, cells), encoding="utf-8")
    print(f"wrote {PAGE.name}: {len(cells)} cells")


if __name__ == "__main__":
    main()
