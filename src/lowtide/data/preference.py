"""Preferences to token ids: pairs for DPO, ORPO, CPO, TPO and reward models, labelled completions for KTO.

The prompt of a row is a column of its own, so that it can be computed once however many completions follow it. An
answer of a conversation is taken as it is generated, up to and including the token at which generation stops; with
`turns="whole"` it is what the template writes of it. In that case, and in texts, the tokens are those of TRL 1.16
(`DPOTrainer`, `KTOTrainer`, `RewardTrainer`); where they are not, `preference_formats`, `sides`, `truncation` and
`kl_completions` say so. Also, TRL trains on pairs whose sides are the same, which we drop: their margin is zero
whatever the model does. Caching and the ledger are those of supervised fine-tuning.
"""

import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
from datasets import Dataset, Features, IterableDataset, Value
from jaxtyping import Int
from transformers import PreTrainedTokenizerBase

from lowtide.compat.datasets import fingerprint_of
from lowtide.data.batches.completion_rounds import round_features, without_empty
from lowtide.data.batches.images import IMAGES, ImageReader
from lowtide.data.cache.cached_map import Preparer, map_cached, reading, warn_merged, with_end_token
from lowtide.data.cache.fingerprint import VERSION, combine, rows_fingerprint
from lowtide.data.encode.images import IMAGE_FEATURES, ImageExpander, expander_of, images_column
from lowtide.data.encode.kl_completions import KL_FEATURE, add_kl_completions, add_kl_to_stream
from lowtide.data.encode.preference_rows import (
    REASONS,
    TOO_LONG,
    UNPAIRED_PARTS,
    WHOLE_COMPLETION,
    noted_features,
    pair_parts,
    pair_table,
    token_columns,
    unpaired_table,
    whole_pair_table,
)
from lowtide.data.encode.sides import EncodedSides, SideEncoder
from lowtide.data.encode.truncation import Truncation
from lowtide.data.formats.columns import check_columns
from lowtide.data.formats.images import undecoded
from lowtide.data.formats.preferences import PreferenceSample, detect_pairs, detect_unpaired
from lowtide.data.formats.reading import RowFormat
from lowtide.data.options import PreferenceOptions
from lowtide.data.report.doubts import warn_of_doubts, with_numbers
from lowtide.data.report.ledger import Ledger, padding_share
from lowtide.data.report.row_stats import CUT_AWAY, Statistics, add_up, warn_of_dropped
from lowtide.data.sources.stream import map_stream
from lowtide.data.sources.titles import title_of

__all__ = ["PreferenceOptions", "prepare_pairs", "prepare_unpaired"]

logger = logging.getLogger(__name__)

MARGIN: dict[str, Any] = {"margin": Value("float32")}
LABEL: dict[str, Any] = {"label": Value("bool")}
MISMATCHED: dict[str, Any] = {WHOLE_COMPLETION: KL_FEATURE}
"""Columns of prepared rows beside their tokens."""
PAIRS_AT_A_TIME = 1000
"""Pairs are taken apart in runs of so many, all chosen before all rejected, as by TRL's `unpair_preference_dataset`."""


OLDER_COLUMNS = frozenset({"chosen_input_ids", "rejected_input_ids"})
"""Columns of tokens of a reward model's pairs, of which TRL 1.16 warns."""
OLDER_COLUMNS_SAID = (
    "{source}: the columns 'chosen_input_ids' and 'rejected_input_ids' are deprecated, and will not be supported in "
    "v1 of TRL: rename them to 'chosen_ids' and 'rejected_ids'"
)


