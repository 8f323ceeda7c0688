"""The page of `lowtide page` in the site: the same file, and the links to it.

It is no page of docs/, so that neither docs/index.md nor docs/plan.md can link to it where they are read in the
repository: the site adds the links.
"""

from typing import Any

from lowtide.cli.planning.page import NAME
from lowtide.planner.answers.kept_grid import grid
from lowtide.planner.answers.page import html_of

PATH = NAME.name
TITLE = "What do I need to train it?"
BEHIND = "plan.md"
"""The page that explains it, behind which it stands in the navigation and in the list of pages."""
IN_THE_LIST = f"- [{TITLE}]({PATH}): a model, a method and a device are chosen, and what fits is shown"


def content() -> str:
    """The page, as `lowtide page` writes it."""
    return html_of(grid())


def with_links(markdown: str, path: str) -> str:
    """A page of docs/ with links to the page of devices: where it is named, and in the list of pages."""
    if path == "index.md":
        lines = markdown.split("\n")
        (after,) = (number for number, line in enumerate(lines) if line.startswith("- [") and f"]({BEHIND})" in line)
        return "\n".join([*lines[: after + 1], IN_THE_LIST, *lines[after + 1 :]])
    return markdown.replace(f"`{PATH}`", f"[`{PATH}`]({PATH})") if path == BEHIND else markdown


def with_entry(nav: list[Any]) -> list[Any]:
    """A navigation with the page of devices behind the page that explains it."""
    found: list[Any] = []
    for entry in nav:
        ((title, value),) = entry.items()
        found.append({title: value if isinstance(value, str) else with_entry(value)})
        if value == BEHIND:
            found.append({TITLE: PATH})
    return found
