"""The website: its parts by themselves, and the whole where Zensical is installed."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import lowtide
from docs_site.api_pages import api_pages
from docs_site.docstrings import markdown_of
from docs_site.llms_text import first_sentence, llms_text
from docs_site.moved import MOVED, write_redirects
from docs_site.navigation import navigation
from docs_site.notebook_page import notebook_page
from docs_site.source_links import without_source_links
from lowtide.planner.answers.kept_grid import grid
from lowtide.planner.answers.page import html_of
from tests.support.pages.pages import headings

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def paths(nav: list) -> list[str]:
    """All pages of a navigation."""
    return [
        path
        for entry in nav
        for value in entry.values()
        for path in ([value] if isinstance(value, str) else paths(value))
    ]


def test_the_navigation_has_every_page_once():
    listed = paths(navigation(DOCS))
    pages = [page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")]
    notebooks = [page.relative_to(DOCS).with_suffix(".md").as_posix() for page in DOCS.rglob("*.ipynb")]
    assert sorted(listed) == sorted(pages + notebooks), "docs/index.md lists every page, at the start of an item"


def test_links_out_of_docs_are_text_or_lead_to_the_repository():
    text = "[a](../src/lowtide/ragged.py), [b](sft.md), [c](../../src/x.py#L3), [d](../memory.md)"
    assert (
        without_source_links(text, "memory/x.md", None)
        == "[a](../src/lowtide/ragged.py), [b](sft.md), c, [d](../memory.md)"
    )
    assert without_source_links(text, "plan.md", None).startswith("a, [b](sft.md)")
    there = without_source_links("[c](../../src/x.py#L3)", "memory/x.md", "https://example.org/lowtide/")
    assert there == "[c](https://example.org/lowtide/blob/main/src/x.py#L3)"


def test_a_docstring_becomes_markdown():
    text = "Does it.\n\nArgs:\n    a: the first\n        one.\n    b (int): another.\n\nReturns:\n    A number."
    assert markdown_of(text) == (
        "Does it.\n\n**Args**\n\n- `a`: the first one.\n- `b` (int): another.\n\n**Returns**\n\nA number."
    )


def test_llms_txt_lists_pages_with_their_first_sentence():
    page = "# Title\n\n<!-- generated -->\n\n    a command\n\nWhat [it](x.md) is. More."
    assert first_sentence(page) == "What it is."
    text = llms_text("lowtide", "What it is.", {"Part": [("Title", "a.md")]}, {"a.md": page})
    assert text == "# lowtide\n\n> What it is.\n\n## Part\n\n- [Title](a.md): What it is.\n"


def test_the_reference_has_every_public_name():
    text = "\n".join(page.markdown for page in api_pages())
    for name in lowtide.__all__:
        assert re.search(rf"^## .*\b{name}\b", text, re.MULTILINE), name
    assert "| `tokens_per_microbatch` | `None` |" in text


def test_a_notebook_becomes_a_page_with_its_pictures(tmp_path):
    cells = [
        {"cell_type": "markdown", "source": ["# Title"]},
        {
            "cell_type": "code",
            "source": ["f()"],
            "outputs": [{"data": {"image/svg+xml": ["<svg/>"], "text/plain": ["x"]}}],
        },
        {"cell_type": "code", "source": ["1"], "outputs": [{"output_type": "stream", "text": ["one\n"]}]},
    ]
    path = tmp_path / "n.ipynb"
    path.write_text(json.dumps({"cells": cells}))
    text, pictures = notebook_page(path)
    assert pictures == {"n-1.svg": b"<svg/>"}
    assert "![x](n-1.svg)" in text
    assert "```text\none\n```" in text


def test_an_old_address_leads_to_where_its_text_is_now(tmp_path):
    for target in MOVED.values():
        page, _, heading = target.partition("#")
        with (tmp_path / page).open("a") as file:
            file.write(f'<h2 id="{heading}">')
        assert heading in headings(DOCS / page.replace(".html", ".md"))
    write_redirects(tmp_path)
    assert 'url=plan.html#on-which-devices"' in (tmp_path / "gpus.html").read_text()
    with pytest.raises(ValueError, match="is a page again"):
        write_redirects(tmp_path)
    (tmp_path / "gpus.html").unlink()
    (tmp_path / "plan.html").write_text("")
    with pytest.raises(ValueError, match="no such heading"):
        write_redirects(tmp_path)


@pytest.mark.slow
def test_the_site_builds_strictly_and_asks_nobody_else(tmp_path):
    pytest.importorskip("zensical", reason="`make site` installs Zensical")
    site = tmp_path / "site"
    built = subprocess.run(
        [sys.executable, "-m", "docs_site", "--to", str(site)], cwd=ROOT, capture_output=True, text=True
    )
    assert built.returncode == 0, built.stderr
    for page in site.rglob("*.html"):
        fetched = re.findall(r'<(?:script|img|link|iframe)[^>]*(?:src|href)="(https?:[^"]*)"', page.read_text())
        assert not fetched, f"{page.name} fetches {fetched}"
    devices = site / "lowtide-gpus.html"
    assert devices.read_text(encoding="utf-8") == html_of(grid())
    for page, links in (("index.html", 2), ("plan.html", 2), ("memory/adapters.html", 1)):
        address = rf'<a href="{"../" if "/" in page else "(?:./)?"}lowtide-gpus.html"(?! class="md-footer)'
        assert len(re.findall(address, (site / page).read_text(encoding="utf-8"))) == links, page
    assert "recipes.md" in (site / "llms.txt").read_text()
    assert (site / "search.json").is_file()
