"""Rows with images: which images a row shows, and where.

The form is TRL's: images in the column `images`, or one in `image`, and `{"type": "image"}` among the parts of a
message where each is shown. Where no message has such a part, all are shown before the text of the first user, as by
TRL's `prepare_multimodal_messages`. A part may bring its own image (`image`, `path` or `url` of a local file).

What is read after this are plain texts, in which Unicode's character for an object in a text stands for an image.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import datasets
from datasets import Features, Image, List

from lowtide.compat.datasets import with_features
from lowtide.data.formats.conversation import describe, quoted

IMAGE = "\ufffc"
"""Stands for an image in the text of a message (OBJECT REPLACEMENT CHARACTER)."""
IMAGE_COLUMNS = ("images", "image")
PROMPTS = ("messages", "conversations", "prompt")
"""Columns of messages that show a row's images."""
SIDES = ("chosen", "rejected", "reference")
"""Columns of messages that show them where there is no prompt of its own."""
ANSWERS = ("completion",)
OWN = ("image", "path", "url")
"""Under which names a part of a message brings its own image."""
IMAGES_FEATURE = List(Image(decode=False))

Row = Mapping[str, Any]


def shows_images(columns: Sequence[str], first_row: Row) -> bool:
    """Whether the rows of a dataset show images, as its columns or the messages of its first row say."""
    if not {*IMAGE_COLUMNS}.isdisjoint(columns):
        return True
    return any(shows_part(first_row.get(name)) for name in (*PROMPTS, *SIDES, *ANSWERS))


def undecoded(dataset: Any) -> Any:
    """The same rows, whose images are as they are stored: opening one is left to whoever can say which row it is of."""
    if isinstance(dataset, datasets.IterableDataset):
        return dataset.decode(False) if dataset.features else dataset
    return with_features(dataset, Features({name: _undecoded(each) for name, each in dataset.features.items()}))


def _undecoded(feature: Any) -> Any:
    if isinstance(feature, Image):
        return Image(mode=feature.mode, decode=False)
    if isinstance(feature, List):
        return List(_undecoded(feature.feature), length=feature.length)
    if isinstance(feature, Mapping):
        return {name: _undecoded(each) for name, each in feature.items()}
    return feature


def take_images(row: Row) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A row without images, with `IMAGE` where each was shown; and these images as they are stored, in that order.

    Raises:
        ValueError: images without a place, places without an image, or an image in an answer.
    """
    given, one = row.get("images"), row.get("image")
    if given is not None and one is not None:
        raise ValueError("the row has both 'images' and 'image': put all of its images into 'images'")
    given = one if given is None else given
    given = [] if given is None else given if isinstance(given, list) else [given]
    rest = {name: value for name, value in row.items() if name not in IMAGE_COLUMNS}
    prompts = [name for name in PROMPTS if isinstance(row.get(name), list)]
    names = prompts or [name for name in SIDES if isinstance(row.get(name), list)]
    if not names:  # texts, which have the processor's own mark
        return rest, [stored_form(each) for each in given]
    found: list[dict[str, Any]] | None = None
    for name in names:
        rest[name], shown = _taken(row[name], name, given)
        if found is not None and shown != found:
            raise ValueError(f"{quoted(names)} show other images: they are answers to one prompt")
        found = shown
    for name in (*SIDES, *ANSWERS) if prompts else ():
        if isinstance(row.get(name), list):
            rest[name], shown = _taken(row[name], name, [])
            if shown:
                raise ValueError(f"{name!r} shows an image: images belong into the prompt, since models write none")
    return rest, found or []


def of_prompt(row: Row) -> Row:
    """What of a row says which images its prompt shows."""
    return {name: row[name] for name in ("prompt", *IMAGE_COLUMNS) if name in row}


def shows_part(messages: Any) -> bool:
    """Whether messages have a part that is an image."""
    listed = messages if isinstance(messages, list) else []
    return any(_is_image(part) for message in listed for part in _parts(message) or ())


def pictured(messages: Sequence[Mapping[str, Any]], pictures: Sequence[Any]) -> list[dict[str, Any]]:
    """Messages in which each `IMAGE` gives way to a part with its picture, as TRL's functions get them."""
    left, made = deque(pictures), in_parts(messages)
    for message in made:
        if isinstance(message.get("content"), list):
            message["content"] = [
                {"type": "image", "image": left.popleft()} if _is_image(part) else part for part in message["content"]
            ]
    return made


