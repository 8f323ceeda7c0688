"""What is scored: completions with their prompts, and all that their dataset rows say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lowtide.data.formats.images import in_words

NOT_COLUMNS = ("prompt", "completion", "completion_ids")
"""The columns of a row that reward functions do not get: what they get by these names is the rollout's."""
SHOWN = 40
"""Characters of a prompt in a message."""


@dataclass(frozen=True)
class Completed:
    """Completions, one entry for each in every list; those of one prompt stand together."""

    prompts: Sequence[Any]
    """A text, or the messages of a conversation."""
    completions: Sequence[Any]
    """A text where the prompt is one, else the messages that follow: the assistant's and the tools'."""
    completion_ids: Sequence[Sequence[int]] | None = None
    """None where there are texts alone, as before a judge; functions do not get them then."""
    prompt_ids: Sequence[Sequence[int]] | None = None
    columns: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """The other columns of the dataset, each row's value repeated for its completions."""
    environments: Sequence[Any] | None = None
    """The environment of each completion, where there are some."""
    tokenizer: Any = None
    """Of the policy, which finds characters of a completion among its tokens; None where it has several turns."""
    numbers: Sequence[int] | None = None
    """The number of each completion's dataset row, for messages."""

    def __post_init__(self) -> None:
        lists = {"prompts": self.prompts, "completions": self.completions, "completion_ids": self.completion_ids}
        lists |= {"prompt_ids": self.prompt_ids, "environments": self.environments, "numbers": self.numbers}
        lists |= {f"column {name!r}": values for name, values in self.columns.items()}
        for name, values in lists.items():
            if values is not None and len(values) != len(self.completions):
                raise ValueError(f"{len(self.completions)} completions are to be scored, but {name} has {len(values)}")

    @classmethod
    def of(
        cls, rows: Sequence[Mapping[str, Any]], prompts: Sequence[Any], completions: Sequence[Any], **more: Any
    ) -> Completed:
        """Completions of dataset rows.

        Args:
            rows: of each completion its row.
            more: the other fields.
        """
        names = [name for name in (rows[0] if rows else ()) if name not in NOT_COLUMNS]
        columns = {name: [row.get(name) for row in rows] for name in names}
        return cls(prompts, completions, columns=columns, **more)

    def __len__(self) -> int:
        return len(self.completions)

    @property
    def is_chat(self) -> bool:
        """Whether prompts are conversations."""
        return bool(self.prompts) and not isinstance(self.prompts[0], str)

    def where(self, number: int) -> str:
        """A completion for a message: its number, its row's number, and how its prompt begins."""
        prompt = self.prompts[number]
        if not isinstance(prompt, str):
            prompt = in_words(prompt[-1].get("content")) if prompt else ""
        start = prompt if len(prompt) <= SHOWN else f"{prompt[:SHOWN]}..."
        row = "" if self.numbers is None else f" of row {self.numbers[number]}"
        return f"completion {number} of the batch{row} (the first is 0; its prompt begins {start!r})"

    def alone(self, number: int) -> Completed:
        """One completion by itself."""
        one = slice(number, number + 1)
        lists = ("prompts", "completions", "completion_ids", "prompt_ids", "environments", "numbers")
        chosen: dict[str, Any] = {name: values[one] for name in lists if (values := getattr(self, name)) is not None}
        return replace(self, columns={name: values[one] for name, values in self.columns.items()}, **chosen)

    def arguments(self) -> dict[str, Any]:
        """What reward functions get: lists and messages of their own, so that one that changes them changes nothing
        else."""
        own = {"prompts": self.prompts, "completions": self.completions, "completion_ids": self.completion_ids}
        given = {**self.columns, **own, "environments": self.environments}
        return {name: [_copied(each) for each in values] for name, values in given.items() if values is not None}


def _copied(value: Any) -> Any:
    """A copy of lists and mappings, at any depth; what they hold besides, such as images, is the same."""
    if isinstance(value, dict):
        return {name: _copied(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_copied(each) for each in value] if value and isinstance(value[0], dict | list) else value.copy()
    return value
