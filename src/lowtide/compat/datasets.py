"""What the project takes from the inside of datasets."""

from __future__ import annotations

import contextlib
import copy
import logging
import sys
from collections.abc import Iterator
from typing import Any

from datasets import config

from lowtide.process.quiet_logs import only_from


def readers_silent() -> contextlib.AbstractContextManager[None]:
    """Keeps the readers of files from logging what they raise as well."""
    return only_from(logging.CRITICAL, "datasets.packaged_modules")


@contextlib.contextmanager
def without_torch() -> Iterator[None]:
    """Streams that are made within do not import torch, to inherit from its class of streams. Where torch is there
    already they inherit from it: it would remember of the class of all streams that it is none of its own."""
    before = config.TORCH_AVAILABLE
    config.TORCH_AVAILABLE = before and "torch" in sys.modules
    try:
        yield
    finally:
        config.TORCH_AVAILABLE = before


def fingerprint_of(dataset: Any) -> str:
    """What names a dataset's rows and all that was done to them: the key of what is cached."""
    return dataset._fingerprint


def stream_format(dataset: Any) -> str | None:
    """The format of an `IterableDataset`, which has no public `format`; None for plain Python objects."""
    return None if dataset._formatting is None else dataset._formatting.format_type


def with_features(dataset: Any, features: Any) -> Any:
    """The same rows under other features that are stored alike: `cast` would copy columns that hold images in lists."""
    other = copy.copy(dataset)
    other._info = copy.copy(dataset._info)
    other._info.features = features
    return other
