"""Images of rows: opened, and made ready for a model by its processor, when a batch is made.

Until then a row has of an image what `datasets` stores of it: the bytes of its file, or a path. What the processor
writes in the place of an image's mark, and what it makes of its pixels, comes from one call of it for each image, so
that an image means the same in every row and batch. transformers' processors make the same of all images of a batch at
once, but for padding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import datasets
import torch
from torch import Tensor

from lowtide.ragged import IGNORE, PositionRule, SegmentImage

Stored = Mapping[str, Any]
"""An image as `datasets.Image` stores it: `bytes`, or `path`."""
IMAGES = "images"
"""The column of the images of a prepared row, as they are stored."""
OF_TEXT = ("input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids")
"""What a processor makes of text."""


@dataclass(frozen=True)
class ReadyImage:
    """What a processor makes of an image."""

    token_ids: Sequence[int]
    """What stands in a row in the place of the image's mark."""
    shown: SegmentImage
    """Its place is that among `token_ids`."""


class ImageReader:
    """Makes images ready for a model.

    Args:
        processor: the model's, with an image processor and a tokenizer.
        position_rule: how the model counts positions on several axes.

    Raises:
        ValueError: the processor does not say which token stands for an image.
    """

    def __init__(self, processor: Any, position_rule: PositionRule | None = None) -> None:
        self.processor, self.position_rule = processor, position_rule
        self.mark: Any = getattr(processor, "image_token_id", None)
        """The token that stands for an image in a conversation, and for a place of it in a row."""
        if not isinstance(self.mark, int) or not isinstance(getattr(processor, "image_token", None), str):
            raise ValueError(
                f"the processor ({type(processor).__name__}) does not say which token stands for an image "
                "(image_token, image_token_id): lowtide does not know how its rows show images"
            )

    def ready(self, stored: Stored) -> ReadyImage:
        """An image made ready.

        Raises:
            ValueError: it cannot be opened, or the processor cannot take it; says which image and why.
        """
        try:
            picture = datasets.Image().decode_example(dict(stored))
            made = self.processor(
                images=[[picture]],
                text=[self.processor.image_token],
                add_special_tokens=False,
                return_tensors="pt",
            )
        except (OSError, ValueError, SyntaxError, TypeError) as error:  # PIL has all of these for broken files
            raise ValueError(f"{title_of(stored)} cannot be read as an image ({_first_line(error)})") from error
        ids = made["input_ids"][0].tolist()
        inputs = {name: value for name, value in made.items() if name not in OF_TEXT and isinstance(value, Tensor)}
        shown = SegmentImage(inputs, ids.index(self.mark), ids.count(self.mark), hash(identity(stored)))
        return ReadyImage(ids, shown)

    def token_ids(self, text: str, stored: Sequence[Stored]) -> list[int]:
        """What the processor makes of a whole text with these images."""
        pictures = [datasets.Image().decode_example(dict(each)) for each in stored]
        images = [pictures] if pictures else None
        made = self.processor(images=images, text=[text], add_special_tokens=False, return_tensors="pt")
        return made["input_ids"][0].tolist()

    def shown(
        self, token_ids: Sequence[int], stored: Sequence[Stored], known: dict[Any, ReadyImage]
    ) -> list[SegmentImage]:
        """The images among the tokens of a segment; none where it shows none.

        Args:
            stored: those of the row, all of which the segment shows, or none.
            known: those that were made ready before, which is added to.

        Raises:
            ValueError: they fill another number of tokens than there are.
        """
        places = torch.nonzero(torch.as_tensor(token_ids) == self.mark).flatten().tolist()
        if not places:
            return []
        found, filled = [], 0
        for each in stored:
            image = known.get(identity(each)) or self.ready(each)
            known[identity(each)] = image
            start = places[min(filled, len(places) - 1)]
            found.append(replace(image.shown, start=start))
            filled += image.shown.tokens
        if filled != len(places):
            names = ", ".join(map(title_of, stored))
            raise ValueError(
                f"a row has {len(places)} tokens of images, and its images ({names}) fill {filled}: they have changed "
                "since the row was prepared. Prepare the rows anew, under other file names or with "
                "datasets.disable_caching()"
            )
        return found

    def places(self, rows: Any, column: str) -> int:
        """How many tokens of a column of prepared rows are of images."""
        table: Any = rows.with_format("arrow").select_columns([column])
        parts = (part[column].combine_chunks().flatten().to_numpy() for part in table.iter(1000))
        return sum(int((part == self.mark).sum()) for part in parts)

    def unscored(self, labels: Sequence[int]) -> list[int]:
        """Labels without those of images: nothing predicts a place of an image."""
        return [IGNORE if label == self.mark else label for label in labels]


def title_of(stored: Stored) -> str:
    """What messages call an image."""
    if stored.get("path"):
        return repr(stored["path"])
    return f"an image of {len(stored.get('bytes') or b''):,} bytes"


def identity(stored: Stored) -> tuple[Any, Any]:
    """The same for the same image."""
    return stored.get("path"), stored.get("bytes")


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0] or type(error).__name__
