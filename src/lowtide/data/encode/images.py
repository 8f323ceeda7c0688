"""Rows with images to token ids: the tokens that a processor writes for an image stand where its mark did.

The rows are encoded as texts first, each image one token, its mark. Then each mark gives way to what the processor
writes for that image. The row of tokens is the one that the processor makes of the whole conversation, which is
compared for the first row. None of an image's tokens is scored; TRL 1.16 scores them where it scores whole rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
from datasets import Features
from jaxtyping import Bool, Int

from lowtide.data.batches.images import IMAGES, ImageReader, Stored, identity
from lowtide.data.batches.token_rows import IGNORED, TokenRows, flatten
from lowtide.data.cache.fingerprint import combine
from lowtide.data.encode.chat import ChatEncoder
from lowtide.data.encode.truncation import Truncation, kept_range, kept_ranges
from lowtide.data.formats.conversation import check_messages
from lowtide.data.formats.images import IMAGE_COLUMNS, IMAGES_FEATURE, shows_images, take_images
from lowtide.data.formats.reading import ChatSample, RowPlace
from lowtide.data.options import TokenOptions

IMAGE_FEATURES = Features({IMAGES: IMAGES_FEATURE})
Ids = np.ndarray
"""Token ids, of whatever number."""
Options = TypeVar("Options", bound=TokenOptions)


class ImageExpander:
    """Puts what a processor writes for images in the place of their marks.

    Args:
        reader: makes images ready.
        source: what messages call the dataset.
        truncation: how rows will be cut.
    """

    def __init__(self, reader: ImageReader, source: str, truncation: Truncation) -> None:
        self.reader, self.source, self.truncation = reader, source, truncation
        self.first: list[Stored] = []
        """The images of the first row."""

    def check_first(self, chat: Any, sample: Any) -> None:
        """Refuses a processor that makes other tokens of the first conversation.

        Args:
            chat: encodes conversations; what encodes others is not looked at.
            sample: the first row's, with `IMAGE` where each image is shown.

        Raises:
            ValueError: names the processor.
        """
        if not (isinstance(chat, ChatEncoder) and isinstance(sample, ChatSample)):
            return
        [ids] = chat.encode([sample], RowPlace(self.source, [0]))
        self.check_text(ids, chat.text(sample))

    def check_text(self, ids: Sequence[int], text: str) -> None:
        """Refuses a processor that makes other tokens of the first row as a whole than of its parts.

        Args:
            ids: the tokens of the text, in which an image is one.
            text: with the processor's own mark of images.

        Raises:
            ValueError: names the processor.
        """
        if self._of_ids(ids, self.first, 0).token_ids.tolist() != self.reader.token_ids(text, self.first):
            raise ValueError(
                f"{self.source}: {type(self.reader.processor).__name__} makes other tokens of the first row as a whole "
                "than of its text and of each of its images: lowtide does not know how it shows images"
            )

    def checked(self, messages: Any, name: str, number: int) -> list[dict[str, Any]]:
        """The messages of one row, given in the column `name`, each with one text.

        Raises:
            ValueError: they are no messages; names the row.
        """
        with _of_row(RowPlace(self.source, [number]), 0):
            return check_messages(messages, name)

    def tokens_of(self, ids: Sequence[int], images: Sequence[Stored], number: int) -> list[int]:
        """The tokens of one row with those of its images.

        Args:
            ids: its tokens, in which an image is one.
            number: of the row.

        Raises:
            ValueError: as `expand`.
        """
        made = self._of_ids(ids, images, number)
        self._check_uncut([made], RowPlace(self.source, [number]))
        return made.token_ids.tolist()

    def take(
        self, batch: Mapping[str, Sequence[Any]], numbers: Sequence[int]
    ) -> tuple[dict[str, list[Any]], list[list[Stored]]]:
        """A batch of columns without images, and the images of each row.

        Raises:
            ValueError: a row's images and their places do not agree; the message names it.
        """
        place = RowPlace(self.source, numbers)
        rest: dict[str, list[Any]] = {name: [] for name in batch if name not in IMAGE_COLUMNS}
        images = []
        for index in range(len(numbers)):
            with _of_row(place, index):
                row, shown = take_images({name: values[index] for name, values in batch.items()})
            images.append(shown)
            for name, values in rest.items():
                values.append(row[name])
        return rest, images

    def expand(
        self, sides: Sequence[TokenRows], images: Sequence[Sequence[Stored]], numbers: Sequence[int]
    ) -> list[TokenRows]:
        """Rows, or both sides of each, with the tokens of their images.

        Raises:
            ValueError: an image cannot be read, has no place, or would be cut; the message names the row.
        """
        place = RowPlace(self.source, numbers)
        known: dict[Any, Ids] = {}
        tokens = []
        for index, shown in enumerate(images):
            with _of_row(place, index):
                tokens.append([self._tokens_of(each, known) for each in shown])
        made = [self._expanded(side, tokens, place) for side in sides]
        self._check_uncut(made, place)
        return made

    def _of_ids(self, ids: Sequence[int], images: Sequence[Stored], number: int) -> TokenRows:
        place, known = RowPlace(self.source, [number]), {}
        with _of_row(place, 0):
            tokens = [self._tokens_of(each, known) for each in images]
        flat, offsets = flatten([ids])
        return self._expanded(TokenRows(flat, flat, offsets), [tokens], place)

    def _tokens_of(self, stored: Stored, known: dict[Any, Ids]) -> Ids:
        key = identity(stored)
        if key not in known:
            known[key] = np.array(self.reader.ready(stored).token_ids)
        return known[key]

    def _expanded(self, rows: TokenRows, images: Sequence[Sequence[Ids]], place: RowPlace) -> TokenRows:
        at = np.flatnonzero(rows.token_ids == self.reader.mark)
        owner = np.searchsorted(rows.offsets, at, side="right") - 1
        places = np.bincount(owner, minlength=len(rows))
        if rows.groups is not None:
            images = _of_rounds(images, places, rows.groups, place)
        shown = np.array([len(each) for each in images])
        if (wrong := np.flatnonzero(places != shown)).size:
            index = int(wrong[0])
            raise place.error(
                index,
                f"it has {shown[index]} images and {places[index]} places for them, each of which is the token "
                f"{self.reader.processor.image_token!r} once the chat template is applied. The template must write it "
                "for each part {'type': 'image'}, and texts must not.",
            )
        pieces = [piece for each in images for piece in each]
        lengths = np.array([len(piece) for piece in pieces], dtype=np.int64)
        repeats = np.ones(len(rows.token_ids), dtype=np.int64)
        repeats[at] = lengths
        starts = np.zeros(len(repeats) + 1, dtype=np.int64)
        np.cumsum(repeats, out=starts[1:])
        index = np.repeat(np.arange(len(repeats)), repeats)
        token_ids, labels = rows.token_ids[index], rows.labels[index]
        of_image = (rows.token_ids == self.reader.mark)[index]
        if pieces:
            token_ids[of_image] = np.concatenate(pieces)
        labels[of_image] = IGNORED
        prompts = rows.prompt_lengths
        if prompts is not None:
            prompts = starts[rows.offsets[:-1] + prompts] - starts[rows.offsets[:-1]]
        weights = None if rows.weights is None else rows.weights[index]
        made = replace(rows, token_ids=token_ids, labels=labels, weights=weights, prompt_lengths=prompts)
        return replace(made, offsets=starts[rows.offsets])

    def _check_uncut(self, sides: Sequence[TokenRows], place: RowPlace) -> None:
        """Refuses limits that would cut into an image: its features would have no place."""
        first = sides[0]
        if len(sides) == 1 or first.prompt_lengths is None:
            ranges = [kept_range(side.lengths, side.prompt_lengths, self.truncation) for side in sides]
        else:
            prompts = np.minimum.reduce([side.prompt_lengths for side in sides if side.prompt_lengths is not None])
            ranges = kept_ranges([side.lengths for side in sides], prompts, self.truncation)
        for side, (start, stop) in zip(sides, ranges, strict=True):
            at = np.flatnonzero(side.token_ids == self.reader.place)
            owner = np.searchsorted(side.offsets, at, side="right") - 1
            local = at - side.offsets[owner]
            lost: Bool[np.ndarray, " marks"] = (local < start[owner]) | (local >= stop[owner])
            if lost.any():
                index = int(owner[lost][0])
                raise place.error(
                    index if side.groups is None else int(np.searchsorted(side.groups, index, side="right")) - 1,
                    f"of its {side.lengths[index]:,} tokens those to {int(local[owner == index].max()) + 1:,} are of "
                    "images or before one, and the limits on its length keep "
                    f"{int(start[index]):,} to {int(stop[index]):,}: raise max_length (None is no limit), or "
                    "max_prompt_length, or use smaller images.",
                )


def fingerprint_of_processor(processor: Any) -> str:
    """The same for processors that write the same tokens for an image."""
    plain = {name: value for name, value in vars(processor).items() if isinstance(value, str | int | float | bool)}
    return combine(type(processor).__name__, sorted(plain.items()), processor.image_processor.to_json_string())


def _of_rounds(
    images: Sequence[Sequence[Ids]],
    places: Int[np.ndarray, " rows"],
    groups: Int[np.ndarray, " groups+1"],
    place: RowPlace,
) -> list[Sequence[Ids]]:
    """The images of each round of conversations: the first of its conversation's.

    Raises:
        ValueError: no round shows all of them; names the row.
    """
    found: list[Sequence[Ids]] = []
    for index, (own, (start, stop)) in enumerate(zip(images, pairwise(groups.tolist()), strict=True)):
        if (most := places[start:stop].max()) < len(own):
            raise place.error(
                index,
                f"it has {len(own)} images, of which no turn of the assistant is given more than {most}: images that "
                "nobody answers, or that the chat template leaves out once more follows, belong to no turn. Remove "
                "them, or set turns='whole'.",
            )
        found += [own[:count] for count in places[start:stop]]
    return found


def expander_of(
    reader: ImageReader | None,
    first_row: Mapping[str, Any],
    options: Options,
    source: str,
    truncation: Truncation,
) -> tuple[ImageExpander | None, list[str], Options, dict[str, Any]]:
    """What a dataset of this first row needs: an expander, None where its rows show no images or nothing can read them;
    the columns of images; options with the processor's chat template, and what else tokens depend on of it; and the
    first row without images.

    Raises:
        ValueError: the first row's images and their places do not agree.
    """
    if reader is None or not shows_images(list(first_row), first_row):
        return None, [], options, dict(first_row)
    expander, processor = ImageExpander(reader, source, truncation), reader.processor
    options = replace(
        options,
        chat_template=options.chat_template or processor.chat_template,
        contents_in_parts=True,
        fingerprint=combine(options.fingerprint, fingerprint_of_processor(processor)),
    )
    rest, [expander.first] = expander.take({name: [value] for name, value in first_row.items()}, [0])
    columns = [name for name in first_row if name in IMAGE_COLUMNS]
    return expander, columns, options, {name: value for name, [value] in rest.items()}


def check_unpacked(packs_images: bool) -> None:
    """Refuses packing of rows with images."""
    if packs_images:
        raise ValueError(
            "packing=True puts rows end to end before their images are there: set packing=False. Rows with images run "
            "without padding all the same, several in a micro-batch"
        )


def images_column(images: Sequence[Sequence[Stored]]) -> pa.Array:
    """The column of the images of prepared rows."""
    return pa.array(images, pa.list_(pa.struct({"bytes": pa.binary(), "path": pa.string()})))


@contextmanager
def _of_row(place: RowPlace, index: int) -> Iterator[None]:
    """An error about a row says which."""
    try:
        yield
    except ValueError as error:
        raise place.error(index, error) from error
