"""The pictures of docs/matrix.md and docs/matrix-ranks.md, from the words of their tables."""

from pathlib import Path

from bench.docs.chart_docs import FOLDER
from bench.docs.charts import grid_chart
from bench.measuring.processes import ROOT
from docs_site.matrix_table import words_of

PAGES = tuple(ROOT / "docs" / name for name in ("matrix.md", "matrix-ranks.md"))
"""Written by `python -m tests.exactness`."""


def write_matrix_charts() -> None:
    """Draws what is written on the pages beside the other charts."""
    for page in PAGES:
        picture_of(page).write_text(matrix_chart(page), encoding="utf-8")


def matrix_chart(page: Path) -> str:
    """Returns a page's table as SVG."""
    title = page.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
    return grid_chart(title, words_of(page))


def picture_of(page: Path) -> Path:
    """Where the picture of a page lies."""
    return FOLDER / f"{page.stem}.svg"
