"""The words of the tables of docs/matrix.md and docs/matrix-ranks.md."""

from pathlib import Path


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
