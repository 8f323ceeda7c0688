"""A dataset of rows to a dataset of token ids and labels, and the ledger of what became of its tokens.

Preparation is one cached map (see `cached_map`). Packing is planned over the lengths of the whole dataset, and its
result is cached the same way.
"""

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import datasets
import numpy as np
import pyarrow as pa
from datasets import Dataset, Features, IterableDataset
from transformers import PreTrainedTokenizerBase

from lowtide.compat.datasets import fingerprint_of
from lowtide.data.batches.images import IMAGES, ImageReader
from lowtide.data.batches.packed import RowReader, Units, drop_unscored, packed_tables, write_packed
from lowtide.data.batches.packing import pack
from lowtide.data.batches.shared_rounds import Sharing
from lowtide.data.batches.token_rows import (
    LENGTHS_FEATURE,
    PREFIX_FEATURES,
    SEGMENTS,
    WEIGHTS,
    WEIGHTS_FEATURE,
    TokenRows,
)
from lowtide.data.cache.cached_map import map_cached, reading, warn_merged, with_end_token
from lowtide.data.cache.fingerprint import VERSION, cache_file, combine, rows_fingerprint
from lowtide.data.cache.mapped import mapped_files
from lowtide.data.encode.images import IMAGE_FEATURES, ImageExpander, check_unpacked, expander_of, images_column
from lowtide.data.encode.rows import RowEncoder
from lowtide.data.encode.truncation import Truncation
from lowtide.data.formats.columns import check_columns
from lowtide.data.formats.images import undecoded
from lowtide.data.formats.reading import RowFormat, detect_format
from lowtide.data.options import PrepareOptions
from lowtide.data.report.doubts import DOUBT_NOTES, warn_of_doubts, with_numbers
from lowtide.data.report.ledger import Ledger, padding_share
from lowtide.data.report.row_stats import CUT_AWAY, NOTES, Statistics, add_up, noted_table, warn_of_dropped
from lowtide.data.sources.stream import prepare_stream
from lowtide.data.sources.titles import title_of

__all__ = ["PrepareOptions", "prepare"]

logger = logging.getLogger(__name__)


class Encoder(Protocol):
    """From rows of a dataset to token rows."""

    features: Features
    """The columns of tokens that it makes."""
    format: RowFormat[Any]
    source: str
    tokenizer: PreTrainedTokenizerBase

    def __call__(self, batch: Mapping[str, Sequence[Any]], numbers: Sequence[int]) -> TokenRows:
        """A batch of columns, whose rows have these numbers in the dataset."""
        ...

    def cut(self, rows: TokenRows, truncation: Truncation) -> TokenRows:
        """Rows within the limits on their lengths."""
        ...


EncoderOf = Callable[[PreTrainedTokenizerBase, Any, Mapping[str, Any], str], Encoder]
"""From a tokenizer, options, a dataset's first row and what messages call the dataset."""


