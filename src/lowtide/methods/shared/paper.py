"""The paper that a method is from, to be cited in the card of a model that it trained."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Paper:
    """A paper, on arXiv or elsewhere."""

    key: str
    """Its name in a bibliography."""
    title: str
    authors: tuple[str, ...]
    year: int
    arxiv: str = ""
    """Its number there."""
    elsewhere: str = ""
    """Its address, where it is not there."""

    @property
    def url(self) -> str:
        return self.elsewhere or f"https://arxiv.org/abs/{self.arxiv}"

    @property
    def citation(self) -> str:
        """A BibTeX entry."""
        fields = {
            "title": self.title,
            "author": " and ".join(self.authors),
            "year": str(self.year),
            **({"eprint": self.arxiv, "archivePrefix": "arXiv"} if self.arxiv else {}),
            "url": self.url,
        }
        width = max(map(len, fields))
        lines = [f"    {name:{width}} = {{{value}}}," for name, value in fields.items()]
        return "\n".join([f"@misc{{{self.key},", *lines, "}"])
