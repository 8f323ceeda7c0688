"""The pictures of docs/matrix.md and docs/matrix-ranks.md, from the words of their tables."""

from pathlib import Path

from bench.chart_docs import FOLDER
from bench.charts import grid_chart
from bench.processes import ROOT

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


def words_of(page: Path) -> dict[tuple[str, str], str]:
    """The words of a page's table, by technique and column; without what the technique saves, and the reasons."""
    lines = page.read_text(encoding="utf-8").splitlines()
    rows = [line.strip("|").split("|") for line in lines if line.startswith("|")]
    kinds = [title.strip() for title in rows[0][2:-1]]
    return {
        (row[0].partition("<br>")[0].strip(), kind): word.strip()
        for row in rows[2:]
        for kind, word in zip(kinds, row[2:-1], strict=True)
    }


def picture_of(page: Path) -> Path:
    """Where the picture of a page lies."""
    return FOLDER / f"{page.stem}.svg"