def prepare_pairs(
    dataset: Dataset | IterableDataset,
    tokenizer: PreTrainedTokenizerBase,
    options: PreferenceOptions,
    *,
    batch_size: int,
    name: str = "train",
    whole: bool = False,
    margins: bool = False,
    reader: ImageReader | None = None,
) -> tuple[Dataset | IterableDataset, Ledger | None]:
    """Prepare pairs of a chosen and a rejected completion, and what other completions a method has beside them.

    Args:
        dataset: Rows in any of the formats of pairs in `lowtide.data.formats.preferences`.
        tokenizer: The model's tokenizer. It is not changed.
        options: What the result depends on.
        batch_size: Pairs in the padded batches that the ledger compares with.
        name: What the dataset is called in progress bars and in the ledger.
        whole: Whether a side is scored as a whole, by a reward model: the prompt is then whatever all sides begin
            with, and a pair with a side longer than `max_length` is dropped, not cut.
        margins: Whether the rows' margins are wanted, if they have any.
        reader: Makes the images of rows ready, for a vision-language model.

    Returns:
        A dataset with the columns `prompt_ids`, `chosen_ids`, `rejected_ids` and so on, `margin` where wanted and
        given, and `images` where prompts show images; and its ledger, or None for a stream.

    Raises:
        ValueError: a row that can't be used, an option that can't work, or a dataset with nothing to train on.
    """
    if whole:
        _check_whole(options)
    source = options.source or title_of(dataset, name)
    dataset = dataset if reader is None else undecoded(dataset)
    parts = pair_parts(options.sides)
    with reading(dataset, source, ", ".join(token_columns(parts))) as first_row:
        cut = Truncation() if whole else options.truncation
        images, shown, options, first_row = expander_of(reader, first_row, options, source, cut)
        row_format = _format_of(list(first_row), options, source, margins=margins, chats=_chats(tokenizer, options))
        _warn_of_older(row_format, source, whole=whole)
        tokenizer = with_end_token(tokenizer, options.eos_token)
        encoder = SideEncoder(tokenizer, row_format, options, first_row, source, whole=whole)
        if images is not None:
            images.check_first(encoder.encoder, row_format.read(first_row).sides[0])
        with_margins = "margin" in row_format.columns
        tabulate = _tabulated(options, whole=whole, margins=with_margins)
        more = _columns_beside(parts, MARGIN if with_margins else {}, images, encoder)
        features, wanted = noted_features(parts, **more), [*token_columns(parts), *more]
        rows, preparer = dataset.with_format(None), _Preparer(encoder, tabulate, images)
        rows = rows.select_columns([*row_format.columns, *shown])
        if isinstance(rows, IterableDataset):
            return map_stream(rows, preparer, _only(features, wanted), source), None
        prepared = _map(rows, preparer, options, features, name, kind=("pairs", whole, with_margins))
    statistics = _added_up(prepared, parts, options, source)
    longest = statistics.part_lengths[0] + np.maximum.reduce(statistics.part_lengths[1:])
    padding = padding_share(statistics.lengths, batch_size, longest=longest, sequences=len(parts) - 1)
    prepared = prepared if statistics.numbers is None else prepared.select(statistics.numbers)
    ledger = statistics.ledger(name=name, batch_size=batch_size, padding_avoided=padding, read_as=row_format.title)
    return without_empty(prepared.select_columns(wanted)), ledger


def _format_of(columns: list[str], options: PreferenceOptions, source: str, **how: bool) -> RowFormat[PreferenceSample]:
    """How pairs with these columns are read; says which columns are not used."""
    row_format = detect_pairs(columns, source, sides=options.sides, **how)
    check_columns(columns, row_format, source)
    return row_format


def _warn_of_older(row_format: RowFormat[PreferenceSample], source: str, *, whole: bool) -> None:
    """Says which columns of a reward model's rows will not be read for ever."""
    if whole and set(row_format.columns) >= OLDER_COLUMNS:
        warnings.warn(OLDER_COLUMNS_SAID.format(source=source), FutureWarning, stacklevel=3)


def _tabulated(options: PreferenceOptions, *, whole: bool, margins: bool) -> Callable[[EncodedSides], pa.Table]:
    """What makes noted rows of encoded pairs."""
    if whole:
        return partial(whole_pair_table, max_length=options.max_length, margins=margins)
    return partial(pair_table, truncation=options.truncation, margins=margins)


def _check_whole(options: PreferenceOptions) -> None:
    if options.truncation.limits_parts:
        raise ValueError(
            "max_prompt_length and max_completion_length cut completions, and a reward model scores them whole. Unset "
            "both; max_length drops the pairs that are too long."
        )


