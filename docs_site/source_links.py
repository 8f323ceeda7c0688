"""Links from docs/ to files of the repository beside it, which a website has no page for.

With `repo_url` in zensical.yml they lead to the repository; without it they are the text alone.
"""

import posixpath
import re

LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(((?:\.\./)+[^)#\s]*)(#[^)\s]*)?\)")


def without_source_links(markdown: str, page: str, repository: str | None) -> str:
    """Returns the page with its links to files outside of docs/ replaced.

    Args:
        markdown: of the page.
        page: its path within docs/.
        repository: the address of the repository, or None.
    """

    def replaced(match: re.Match) -> str:
        text, target, heading = match.group(1), match.group(2), match.group(3) or ""
        path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), target))
        if path.startswith("docs/"):
            return match.group(0)
        return f"[{text}]({repository.rstrip('/')}/blob/main/{path}{heading})" if repository else text

    return LINK.sub(replaced, markdown)