def prepare(
    dataset: Dataset | IterableDataset,
    tokenizer: PreTrainedTokenizerBase,
    options: PrepareOptions,
    *,
    batch_size: int,
    packing: bool,
    name: str = "train",
    encoder_of: EncoderOf | None = None,
    reader: ImageReader | None = None,
) -> tuple[Dataset | IterableDataset, Ledger | None]:
    """Prepare a dataset for supervised fine-tuning, or what else an encoder makes rows for.

    Args:
        dataset: Rows in any of the formats of `lowtide.data.formats.reading`.
        tokenizer: The model's tokenizer. It is not changed.
        options: What the result depends on.
        batch_size: Rows in the padded batches that the ledger compares with.
        packing: Whether rows share bins of `options.max_length` tokens.
        name: What the dataset is called in progress bars and in the ledger.
        encoder_of: Makes the encoder of the rows of a dataset; by default that of supervised fine-tuning.
        reader: Makes the images of rows ready, for a vision-language model.

    Returns:
        A dataset with the columns `input_ids` and `labels`, `seq_lengths` where rows are packed or a conversation is
        several segments (and `prefix` and `prefix_length` where some of these go on from others), and `images` where
        they show images; and its ledger, or None for a stream.

    Raises:
        ValueError: a row that can't be used, an option that can't work, or a dataset with nothing to train on.
    """
    if packing and options.max_length is None:
        raise ValueError("packing needs max_length, the number of tokens in a bin; it is None.")
    source = options.source or title_of(dataset, name)
    dataset = dataset if reader is None else undecoded(dataset)
    with reading(dataset, source, "input_ids and labels") as first_row:
        truncation = options.truncation_for(packing=packing)
        images, shown, options, first_row = expander_of(reader, first_row, options, source, truncation)
        check_unpacked(packing and images is not None)
        if "seq_lengths" in first_row:
            raise ValueError(
                f"{source} is packed already (it has 'seq_lengths'). Give the rows as they were before packing, or "
                "skip preparation."
            )
        encoder = (encoder_of or _encoder)(tokenizer, options, first_row, source)
        if images is not None:
            images.check_first(getattr(encoder, "chat", None), encoder.format.read(first_row))
        sharing = options.sharing_for(packing=packing) if SEGMENTS in encoder.features else None
        preparer = _Preparer(encoder, truncation, images, sharing)
        rows = dataset.with_format(None)
        if preparer.encoder.format.columns:
            rows = rows.select_columns([*preparer.encoder.format.columns, *shown])
        if isinstance(rows, IterableDataset):
            return prepare_stream(rows, preparer, preparer.features, options, packing=packing, source=source), None
        return _prepare_cached(rows, preparer, options, batch_size=batch_size, packing=packing, name=name)


@dataclass(frozen=True)
class _Preparer:
    """Prepares a batch of rows."""

    encoder: Encoder
    truncation: Truncation
    images: ImageExpander | None = None
    sharing: Sharing | None = None
    """How the rounds of a conversation are laid."""

    @property
    def features(self) -> Features:
        """The columns of tokens, and of images."""
        shown = {} if self.images is None else IMAGE_FEATURES
        return Features({**self.encoder.features, **({} if self.sharing is None else PREFIX_FEATURES), **shown})

    def __call__(self, batch: Mapping[str, Sequence[Any]], numbers: Sequence[int]) -> pa.Table:
        if self.images is None:
            return self._noted(self.encoder(batch, numbers), numbers)
        rest, shown = self.images.take(batch, numbers)
        [whole] = self.images.expand([self.encoder(rest, numbers)], shown, numbers)
        return self._noted(whole, numbers).append_column(IMAGES, images_column(shown))

    def _noted(self, whole: TokenRows, numbers: Sequence[int]) -> pa.Table:
        return with_numbers(noted_table(whole, self.encoder.cut(whole, self.truncation), self.sharing), numbers)


def _encoder(
    tokenizer: PreTrainedTokenizerBase, options: PrepareOptions, first_row: Mapping[str, Any], source: str
) -> RowEncoder:
    if "input_ids" in first_row and options.formatting_func is not None:
        logger.warning("%s is tokenized already, so formatting_func is not called.", source)
    row_format = detect_format(
        list(first_row),
        text_field=options.dataset_text_field,
        formatting_func=options.formatting_func,
        source=source,
        chats=bool(options.chat_template or tokenizer.chat_template),
    )
    check_columns(list(first_row), row_format, source)
    encoder = RowEncoder(with_end_token(tokenizer, options.eos_token), row_format, options, first_row, source)
    if options.assistant_only_loss and encoder.chat is not None and encoder.chat.leaves_ends_out():
        logger.warning(
            "the chat template's {% generation %} marks leave out the token that ends the assistant's turn, so the "
            "model may not learn to stop: put it between them, or set assistant_only_loss=False"
        )
    return encoder