def in_words(content: Any) -> str:
    """A content as text, for messages and tables; "[image]" stands for an image."""
    if not isinstance(content, list):
        return str(content or "")
    return "".join("[image]" if _is_image(part) else str(part.get("text") or "") for part in content)


def _taken(messages: list[Any], name: str, given: Sequence[Any]) -> tuple[list[Any], list[dict[str, Any]]]:
    """Messages with `IMAGE` in the place of each image, and the images."""
    left, shown = deque(given), []
    placed = shows_part(messages)
    made = []
    for message in messages:
        parts = _parts(message)
        if parts is None:
            if given and not placed and isinstance(message, Mapping) and _is_user(message):
                key = "value" if "value" in message else "content"
                message = {**message, key: IMAGE * len(given) + str(message[key])}
                shown += [stored_form(left.popleft()) for _ in given]
                placed = True
            made.append(message)
            continue
        texts = []
        for part in parts:
            if not _is_image(part):
                texts.append(part)
                continue
            own = next((part[key] for key in OWN if part.get(key) is not None), None)
            if own is None and not left:
                raise ValueError(
                    f"{name!r} shows more images than the row has ({len(given)}): each part {{'type': 'image'}} takes "
                    "the next one of the column 'images'"
                )
            shown.append(stored_form(left.popleft() if own is None else own))
            texts.append({"type": "text", "text": IMAGE})
        made.append({**message, "content": texts})
    if left:
        raise ValueError(
            f"the row has {len(given)} images, of which {name!r} shows {len(given) - len(left)}: put a part "
            "{'type': 'image'} into the content of a message where each is shown"
        )
    return made, shown


def stored_form(value: Any) -> dict[str, Any]:
    """An image as `datasets.Image` stores it, from a path, the bytes of a file, or a picture.

    Raises:
        ValueError: it is none of these.
    """
    if isinstance(value, Mapping) and {*value} <= {"bytes", "path"} and any(value.values()):
        return {"bytes": value.get("bytes"), "path": value.get("path")}
    if isinstance(value, str) and value.startswith(("http://", "https://")):
        raise ValueError(f"the image {value!r} is on the web: download it, and give its path")
    if isinstance(value, str):
        return {"bytes": None, "path": value.removeprefix("file://")}
    if isinstance(value, Mapping) and {*value} <= {"bytes", "path"}:
        raise ValueError("an image has neither 'bytes' nor a 'path': give it one of the two")
    if value is None or isinstance(value, Mapping | list | bool | int | float):
        raise ValueError(f"an image is {describe(value)}; it must be a picture, a path, or the bytes of a file")
    return {"bytes": None, "path": None, **Image().encode_example(value)}


def in_parts(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages whose contents come in parts, as templates of vision-language models read them."""
    return [
        {**message, "content": _content_parts(message["content"])}
        if isinstance(message.get("content"), str)
        else dict(message)
        for message in messages
    ]


def _content_parts(text: str) -> list[dict[str, str]]:
    parts: list[dict[str, str]] = []
    for number, piece in enumerate(text.split(IMAGE)):
        parts += [{"type": "image"}] * (number > 0) + [{"type": "text", "text": piece}] * bool(piece)
    return parts or [{"type": "text", "text": ""}]


def _parts(message: Any) -> list[Any] | None:
    content = message.get("content") if isinstance(message, Mapping) else None
    return content if isinstance(content, list) else None


def _is_image(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "image"


def _is_user(message: Mapping[str, Any]) -> bool:
    return message.get("role") == "user" or message.get("from") in ("user", "human")
