"""The website in a real browser: every page, narrow and wide, light and dark. Needs mkdocs-material and Chromium."""

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
    pytest.importorskip("material", reason="`make site` installs mkdocs-material")
    folder = tmp_path_factory.mktemp("site")
    config = ROOT / "docs_site" / "mkdocs.yml"
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "-f", str(config), "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True)
    return [page for page in sorted(folder.rglob("*.html")) if page.name != ELSEWHERE]


@pytest.fixture(scope="module")
def moved(pages) -> list[Path]:
    """The old addresses, whose pages lead on."""
    return [page for page in pages if page.stem in MOVED]


@pytest.mark.parametrize(
    ("loaded", "resized"), [((360, True), (768, False)), ((1400, False), (2000, True))], ids=["narrow", "wide"]
)
def test_every_page_is_readable_and_asks_for_nothing(pages, moved, loaded, resized):
    """As it is loaded in a window, in light or dark colours, and as it is then shown in another."""
    wrong: dict[str, object] = {}
    with browser() as tab:
        for page in [each for each in pages if each not in moved]:
            tab.open(page.as_uri(), width=loaded[0], dark=loaded[1])
            found = {name: said for name, said in tab.audit().items() if said}
            tab.resize(width=resized[0], dark=resized[1])
            found |= {f"{name}, resized": said for name, said in tab.audit().items() if said}
            found |= {"errors": list(tab.errors)} if tab.errors else {}
            fetched = [address for address in tab.requests if not address.startswith(OWN)]
            if found or fetched:
                wrong[page.name] = found | {"fetched": fetched}
    assert len(pages) > 50
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
