"""Sources with targets to token ids, for sequence to sequence. Caching and the ledger are those of supervised
fine-tuning; texts are tokenized and cut as in transformers' run_summarization.py and run_translation.py."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from datasets import Dataset, Features, IterableDataset, List, Value
from transformers import PreTrainedTokenizerBase

from lowtide.data.batches.token_rows import IGNORED, TokenRows, flatten, list_column
from lowtide.data.cache.cached_map import map_cached, reading
from lowtide.data.cache.fingerprint import combine, rows_fingerprint
from lowtide.data.encode.rows import check_ids
from lowtide.data.encode.truncation import cut_before_end
from lowtide.data.formats.columns import check_columns
from lowtide.data.formats.reading import RowPlace
from lowtide.data.formats.source_target import TRANSLATION, PairSample, detect_pairs_of_texts
from lowtide.data.options import SourceTargetOptions
from lowtide.data.report.ledger import Ledger, padding_share
from lowtide.data.report.row_stats import CUT_PART, NOTES, add_up, warn_of_dropped
from lowtide.data.sources.stream import map_stream
from lowtide.data.sources.titles import title_of

logger = logging.getLogger(__name__)

__all__ = ["SourceTargetOptions", "prepare_pairs_of_texts"]

PARTS = ("source", "target")
COLUMNS = tuple(f"{part}_ids" for part in PARTS)
FEATURES = Features({name: List(Value("int32")) for name in COLUMNS})
NOTED = Features({**FEATURES, **NOTES, **{CUT_PART + part: Value("int32") for part in PARTS}})
REASONS = ("kept", "empty source", "empty target", "no scored token left after truncation")
"""Why a row is not trained on; the index is what is noted down."""


def prepare_pairs_of_texts(
    dataset: Dataset | IterableDataset,
    tokenizer: PreTrainedTokenizerBase,
    options: SourceTargetOptions,
    *,
    batch_size: int,
    name: str = "train",
) -> tuple[Dataset | IterableDataset, Ledger | None]:
    """Prepare rows of a source and a target.

    Args:
        dataset: rows as `lowtide.data.formats.source_target` reads them.
        tokenizer: the model's tokenizer. It is not changed.
        options: what the result depends on.
        batch_size: rows in the padded batches that the ledger compares with.
        name: what the dataset is called in progress bars and in the ledger.

    Returns:
        A dataset with the columns `source_ids` and `target_ids`; and its ledger, or None for a stream.

    Raises:
        ValueError: a row that cannot be used, an option that cannot work, or a dataset with nothing to train on.
    """
    source = options.source or title_of(dataset, name)
    with reading(dataset, source, "source_ids and target_ids") as first_row:
        encoder = PairEncoder(tokenizer, options, first_row, source)
        rows = dataset.with_format(None).select_columns(list(encoder.format.columns))
        if isinstance(rows, IterableDataset):
            return map_stream(rows, encoder, FEATURES, source), None
        known = rows_fingerprint(rows, encoder.tokenizer, options, options.truncation)
        languages = [getattr(encoder.tokenizer, f"{side}_lang", None) for side in ("src", "tgt")]
        fingerprint = combine("source and target", known, *encoder.format.columns, *languages)
        prepared = map_cached(
            rows, encoder, features=NOTED, fingerprint=fingerprint, num_proc=options.num_proc, name=name
        )
    statistics = add_up(prepared, COLUMNS, REASONS)
    if statistics.kept == 0:
        reasons = "; ".join(f"{reason}: {count:,}" for reason, count in statistics.rows_dropped.items())
        raise ValueError(
            f"{source} has nothing to train on: every row was dropped ({reasons}). A row needs a source, and a target "
            "with a token that is scored."
        )
    warn_of_dropped(source, statistics)
    real = int(statistics.lengths.sum(dtype=np.int64))
    padded = sum(part.sum(dtype=np.int64) / (1 - padding_share(part, batch_size)) for part in statistics.part_lengths)
    ledger = statistics.ledger(
        name=name, batch_size=batch_size, padding_avoided=1 - real / padded, read_as=encoder.format.title
    )
    if statistics.numbers is not None:
        prepared = prepared.select(statistics.numbers)
    return prepared.select_columns(list(COLUMNS)), ledger


class PairEncoder:
    """Prepares batches of one dataset's rows.

    Raises:
        ValueError: the columns cannot be read, or the tokenizer does not know a language.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        options: SourceTargetOptions,
        first_row: Mapping[str, Any],
        source: str,
    ) -> None:
        self.options, self.source = options, source
        self.format, self.tokenized = detect_pairs_of_texts(
            list(first_row),
            source,
            source_column=options.source_column,
            target_column=options.target_column,
            languages=options.languages,
        )
        check_columns(list(first_row), self.format, source)
        self.tokenizer = with_languages(tokenizer, options)
        named = options.languages is not None and TRANSLATION not in self.format.columns
        if named and (self.tokenized or not hasattr(tokenizer, "src_lang")):
            logger.warning(
                f"source_lang and target_lang have no effect on {source}: its rows hold no texts by language "
                f"({TRANSLATION!r}), and "
                + ("are token ids" if self.tokenized else f"a {type(tokenizer).__name__} writes no tokens of languages")
            )
        self.vocab_size = options.vocab_size or len(tokenizer)
        self.special = np.array(sorted(tokenizer.all_special_ids), dtype=np.int64)

    def __call__(self, batch: Mapping[str, Sequence[Any]], numbers: Sequence[int]) -> pa.Table:
        """Noted rows of a batch of columns, whose rows have these numbers in the dataset.

        Raises:
            ValueError: a row that cannot be used; names it.
        """
        place = RowPlace(self.source, numbers)
        samples = self.format.read_batch(batch, place)
        limits = (self.options.max_source_length, self.options.max_target_length)
        whole = self._tokenized(samples) if self.tokenized else self._encoded(samples)
        for name, part, lowest in zip(self.format.columns, whole, (0, IGNORED), strict=False):
            check_ids(name, part.token_ids, part.offsets, self.vocab_size, place, lowest)
        return _table(
            whole, [cut_before_end(part, most, self.special) for part, most in zip(whole, limits, strict=True)]
        )

    def _encoded(self, samples: list[PairSample]) -> list[TokenRows]:
        """The tokens of texts; none of an empty one, which the tokenizer would make special tokens of."""
        prefix = self.options.source_prefix or ""
        quiet: dict[str, Any] = {"return_attention_mask": False, "verbose": False}
        first = self.tokenizer([prefix + sample.source for sample in samples], **quiet)["input_ids"]
        second = self.tokenizer(text_target=[sample.target for sample in samples], **quiet)["input_ids"]
        kept = [(bool(sample.source.strip()), bool(sample.target.strip())) for sample in samples]
        return [
            _rows([tokens if there[side] else [] for tokens, there in zip(lists, kept, strict=True)])
            for side, lists in enumerate((first, second))
        ]

    def _tokenized(self, samples: list[PairSample]) -> list[TokenRows]:
        return [_rows([sample.source for sample in samples]), _rows([sample.target for sample in samples])]


