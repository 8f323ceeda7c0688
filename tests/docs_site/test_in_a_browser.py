"""The website in a real browser: every page, narrow and wide, light and dark. Needs Zensical and Chromium."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from docs_site.moved import MOVED
from tests.support.pages.browser import CHROMIUM, browser

ROOT = Path(__file__).parents[2]
ELSEWHERE = "404.html"
"""Its addresses begin at a server's root, which a folder has not."""
OWN = ("file:", "data:", "blob:")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CHROMIUM, reason="needs chromium, which this machine does not have"),
]


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> list[Path]:
    pytest.importorskip("zensical", reason="`make site` installs Zensical")
    folder = tmp_path_factory.mktemp("built") / "site"
    subprocess.run([sys.executable, "-m", "docs_site", "--to", str(folder)], cwd=ROOT, check=True)
    return [page for page in sorted(folder.rglob("*.html")) if page.name != ELSEWHERE]


@pytest.fixture(scope="module")
def moved(pages) -> list[Path]:
    """The old addresses, whose pages lead on."""
    return [page for page in pages if page.stem in MOVED]


WINDOWS = ((360, True), (768, False), (1400, False), (2000, True))
"""Widths, each in light or dark colours."""


@pytest.mark.parametrize("half", [0, 1], ids=["loaded-narrow", "loaded-wide"])
def test_every_page_is_readable_and_asks_for_nothing(pages, moved, half):
    """In every window: every second page is loaded in the narrowest, the others in the widest, and then resized."""
    wrong: dict[str, object] = {}
    listed = [each for each in pages if each not in moved]
    loaded, *others = WINDOWS[::-1] if half else WINDOWS
    with browser() as tab:
        for page in listed[half::2]:
            tab.open(page.as_uri(), width=loaded[0], dark=loaded[1])
            found = {(loaded[0], name): said for name, said in tab.audit().items() if said}
            for width, dark in others:
                tab.resize(width=width, dark=dark)
                found |= {(width, name): said for name, said in tab.audit().items() if said}
            fetched = [address for address in tab.requests if not address.startswith(OWN)]
            if found or fetched or tab.errors:
                wrong[page.name] = (found, list(tab.errors), fetched)
    assert len(listed) > 50
    assert wrong == {}


def test_the_column_of_the_text_fits_a_command(pages):
    (front,) = (page for page in pages if page.name == "index.html")
    with browser() as tab:
        for width in (1400, 2000):
            tab.open(front.as_uri(), width=width)
            wide = tab.run("document.querySelector('.md-content__inner pre code').clientWidth")
            assert wide >= 900, width


def test_an_old_address_leads_on(moved):
    assert [page.stem for page in moved] == sorted(MOVED)
    with browser() as tab:
        arrived = {page.stem: tab.follow(page.as_uri()).rsplit("/", 1)[-1] for page in moved}
    assert arrived == MOVED
