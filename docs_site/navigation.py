"""The navigation of the site is the list of pages in docs/index.md: a heading is a section, a link one of its pages."""

import re
from pathlib import Path
from typing import Any

INDEX = "index.md"
MEMORY = "memory.md"
"""Lists the page of each memory technique, which are a section of their own beneath it."""


def navigation(docs: Path) -> list[Any]:
    """Returns the front page and the sections of docs/index.md, a title and its page or pages each."""
    found: list[Any] = [{"lowtide": INDEX}]
    for section in (docs / INDEX).read_text(encoding="utf-8").split("\n## ")[1:]:
        title, _, body = section.partition("\n")
        entries: list[Any] = []
        for text, target in links(body):
            entries.append({text: site_path(target)})
            if target == MEMORY:
                entries.append({"Techniques": technique_pages(docs)})
        found.append({title: entries})
    return found


def technique_pages(docs: Path) -> list[dict[str, str]]:
    """Returns the pages of memory techniques by their own titles."""
    pages = sorted((docs / "memory").glob("*.md"))
    return [{_title(page): page.relative_to(docs).as_posix()} for page in pages]


def links(text: str) -> list[tuple[str, str]]:
    """Returns the text and target of each link that begins an item of a list."""
    return re.findall(r"^- \[([^\]]+)\]\(([^)#:]+)\)", text, re.MULTILINE)


def site_path(target: str) -> str:
    """Returns the page that the site has for a file: a notebook is a page like others."""
    return target.removesuffix(".ipynb") + ".md" if target.endswith(".ipynb") else target


def _title(page: Path) -> str:
    return page.read_text(encoding="utf-8").split("\n", 1)[0].removeprefix("# ")
