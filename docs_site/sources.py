"""What the website is built from: the pages of docs/ as the site has them, and those that come from code."""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from docs_site import devices_page
from docs_site.api_pages import api_pages
from docs_site.navigation import navigation
from docs_site.notebook_page import notebook_page
from docs_site.source_links import without_source_links

DOCS = Path(__file__).parents[1] / "docs"
ASSETS = Path(__file__).parent / "assets"


@dataclass(frozen=True)
class Sources:
    """All that the builder reads, written into a folder.

    Attributes:
        navigation: titles and their pages or sections, as Zensical's `nav` has them.
        markdown: of each page, by its path.
    """

    navigation: list[Any]
    markdown: dict[str, str]


def write_sources(folder: Path, repository: str | None = None) -> Sources:
    """Writes every page as Markdown, and what pages show, into a new folder.

    Args:
        folder: does not exist yet.
        repository: its address, to which links out of docs/ lead; None makes them text.
    """
    shutil.copytree(DOCS, folder)
    shutil.copytree(ASSETS, folder / "assets")
    markdown = {page.path: page.markdown for page in api_pages()}
    for path in sorted(DOCS.rglob("*")):
        name = path.relative_to(DOCS)
        if path.suffix == ".ipynb":
            text, pictures = notebook_page(path)
            name = name.with_suffix(".md")
            for picture, content in pictures.items():
                (folder / name.parent / picture).write_bytes(content)
        elif path.suffix == ".md":
            text = path.read_text(encoding="utf-8").replace(".ipynb)", ".md)")
        else:
            continue
        text = without_source_links(text, name.as_posix(), repository)
        markdown[name.as_posix()] = devices_page.with_links(text, name.as_posix())
    for path, text in markdown.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text, encoding="utf-8")
    (folder / devices_page.PATH).write_text(devices_page.content(), encoding="utf-8")
    reference = {"Reference": [{page.title: page.path} for page in api_pages()]}
    return Sources([*devices_page.with_entry(navigation(DOCS)), reference], markdown)