def with_languages(tokenizer: PreTrainedTokenizerBase, options: SourceTargetOptions) -> PreTrainedTokenizerBase:
    """A copy of a tokenizer that writes the tokens of the languages, where it has such (mBART).

    Raises:
        ValueError: it does not know one of them.
    """
    tokenizer = copy.deepcopy(tokenizer)  # calls leave their settings in it
    if options.languages is None or not hasattr(tokenizer, "src_lang"):
        return tokenizer
    for option, language in zip(("source_lang", "target_lang"), options.languages, strict=True):
        if language not in tokenizer.get_vocab():
            raise ValueError(
                f"{option}={language!r} is none of the languages of {type(tokenizer).__name__}: it writes them as "
                "tokens of its vocabulary, such as 'en_XX'"
            )
    multilingual: Any = tokenizer
    multilingual.src_lang, multilingual.tgt_lang = options.languages
    return tokenizer


def _rows(lists: list[list[int]]) -> TokenRows:
    token_ids, offsets = flatten(lists)
    return TokenRows(token_ids, token_ids, offsets, own_token=True)


def _table(whole: Sequence[TokenRows], kept: Sequence[TokenRows]) -> pa.Table:
    """Noted rows, under `NOTED`."""
    scored = kept[1].scored_counts()
    empty = [whole[0].lengths == 0, whole[1].scored_counts() == 0]
    dropped = np.select([*empty, scored == 0], [1, 2, 3], default=0)
    is_kept = dropped == 0
    before, after = ([part.lengths for part in parts] for parts in (whole, kept))
    cut = [np.where(is_kept, had - has, had) for had, has in zip(before, after, strict=True)]
    columns = {}
    for name, part in zip(COLUMNS, kept, strict=True):
        rest = part.cut(np.zeros_like(part.lengths), np.where(is_kept, part.lengths, 0))
        columns[name] = list_column(rest.token_ids, rest.offsets)
    return pa.table(
        {
            **columns,
            "scored": pa.array(scored, pa.int32()),
            "cut": pa.array(np.add.reduce(cut), pa.int32()),
            "dropped": pa.array(dropped, pa.int8()),
            "merged": pa.array(np.zeros(len(dropped), dtype=bool)),
            **{CUT_PART + part: pa.array(count, pa.int32()) for part, count in zip(PARTS, cut, strict=True)},
        }
    )
