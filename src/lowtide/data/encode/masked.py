"""Rows of masked language models to token rows: texts, or rows that are tokenized already.

A text gets the special tokens that its tokenizer adds, and is cut as the tokenizer cuts: the special tokens at its end
are kept. The labels are the tokens; a special token's is -100, and it is never masked. What is masked is drawn later,
of each batch. Rows that come with labels of their own are taken as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
from datasets import Features, List, Value
from transformers import PreTrainedTokenizerBase

from lowtide.data.batches.token_rows import IGNORED, TOKEN_FEATURES, TokenRows, flatten
from lowtide.data.encode.rows import check_vocabulary
from lowtide.data.encode.truncation import Truncation, cut_before_end
from lowtide.data.encode.words import words_of
from lowtide.data.formats.columns import check_columns
from lowtide.data.formats.conversation import quoted
from lowtide.data.formats.reading import RowFormat, RowPlace
from lowtide.data.formats.samples import text_of
from lowtide.data.formats.token_columns import attended_range, check_mask, is_integer_list, is_token_list
from lowtide.data.options import PrepareOptions

GIVEN = -1
"""The number of a row whose labels were given, of which nothing is drawn."""
NO_WORD = -1
"""In place of the number of a word, for tokens that belong to none."""
OF_TOKENS = ("labels", "special_tokens_mask", "attention_mask", "word_ids")
"""Columns that are read beside `input_ids`, where they are there."""


@dataclass(frozen=True, kw_only=True)
class MaskedOptions(PrepareOptions):
    """The options of preparing rows for a masked language model."""

    own_token: ClassVar[bool] = True

    words: bool = False
    """Whether it is to be known which word a token belongs to."""


class MaskedEncoder:
    """Encodes batches of one dataset's rows.

    Raises:
        ValueError: the columns cannot be read, or words cannot be known.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        options: MaskedOptions,
        first_row: Mapping[str, Any],
        source: str,
    ) -> None:
        self.tokenizer, self.options, self.source = tokenizer, options, source
        self.format = _format_of(list(first_row), options.dataset_text_field, source)
        check_columns(list(first_row), self.format, source)
        self.tokenized, self.labelled = self.format.name == "input_ids", "labels" in self.format.columns
        self.words = options.words and not self.labelled
        if self.words and self.tokenized and "word_ids" not in self.format.columns:
            raise ValueError(
                f"whole_word_mask=True: {source} is tokenized already and does not say which tokens make a word. Give "
                "the texts, or a column 'word_ids' (null at special tokens)"
            )
        if self.words and not self.tokenized and not tokenizer.is_fast:
            raise ValueError(
                f"whole_word_mask=True needs a fast tokenizer, which knows where a token stands; {source} would be "
                f"tokenized by {type(tokenizer).__name__}. Take a fast one, or set whole_word_mask=False"
            )
        self.special = np.array(sorted(tokenizer.all_special_ids), dtype=np.int64)
        more: dict[str, Any] = {"words": List(Value("int32"))} if self.words else {}
        self.features = Features({**TOKEN_FEATURES, **more, "number": Value("int64")})

    def __call__(self, batch: Mapping[str, Sequence[Any]], numbers: Sequence[int]) -> TokenRows:
        """Encode a batch of columns, whose rows have these numbers in the dataset.

        Raises:
            ValueError: a row that can't be used; the message names it.
        """
        place = RowPlace(self.source, numbers)
        samples = self.format.read_batch(batch, place)
        columns = _joined(samples) if self.tokenized else self._encoded(samples)
        token_ids, offsets = flatten(columns["input_ids"])
        if self.labelled:
            labels = flatten(columns["labels"])[0]
        else:
            special = np.isin(token_ids, self.special)
            if "special_tokens_mask" in columns:
                special |= flatten(columns["special_tokens_mask"])[0] != 0
            labels = np.where(special, IGNORED, token_ids)
        rows = TokenRows(
            token_ids,
            labels,
            offsets,
            words=flatten(columns["word_ids"])[0] if self.words else None,
            numbers=np.full(len(samples), GIVEN) if self.labelled else np.asarray(numbers, dtype=np.int64),
            own_token=True,
        )
        check_vocabulary(rows, self.options.vocab_size or len(self.tokenizer), place)
        return rows

    def cut(self, rows: TokenRows, truncation: Truncation) -> TokenRows:
        """Rows of `max_length` tokens at most: their first ones, and the special ones that end them."""
        return cut_before_end(rows, truncation.max_length, self.special)

    def _encoded(self, texts: list[str]) -> dict[str, list[list[int]]]:
        found = self.tokenizer(
            texts,
            return_attention_mask=False,
            return_token_type_ids=False,
            return_special_tokens_mask=True,
            return_offsets_mapping=self.words,
            verbose=False,
        )
        columns = {name: found[name] for name in ("input_ids", "special_tokens_mask")}
        if self.words:
            places = zip(texts, found["offset_mapping"], found["special_tokens_mask"], strict=True)
            columns["word_ids"] = [_words(*each) for each in places]
        return columns


def _words(text: str, spans: Sequence[tuple[int, int]], special: Sequence[int]) -> list[int]:
    """The number of each token's word, `NO_WORD` of special tokens."""
    words = np.full(len(spans), NO_WORD)
    own = np.asarray(special) == 0
    words[own] = words_of(text, [span for span, of_text in zip(spans, own, strict=True) if of_text])
    return words.tolist()


def _format_of(columns: Sequence[str], text_field: str, source: str) -> RowFormat[Any]:
    """How rows with these columns are read: token ids first.

    Raises:
        ValueError: neither token ids nor texts are there.
    """
    if "input_ids" in columns:
        return RowFormat("input_ids", ("input_ids", *(name for name in OF_TOKENS if name in columns)), _read_tokens)
    if text_field in columns:
        return RowFormat("text", (text_field,), partial(_read_text, text_field))
    raise ValueError(
        f"{source} has the columns {quoted(columns)}, and neither {text_field!r} (dataset_text_field) nor 'input_ids' "
        "is among them. Rename a column, or set dataset_text_field."
    )


def _read_text(text_field: str, row: Mapping[str, Any]) -> str:
    return text_of(row.get(text_field), text_field)


def _read_tokens(row: Mapping[str, Any]) -> dict[str, list[int]]:
    """The columns of a row, without its padding.

    Raises:
        ValueError: a column is no list of integers, or longer or shorter than the others.
    """
    columns = dict(row)
    if isinstance(columns.get("word_ids"), list):
        columns["word_ids"] = _numbered(columns["word_ids"])
    for name, values in columns.items():
        if not (is_token_list(values) if name in ("input_ids", "labels") else is_integer_list(values)):
            raise ValueError(f"{name!r} must be a list of integers.")
        if len(values) != len(columns["input_ids"]):
            raise ValueError(
                f"{name!r} has {len(values)} values and 'input_ids' {len(columns['input_ids'])}; they must be as long "
                "as each other."
            )
    check_mask(columns.get("special_tokens_mask", ()), "special_tokens_mask")
    attended = attended_range(columns.pop("attention_mask", None), "attention_mask", len(columns["input_ids"]))
    return {name: values[attended] for name, values in columns.items()}


def _numbered(words: Sequence[int | None]) -> list[int]:
    return [NO_WORD if word is None else word for word in words]


def _joined(samples: Sequence[Mapping[str, list[int]]]) -> dict[str, list[list[int]]]:
    """Each column of all rows."""
    return {name: [sample[name] for sample in samples] for name in samples[0]}
