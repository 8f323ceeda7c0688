"""What is said of a dataset's columns: those that are not used are named, and images are refused.

A column that is read by nobody looks like one that is: `text` beside `messages`, weights beside tokens. TRL 1.16 passes
over them without a word, and takes `images` for a dataset of its vision models.
"""

import functools
import logging
from collections.abc import Sequence
from typing import Any

from lowtide.data.formats.conversation import quoted
from lowtide.data.formats.likely import proposal
from lowtide.data.formats.reading import RowFormat
from lowtide.process.ways_out import in_python
from lowtide.spelling import nearest

logger = logging.getLogger(__name__)

PROMPT = "prompt"
MEDIA_COLUMNS = ("image", "images", "pixel_values", "video", "videos", "audio", "audios")


def check_columns(
    columns: Sequence[str], row_format: RowFormat[Any], source: str, *, why: str = "text models are trained here"
) -> None:
    """Name the columns that are not used, once; a format without columns reads all.

    Args:
        why: nothing is made of images.

    Raises:
        ValueError: some hold images, or what else is no text.
    """
    if row_format.columns:
        check_read(columns, row_format.columns, source, why=why)


def check_read(
    columns: Sequence[str], read: Sequence[str], source: str, *, why: str = "text models are trained here"
) -> None:
    """The same for columns of which these are read.

    Raises:
        ValueError: some of the others hold images, or what else is no text.
    """
    unused = [column for column in columns if column not in read]
    check_media(unused, source, why)
    if unused:
        warn_of_unused(quoted(read), quoted(unused))


def check_prompts(columns: Sequence[str], source: str) -> None:
    """Refuses rows without prompts.

    Raises:
        ValueError: names what there is.
    """
    if PROMPT not in columns:
        raise ValueError(
            f"{source} has no column `prompt`{nearest(PROMPT, columns)}, only {', '.join(sorted(columns))}: rename the "
            f"column of prompts to `prompt`.{proposal(columns, (PROMPT,))}"
        )


def check_media(columns: Sequence[str], source: str, why: str = "text models are trained here") -> None:
    """Refuses columns of images, or of what else is no text.

    Raises:
        ValueError: names them.
    """
    media = [column for column in columns if column in MEDIA_COLUMNS]
    if media:
        raise ValueError(
            f"{source} has the column {quoted(media)}, and {why}: the rows would lose what they are "
            "about. Rows that are vision-related are for a vision-language model. If the text stands without it, "
            f"remove the column ({in_python('dataset.remove_columns, or ')}`columns` of `datasets` in a run file)."
        )


@functools.cache
def warn_of_unused(read: str, unused: str) -> None:
    """Names columns that are not used, once: the same may be prepared for a plan, for training and for evaluation."""
    logger.warning("rows are read from the columns %s; not used: %s.", read, unused)