def prepare_unpaired(
    dataset: Dataset | IterableDataset,
    tokenizer: PreTrainedTokenizerBase,
    options: PreferenceOptions,
    *,
    batch_size: int,
    name: str = "train",
    kl_block: int | None = None,
    reader: ImageReader | None = None,
) -> tuple[Dataset | IterableDataset, Ledger | None]:
    """Prepare completions that are labelled desirable or not; pairs are taken apart.

    Args:
        dataset: Labelled rows, or pairs, in any of the formats of `lowtide.data.formats.preferences`.
        tokenizer: The model's tokenizer. It is not changed.
        options: What the result depends on.
        batch_size: Rows in the padded batches that the ledger compares with.
        name: What the dataset is called in progress bars and in the ledger.
        kl_block: Each row also gets the completion of another row of its block of so many (see `kl_completions`; a
            block of one row takes it from the block before). None: no such column.
        reader: Makes the images of rows ready, for a vision-language model.

    Returns:
        A dataset with the columns `prompt_ids`, `completion_ids`, `label`, `kl_completion_ids` where wanted, and
        `images` where prompts show images; and its ledger, or None for a stream.

    Raises:
        ValueError: a row that can't be used, an option that can't work, or a dataset with nothing to train on.
    """
    if kl_block is not None and kl_block < 1:
        raise ValueError(f"kl_block is {kl_block}; it must be at least 1, or None for no KL completions.")
    source, has_kl = options.source or title_of(dataset, name), kl_block is not None
    dataset = dataset if reader is None else undecoded(dataset)
    with reading(dataset, source, "prompt_ids, completion_ids and label") as first_row:
        images, shown, options, first_row = expander_of(reader, first_row, options, source, options.truncation)
        row_format = detect_unpaired(list(first_row), source, chats=_chats(tokenizer, options))
        check_columns(list(first_row), row_format, source)
        tokenizer = with_end_token(tokenizer, options.eos_token)
        encoder = SideEncoder(tokenizer, row_format, options, first_row, source)
        if images is not None:
            images.check_first(encoder.encoder, row_format.read(first_row).sides[0])
        more = _columns_beside(UNPAIRED_PARTS, LABEL | (MISMATCHED if has_kl else {}), images, encoder)
        features, wanted = noted_features(UNPAIRED_PARTS, **more), [*token_columns(UNPAIRED_PARTS), *more]
        rows = dataset.with_format(None).select_columns([*row_format.columns, *shown])
        tabulate = partial(unpaired_table, truncation=options.truncation, whole_completions=has_kl)
        preparer = _Preparer(encoder, tabulate, images)
        if isinstance(rows, IterableDataset):
            _check_baseline(rows, has_kl and not encoder.is_paired, source)
            stream = map_stream(rows, preparer.in_order(), _only(features, wanted), source)
            return add_kl_to_stream(stream, kl_block, options.max_length, source), None
        prepared = _map(rows, preparer, options, features, name, kind=("unpaired", has_kl))
    statistics = _added_up(prepared, UNPAIRED_PARTS, options, source)
    numbers, lengths = _in_order(statistics, len(prepared), in_runs=encoder.is_paired)
    padding = padding_share(lengths, batch_size)
    ledger = statistics.ledger(name=name, batch_size=batch_size, padding_avoided=padding, read_as=row_format.title)
    chosen = without_empty((prepared if numbers is None else prepared.select(numbers)).select_columns(wanted))
    _check_baseline(chosen, has_kl, source)
    _warn_of_labels(chosen, source)
    fingerprint = combine(VERSION, fingerprint_of(prepared), "kl", kl_block)
    return chosen if kl_block is None else add_kl_completions(chosen, kl_block, options.max_length, fingerprint), ledger


def _in_order(
    statistics: Statistics, rows: int, *, in_runs: bool
) -> tuple[Int[np.ndarray, " kept"] | None, Int[np.ndarray, " kept"]]:
    """The numbers of the rows that are kept, None for all, and their lengths; those of pairs in runs."""
    numbers, lengths = statistics.numbers, statistics.lengths
    if not in_runs:
        return numbers, lengths
    numbers = np.arange(rows) if numbers is None else numbers
    order = order_in_runs(numbers)
    return numbers[order], lengths[order]


def _columns_beside(
    parts: Sequence[str], own: dict[str, Any], images: ImageExpander | None, encoder: SideEncoder
) -> dict[str, Any]:
    """The columns of rows with these parts beside their tokens: `own`, those of rounds, and those of images."""
    rounds = round_features(token_columns(parts[1:])) if encoder.in_rounds else {}
    return {**own, **rounds, **({} if images is None else IMAGE_FEATURES)}


