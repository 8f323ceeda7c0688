"""The images of the prompts of a rollout: as they are stored, which is what a checkpoint keeps, and made ready once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from datasets import Image
from torch import Tensor

from lowtide.data.batches.images import ImageReader, ReadyImage, Stored, identity
from lowtide.data.formats.conversation import check_messages
from lowtide.data.formats.images import of_prompt, pictured, take_images
from lowtide.ragged import PositionRule, SegmentImage

BYTES, PATHS, OF_PROMPTS = "image.{number}.bytes", "image_paths", "images_of_prompts"
"""How images are named on disk."""


@dataclass
class PromptImages:
    """The images of prompts.

    Args:
        reader: makes them ready.
        stored: of each prompt, in their order.
    """

    reader: ImageReader
    stored: list[Sequence[Stored]]
    _ready: dict[Any, ReadyImage] = field(default_factory=dict)

    @classmethod
    def of_rows(cls, reader: ImageReader, rows: Sequence[Mapping[str, Any]]) -> PromptImages:
        """The images of the prompts of dataset rows."""
        return cls(reader, [take_images(of_prompt(row))[1] for row in rows])

    def __bool__(self) -> bool:
        """Whether any prompt shows one."""
        return any(self.stored)

    @property
    def position_rule(self) -> PositionRule | None:
        """How the model counts positions on several axes."""
        return self.reader.position_rule

    def among(self, number: int, token_ids: Sequence[int]) -> list[SegmentImage]:
        """Those of a prompt among its tokens.

        Raises:
            ValueError: one cannot be read, or they fill another number of tokens.
        """
        if not self.stored[number]:
            return []
        return self.reader.shown(token_ids, self.stored[number], self._ready)

    def of_prompt(self, number: int) -> tuple[Any, ...]:
        """Names the images of a prompt."""
        return tuple(identity(each) for each in self.stored[number])

    def seen_in(self, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The rows of the prompts as TRL's reward functions see them: with pictures, also among parts of messages."""
        known: dict[Any, Any] = {}

        def picture(stored: Stored) -> Any:
            if identity(stored) not in known:
                known[identity(stored)] = Image().decode_example(dict(stored))
            return known[identity(stored)]

        made = []
        for row, stored in zip(rows, self.stored, strict=True):
            seen = {name: _decoded(value, picture) for name, value in row.items()}
            rest, _ = take_images(of_prompt(row))
            if isinstance(rest["prompt"], list):
                seen["prompt"] = pictured(check_messages(rest["prompt"], "prompt"), [picture(each) for each in stored])
            made.append(seen)
        return made

    def on_disk(self, chosen: Sequence[int]) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors and JSON that `from_disk` makes the images of some prompts of."""
        distinct: dict[Any, int] = {}
        of_prompts = [[distinct.setdefault(each, len(distinct)) for each in self.of_prompt(n)] for n in chosen]
        tensors = {
            BYTES.format(number=number): torch.frombuffer(bytearray(held), dtype=torch.uint8)
            for (_, held), number in distinct.items()
            if held
        }
        return tensors, {PATHS: [path for path, _ in distinct], OF_PROMPTS: of_prompts}

    @classmethod
    def from_disk(
        cls, reader: ImageReader, tensors: dict[str, Tensor], known: dict[str, Any], group: Sequence[int]
    ) -> PromptImages:
        """The images of prompts that were saved.

        Args:
            group: of each prompt, its place among those that were saved.
        """
        images = []
        for number, path in enumerate(known[PATHS]):
            held = tensors.get(BYTES.format(number=number))
            images.append({"path": path, "bytes": None if held is None else held.numpy().tobytes()})
        return cls(reader, [[images[n] for n in known[OF_PROMPTS][place]] for place in group])


def _decoded(value: Any, picture: Callable[[Stored], Any]) -> Any:
    """A value of a column whose images are as they are stored, with pictures in their place."""
    if isinstance(value, list):
        return [_decoded(each, picture) for each in value]
    if isinstance(value, Mapping) and {*value} == {"bytes", "path"} and any(value.values()):
        return picture(value)
    return value
