"""`llms.txt`: the pages in one list for language models (llmstxt.org), and the Markdown of each beside its page."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

Page = tuple[str, str]
"""Its title, and its path as Markdown."""


def llms_text(name: str, summary: str, sections: Mapping[str, Iterable[Page]], pages: Mapping[str, str]) -> str:
    """Returns the text of llms.txt.

    Args:
        name: of the project.
        summary: what it is, in a sentence.
        sections: the pages of each section.
        pages: the Markdown of each page by its path.
    """
    lines = [f"# {name}", "", f"> {summary}"]
    for title, listed in sections.items():
        lines += ["", f"## {title}", ""]
        lines += [f"- [{text}]({path}): {first_sentence(pages[path])}" for text, path in listed]
    return "\n".join(lines) + "\n"


def first_sentence(markdown: str) -> str:
    """Returns the first sentence of a page below its title, without its links."""
    for paragraph in re.split(r"\n\s*\n", re.sub(r"<!--.*?-->", "", markdown, flags=re.DOTALL)):
        text = " ".join(paragraph.split())
        if text and text[0] not in "#|`!<-*" and not paragraph.startswith("    "):
            plain = re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", text)
            return re.split(r"(?<=[.:])\s", plain, maxsplit=1)[0]
    return ""


def pages_of(nav: Iterable[Any]) -> list[Page]:
    """Returns the pages of a part of a navigation that have Markdown, those of its sections too."""
    found: list[Page] = []
    for entry in nav:
        for title, value in entry.items():
            if not isinstance(value, str):
                found += pages_of(value)
            elif value.endswith(".md"):
                found.append((title, value))
    return found
