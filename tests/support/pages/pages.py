"""The documentation's pages, and the commands that they show."""

import re
import shlex
from pathlib import Path

from lowtide.cli.training.launch import split

DOCS = Path(__file__).parents[3] / "docs"
PAGES = sorted(page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md"))


def command_lines(text: str) -> list[list[str]]:
    """The words of each `lowtide` command of a page; what stands in brackets, as in a usage line, is left out."""
    joined = re.sub(r"\\\n\s*", " ", text)
    lines = re.findall(r"^(?:    )?(?:[A-Z_]+=\S+ )*lowtide ([a-z][\w.-]*(?: .*)?)$", joined, re.MULTILINE)
    found = [re.sub(r"\[[^\]]*\]|\.\.\.", "", line) for line in lines if " --" in line or line in ("demo", "doctor")]
    return [split(shlex.split(line, comments=True))[0] for line in found]


def fenced(page: str, language: str) -> list[str]:
    """The fenced blocks of a page in a language."""
    text = (DOCS / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def write_my_module() -> None:
    """Writes the `my_module.py` of all pages into the current folder: Python imports a module once."""
    pages = ("own-losses.md", "own-methods.md", "own-techniques.md")
    parts = [fenced(page, "python")[0] for page in pages]
    rewards = "def my_reward(completions, **rest):\n    return [0.5 for _ in completions]\n"
    Path("my_module.py").write_text("\n".join([*parts, rewards]), encoding="utf-8")


def run(page: str) -> dict:
    """The names that the examples of a page leave behind, one run after the other."""
    names: dict = {}
    blocks = fenced(page, "python")
    assert blocks, f"{page} has no example"
    for block in blocks:
        exec(compile(block, page, "exec"), names)
    return names


def headings(page: Path) -> set[str]:
    """A page's headings as links have them."""
    found = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in found}
