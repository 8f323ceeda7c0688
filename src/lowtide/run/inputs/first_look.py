"""The first rows of a dataset, prepared before the model's weights are read.

A wrong column or a chat template that cannot render a conversation is told in seconds. The way is the method's own, on
a stream of a few rows, so nothing is counted or kept; all rows are prepared later, with the model, and what they give
reason to warn of is said then.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, cast

from datasets import Dataset

from lowtide.data.encode.chat import adopt_chat_template
from lowtide.data.formats.columns import warn_of_unused
from lowtide.data.sources.titles import entitled, title_of
from lowtide.engine.weights.loading import load_tokenizer
from lowtide.engine.weights.model_init import config_init, model_init
from lowtide.engine.weights.places import check_model_place
from lowtide.methods.method import Method
from lowtide.methods.shared.rows import Preparation

ROWS = 4
ANY_TOKEN = 1 << 31
"""In place of the size of a vocabulary that is not known yet."""


def tokenizer_of(model: str, args: Any) -> Any:
    """The tokenizer, or the processor, of a model that is given by name."""
    check_model_place(model)
    return load_tokenizer(
        model, **config_init(model_init(cast(dict, args.model_init_kwargs), trust_remote_code=args.trust_remote_code))
    )


def look_at_rows(method: Method, args: Any, tokenizer: Any, datasets: Mapping[str, Any]) -> None:
    """Prepares the first rows of datasets and lets them go.

    Rows with images are left to the preparation, which has the model's own reader; rows with a transform, and streams,
    which may be read only once, too; and methods whose rows have labels, which are looked for before.

    Args:
        tokenizer: or a processor, which has one. It is not changed.
        datasets: by name: "train", or of an evaluation set.

    Raises:
        ValueError: a row cannot be prepared; says which, and what to do.
    """
    if method.rows.labelled:
        return
    own = copy.deepcopy(getattr(tokenizer, "tokenizer", tokenizer))
    if getattr(args, "chat_template_path", None) is not None:
        adopt_chat_template(own, args.chat_template_path)
    how = Preparation(own, args, ANY_TOKEN)
    for name, dataset in datasets.items():
        if not isinstance(dataset, Dataset) or {"image", "images"} & {*dataset.column_names}:
            continue
        if dataset.format["type"] == "custom":  # a transform, of which the preparation says what to do
            continue
        few: Any = dataset.select(range(min(ROWS, len(dataset))))
        few = few.to_iterable_dataset() if len(few) else few  # an empty dataset makes no stream
        with _in_silence():
            prepared, _ = method.rows.prepare(entitled(few, title_of(dataset, name)), how, name)
            for _row in prepared:
                pass


@contextlib.contextmanager
def _in_silence() -> Iterator[None]:
    """What is warned of within is lost, also to what warns once."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
        warn_of_unused.cache_clear()