def _prepare_cached(
    rows: Dataset, preparer: _Preparer, options: PrepareOptions, *, batch_size: int, packing: bool, name: str
) -> tuple[Dataset, Ledger]:
    fingerprint = rows_fingerprint(rows, preparer.encoder.tokenizer, options, preparer.truncation, preparer.sharing)
    noted = Features({**preparer.features, **NOTES, **DOUBT_NOTES})
    prepared = map_cached(rows, preparer, features=noted, fingerprint=fingerprint, num_proc=options.num_proc, name=name)
    statistics = add_up(prepared)
    _check_statistics(statistics, options, preparer.encoder.source)
    numbers, lengths = statistics.numbers, statistics.lengths
    if options.shuffle:
        order = np.random.default_rng(options.seed).permutation(len(lengths))  # as `Dataset.shuffle` does
        numbers, lengths = order if numbers is None else numbers[order], lengths[order]
    ledger = statistics.ledger(
        name=name,
        batch_size=batch_size,
        padding_avoided=padding_share(lengths, batch_size),
        read_as=preparer.encoder.format.title,
    )
    if WEIGHTS in prepared.column_names and prepared.data.column(WEIGHTS).null_count == len(prepared):
        prepared = prepared.remove_columns(WEIGHTS)
    left_out = {
        *(() if WEIGHTS in prepared.column_names else WEIGHTS_FEATURE),
        *(() if statistics.shared else PREFIX_FEATURES),
    }
    units = Units.of_rows(lengths, numbers, prepared.data.table)
    if packing:
        packed, ledger = _pack_cached(prepared, units, options, ledger)
        columns = {**preparer.features, **LENGTHS_FEATURE}
        return packed.select_columns([name for name in columns if name not in left_out]), ledger
    if numbers is not None:
        prepared = prepared.select(numbers)
    if not statistics.shared and len(units.lengths) == len(lengths):  # each is a row of one segment
        left_out |= LENGTHS_FEATURE.keys()
    return prepared.select_columns([name for name in preparer.features if name not in left_out]), ledger


def _pack_cached(
    prepared: Dataset,
    units: Units,
    options: PrepareOptions,
    ledger: Ledger,
) -> tuple[Dataset, Ledger]:
    """Pack these of the prepared rows; gives the packed rows and their ledger."""
    capacity = options.max_length
    assert capacity is not None
    order = options.seed if options.shuffle else None
    path = cache_file(combine(VERSION, fingerprint_of(prepared), capacity, options.packing_strategy, order))
    if not (os.path.exists(path) and datasets.is_caching_enabled()):
        plan = pack(units.lengths, capacity, options.packing_strategy)
        assert plan.tokens_cut == 0, "rows longer than a bin are cut before, or split"
        reader = RowReader(prepared.data.table, mapped_files(prepared))
        tables = packed_tables(reader, plan, units, own_token=options.own_token)
        write_packed(tables, plan.bins, path, ledger.name)
    packed, rows_without, tokens_without = drop_unscored(Dataset.from_file(path))
    if len(packed) == 0:
        raise ValueError(
            f"the {ledger.name} dataset has nothing to train on: cut into pieces of max_length={capacity} tokens, no "
            "piece has a scored token. Raise max_length."
        )
    dropped = dict(ledger.rows_dropped)
    if rows_without:
        dropped["no scored token in a packed row"] = rows_without
    tokens = ledger.tokens - tokens_without
    ledger = replace(
        ledger,
        tokens=tokens,
        scored_tokens=int(packed.data.column("scored").to_numpy().sum(dtype=np.int64)),
        rows_dropped=dropped,
        tokens_dropped=ledger.tokens_dropped + tokens_without,
        packed_rows=len(packed),
        packing_fill=tokens / (len(packed) * capacity),
    )
    if options.shuffle:
        packed = packed.shuffle(seed=options.seed)
    return packed, ledger


def _check_statistics(statistics: Statistics, options: PrepareOptions, source: str) -> None:
    if statistics.kept == 0:
        reasons = "; ".join(f"{reason}: {count:,}" for reason, count in statistics.rows_dropped.items())
        way_out = (
            f"Raise max_length (it is {options.max_length}), or change truncation_mode."
            if options.max_length is not None and CUT_AWAY in statistics.rows_dropped
            else "Look at the labels or masks that the rows come with, and at completion_only_loss and "
            "assistant_only_loss."
        )
        raise ValueError(f"{source} has nothing to train on: every row was dropped ({reasons}). {way_out}")
    warn_merged(source, statistics.merged, statistics.kept)
    warn_of_dropped(source, statistics)
    warn_of_doubts(source, statistics.doubts, statistics.kept)