@dataclass(frozen=True)
class _Preparer:
    """Prepares a batch of rows."""

    encoder: SideEncoder
    tabulate: Any
    """Makes noted rows of encoded ones."""
    images: ImageExpander | None = None

    def in_order(self) -> Preparer:
        """The same for rows of single completions, in the order in which a stream has them."""
        return _InRuns(self) if self.encoder.is_paired else self

    def __call__(self, batch: Mapping[str, Sequence[Any]], numbers: Sequence[int]) -> pa.Table:
        if self.images is None:
            return with_numbers(self.tabulate(self.encoder(batch, numbers)), numbers)
        rest, shown = self.images.take(batch, numbers)
        encoded = self.encoder(rest, numbers)
        sides = self.images.expand(encoded.sides, shown, numbers)
        table = with_numbers(self.tabulate(replace(encoded, sides=sides)), numbers)
        each = table.num_rows // max(len(shown), 1)  # 2 of a pair that is taken apart
        return table.append_column(IMAGES, images_column([images for images in shown for _ in range(each)]))


@dataclass(frozen=True)
class _InRuns:
    """Takes the pairs of a batch apart: all chosen, then all rejected."""

    prepare: Preparer

    def __call__(self, batch: Mapping[str, Sequence[Any]], numbers: Sequence[int]) -> pa.Table:
        table = self.prepare(batch, numbers)
        return table.take(order_in_runs(np.arange(table.num_rows)))


def order_in_runs(numbers: Int[np.ndarray, " rows"]) -> Int[np.ndarray, " rows"]:
    """The order of rows in runs of pairs, all chosen before all rejected; row 2i is pair i's chosen one, 2i + 1 its
    rejected one."""
    runs = numbers // (2 * PAIRS_AT_A_TIME)
    return np.argsort(2 * runs + numbers % 2, kind="stable")


def _map(
    rows: Dataset, preparer: _Preparer, options: PreferenceOptions, features: Features, name: str, kind: tuple[Any, ...]
) -> Dataset:
    fingerprint = combine(*kind, rows_fingerprint(rows, preparer.encoder.tokenizer, options, options.truncation))
    return map_cached(rows, preparer, features=features, fingerprint=fingerprint, num_proc=options.num_proc, name=name)


def _chats(tokenizer: PreTrainedTokenizerBase, options: PreferenceOptions) -> bool:
    """Whether there is a chat template."""
    return bool(options.chat_template or tokenizer.chat_template)


def _only(features: Features, columns: Sequence[str]) -> Features:
    return Features({column: features[column] for column in columns})


def _added_up(prepared: Dataset, parts: Sequence[str], options: PreferenceOptions, source: str) -> Statistics:
    statistics = add_up(prepared, token_columns(parts), REASONS)
    if statistics.kept == 0:
        reasons = "; ".join(f"{reason}: {count:,}" for reason, count in statistics.rows_dropped.items())
        way_out = (
            f"Raise max_length (it is {options.max_length})."
            if options.max_length is not None and {CUT_AWAY, TOO_LONG} & set(statistics.rows_dropped)
            else "Look at the completions: each needs at least one token, and those of a pair must differ."
        )
        raise ValueError(f"{source} has nothing to train on: every row was dropped ({reasons}). {way_out}")
    warn_merged(source, statistics.merged, statistics.kept)
    warn_of_dropped(source, statistics)
    warn_of_doubts(source, statistics.doubts, statistics.kept)
    return statistics


def _check_baseline(rows: Dataset | IterableDataset, has_kl: bool, source: str) -> None:
    """Refuses a single row where each gets the completion of another."""
    if has_kl and len(list(rows.take(2))) < 2:
        raise ValueError(
            f"{source} has one row with something to train on, and this loss_type takes its baseline from the "
            "completion of another row. Give two rows or more, or set loss_type='apo_zero_unpaired', which has no "
            "baseline."
        )


def _warn_of_labels(rows: Dataset, source: str) -> None:
    labels = rows.select_columns(["label"]).with_format("numpy")[:]["label"]
    if len(labels) > 1 and (labels.all() or not labels.any()):
        logger.warning(
            "%s: every row has the label %s. The method learns from the contrast of desirable and undesirable "
            "completions; with one kind alone it only moves all of them the same way.",
            source,
            bool(labels[0]),
        )
