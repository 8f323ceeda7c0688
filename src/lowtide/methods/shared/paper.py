"""The paper that a method is from, to be cited in the card of a model that it trained."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Paper:
    """A paper on arXiv."""

    key: str
    """Its name in a bibliography."""
    title: str
    authors: tuple[str, ...]
    year: int
    arxiv: str
    """Its number there."""

    @property
    def url(self) -> str:
        return f"https://arxiv.org/abs/{self.arxiv}"

    @property
    def citation(self) -> str:
        """A BibTeX entry."""
        fields = {
            "title": self.title,
            "author": " and ".join(self.authors),
            "year": str(self.year),
            "eprint": self.arxiv,
            "archivePrefix": "arXiv",
            "url": self.url,
        }
        width = max(map(len, fields))
        lines = [f"    {name:{width}} = {{{value}}}," for name, value in fields.items()]
        return "\n".join([f"@misc{{{self.key},", *lines, "}"])
