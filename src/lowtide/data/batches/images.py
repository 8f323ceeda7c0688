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

from lowtide.ragged import ImageSource, PositionRule, SegmentImage
from lowtide.score_rules import IGNORE

Stored = Mapping[str, Any]
"""An image as `datasets.Image` stores it: `bytes`, or `path`."""
IMAGES = "images"
"""The column of the images of a prepared row, as they are stored."""
OF_TEXT = ("input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids")
"""What a processor makes of text."""
KINDS = ("mm_token_type_ids", "token_type_ids")
"""Which of the tokens are of images, 1, and which are text, 0."""
PIXELS = "pixel_values"


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
        place: the token that the model looks for; that of a conversation if None.

    Raises:
        ValueError: the processor does not say which token stands for an image.
    """

    def __init__(self, processor: Any, position_rule: PositionRule | None = None, place: int | None = None) -> None:
        self.processor, self.position_rule = processor, position_rule
        self.mark: Any = getattr(processor, "image_token_id", None)
        """The token that stands for an image in a conversation."""
        self.place: Any = self.mark if place is None else place
        """The token that stands for a place of an image in a row."""
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
        made = self._made(self.processor.image_token, [stored])
        ids = made["input_ids"][0].tolist()
        if self.place not in ids or not isinstance(made.get(PIXELS), Tensor):
            raise ValueError(
                f"{type(self.processor).__name__} makes no token {self.place}, which the model looks for, or no "
                f"{PIXELS} of an image: they do not belong together, or lowtide does not know how its rows show images"
            )
        inputs = {name: value for name, value in made.items() if name not in OF_TEXT and isinstance(value, Tensor)}
        kinds = next((made[name][0].tolist() for name in KINDS if name in made), [0] * len(ids))
        marked = tuple(sorted({token for token, kind in zip(ids, kinds, strict=True) if kind}))
        first = ids.index(self.place)
        source = ImageSource(stored, first, len(ids))
        shown = SegmentImage(inputs, first, ids.count(self.place), hash(identity(stored)), marked, source)
        return ReadyImage(ids, shown)

    def token_ids(self, text: str, stored: Sequence[Stored]) -> list[int]:
        """What the processor makes of a whole text with these images."""
        return self._made(text, stored)["input_ids"][0].tolist()

    def row(self, text: str, stored: Sequence[Stored]) -> tuple[list[int], list[SegmentImage], dict[str, Tensor]]:
        """A text with images as tokens, as the images among them, and as all that the processor makes of it at once.

        Raises:
            ValueError: as `ready`.
        """
        made = self._made(text, stored)
        ids = made["input_ids"][0].tolist()
        return ids, self.shown(ids, stored, {}), {name: v for name, v in made.items() if isinstance(v, Tensor)}

    def _made(self, text: str, stored: Sequence[Stored]) -> Any:
        """What the processor makes of a text with these images."""
        pictures = []
        for each in stored:
            try:
                pictures.append(datasets.Image().decode_example(dict(each)))
            except (ImportError, MemoryError):
                raise
            except Exception as error:  # PIL has all kinds for broken files, and one for a file that says it is huge
                raise ValueError(f"{title_of(each)} cannot be read as an image ({_first_line(error)})") from error
        try:
            images = [pictures] if pictures else None
            return self.processor(images=images, text=[text], add_special_tokens=False, return_tensors="pt")
        except Exception as error:  # a class of each processor's own
            raise ValueError(
                f"{', '.join(map(title_of, stored))} cannot be made ready by {type(self.processor).__name__} "
                f"({_first_line(error)})"
            ) from error

    def shown(
        self, token_ids: Sequence[int], stored: Sequence[Stored], known: dict[Any, ReadyImage], *, whole: bool = True
    ) -> list[SegmentImage]:
        """The images among the tokens of a segment; none where it shows none.

        Args:
            stored: those of the row, all of which the segment shows, or none.
            known: those that were made ready before, which is added to.
            whole: False where the segment may show the first of them alone.

        Raises:
            ValueError: they fill another number of tokens than there are.
        """
        places = torch.nonzero(torch.as_tensor(token_ids) == self.place).flatten().tolist()
        if not places:
            return []
        found, filled = [], 0
        for each in stored:
            if not whole and filled >= len(places):
                break
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
        return sum(int((part == self.place).sum()) for part in parts)

    def unscored(self, labels: Sequence[int]) -> list[int]:
        """Labels without those of images: nothing predicts a place of an image."""
        return [IGNORE if label == self.place else label for label in labels]


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
