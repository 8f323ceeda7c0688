"""Labelled words to token ids with labels: aligned to the words' pieces, long rows in windows that overlap.

The alignment is that of transformers' examples/pytorch/token-classification/run_ner.py: a word's first piece has its
label; the others have none or, with `label_all_tokens`, the label too, `I-` in place of `B-`. Where that script cuts a
long row, here it becomes windows, and each token is scored in the one window where it has most context.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import pyarrow as pa
from datasets import Features, List, Value
from jaxtyping import Int
from transformers import PreTrainedTokenizerBase

from lowtide.data.batches.token_rows import IGNORED, TOKEN_FEATURES, flatten, list_column
from lowtide.data.batches.values import DOCUMENT, WORDS
from lowtide.data.formats.conversation import describe
from lowtide.data.formats.labels import shown_labels
from lowtide.data.formats.reading import RowPlace
from lowtide.data.formats.tagged import IDS, TagFormat, label_numbers
from lowtide.data.formats.token_columns import attended_range
from lowtide.data.options import TagOptions
from lowtide.data.report.doubts import DOUBT_NOTES, NO_DOUBT, Doubt, doubt_of_mask
from lowtide.data.report.row_stats import NOTES
from lowtide.process.ways_out import in_python

TAG_FEATURES = Features({**TOKEN_FEATURES, WORDS: List(Value("int32")), DOCUMENT: Value("int32")})
"""`words`: at the first piece of a word that is scored in this window, the word's number in its row; elsewhere -1.
`document`: the number of the row."""
NOTED_TAGS = Features({**TAG_FEATURES, **NOTES, **DOUBT_NOTES})


@dataclass(frozen=True)
class Window:
    """Some tokens of a row, that go through the model together."""

    token_ids: list[int]
    labels: list[int]
    words: Sequence[int]
    document: int
    cut: int = 0
    """Tokens of the row that are in no window."""
    doubt: Doubt = NO_DOUBT


class TagEncoder:
    """Prepares batches of one dataset's rows.

    Raises:
        ValueError: the tokenizer cannot say which word a token is of, or the windows would not advance.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        tags: TagFormat,
        options: TagOptions,
        source: str,
    ) -> None:
        self.tags, self.options, self.source = tags, options, source
        self.numbers: dict[Any, int] | None = None
        """From a label of the rows to its number; None until a row has a label."""
        self.tokenizer = copy.deepcopy(tokenizer)  # calls leave their limits on length in it
        self.vocab_size = options.vocab_size or len(tokenizer)
        self.inside = _inside(options.labels)
        self.stride = 0
        if tags.is_tokenized:
            return
        if not tokenizer.is_fast:
            raise ValueError(
                f"{type(tokenizer).__name__} does not say which word a token is of, as fast tokenizers do "
                f"(`word_ids`): {in_python('load', 'save')} it with AutoTokenizer.from_pretrained(..., use_fast=True), "
                "or give rows of `input_ids` and `labels`"
            )
        self.stride = self._own_stride()
        self.spaced = self._keeps_spaces()

    def _own_stride(self) -> int:
        most, stride = self.options.max_length, self.options.stride
        if most is None or self.options.long_rows == "cut":
            return 0
        places = most - self.tokenizer.num_special_tokens_to_add()
        stride = places // 4 if stride is None else stride
        if stride >= places:
            lower = "raise max_length" if self.options.stride is None else "lower stride, or raise max_length"
            raise ValueError(
                f"stride={stride} is not below the {places} places that max_length={most} leaves beside special "
                f"tokens, so that windows would not advance: {lower}"
            )
        return stride

    def _keeps_spaces(self) -> bool:
        """Whether the space before a word is a part of it, which this tokenizer does not add by itself
        (`add_prefix_space`): without it words would run together."""
        plain, spaced = (self.tokenizer([each], is_split_into_words=True)[IDS] for each in ("a", " a"))
        return plain != spaced

    def __call__(self, batch: Mapping[str, Sequence[Any]], numbers: Sequence[int]) -> pa.Table:
        """Noted rows of a batch of columns, whose rows have these numbers in the dataset: one or more of each row.

        Raises:
            ValueError: a row that cannot be used; names it.
        """
        place = RowPlace(self.source, numbers)
        kind = int if self.tags.is_tokenized else str
        texts = [_list_of(kind, row, self.tags.text, index, place) for index, row in enumerate(batch[self.tags.text])]
        labels = [
            self._labels(words, own, index, place)
            for index, (words, own) in enumerate(zip(texts, batch[self.tags.labels], strict=True))
        ]
        if self.tags.is_tokenized:
            return _table([*self._tokenized(texts, labels, batch.get("attention_mask"), place)])
        return _table([*self._windows(texts, labels, numbers)])

    def _labels(self, text: list, labels: Any, index: int, place: RowPlace) -> list[int]:
        """The numbers of a row's labels."""
        names = self.tags
        if not isinstance(labels, list):
            raise place.error(index, f"{names.labels!r} is {describe(labels)}; it must be a list of labels.")
        if len(labels) != len(text):
            raise place.error(
                index,
                f"{names.text!r} has {len(text)} {'tokens' if names.is_tokenized else 'words'} and {names.labels!r} "
                f"{len(labels)} labels; each has one.",
            )
        self.numbers = self.numbers or label_numbers(names, self.options.labels, labels)
        numbers = {**(self.numbers or {}), IGNORED: IGNORED}
        try:
            return [numbers[label] for label in labels]
        except (KeyError, TypeError):
            raise place.error(index, self._unknown(labels, numbers)) from None

    def _unknown(self, labels: list, numbers: Mapping[Any, int]) -> str:
        at = next(at for at, each in enumerate(labels) if not (isinstance(each, str | int) and each in numbers))
        known = self.options.labels
        return (
            f"{self.tags.labels}[{at}] is {labels[at]!r}, which is not among the model's {len(known)} labels "
            f"({shown_labels(known)}): correct the row, name all labels in `tag_names`, or mark what is not "
            f"scored by {IGNORED}."
        )

    # -- token ids -----------------------------------------------------------------------------------------------------

    def _tokenized(
        self, texts: list[list[int]], labels: list[list[int]], masks: Sequence[Any] | None, place: RowPlace
    ) -> Iterator[Window]:
        for index, (tokens, own) in enumerate(zip(texts, labels, strict=True)):
            mask = None if masks is None else masks[index]
            try:
                kept = attended_range(mask, "attention_mask", len(tokens))
            except ValueError as problem:
                raise place.error(index, problem) from None
            doubt = doubt_of_mask(tokens, kept, self.tokenizer.pad_token_id)
            tokens, own = tokens[kept], own[kept]
            wrong = next((each for each in tokens if not 0 <= each < self.vocab_size), None)
            if wrong is not None:
                raise place.error(index, f"token id {wrong} is none of the model's {self.vocab_size:,}.")
            length = len(tokens) if self.options.max_length is None else min(len(tokens), self.options.max_length)
            cut = len(tokens) - length
            yield Window(tokens[:length], own[:length], range(length), place.numbers[index], cut, doubt)

    # -- words ---------------------------------------------------------------------------------------------------------

    def _windows(self, texts: list[list[str]], labels: list[list[int]], numbers: Sequence[int]) -> Iterator[Window]:
        if self.spaced:
            texts = [[word if word[:1].isspace() else f" {word}" for word in words] for words in texts]
        limited = self.options.max_length is not None
        limits = {"max_length": self.options.max_length, "stride": self.stride} if limited else {}
        found = self.tokenizer(
            texts, is_split_into_words=True, truncation=limited, return_overflowing_tokens=limited, **limits
        )
        rows = found["overflow_to_sample_mapping"] if limited else range(len(texts))
        for row, group in groupby(range(len(rows)), key=rows.__getitem__):
            windows = [*group]
            of_words = [_numbers_of_words(found.word_ids(window)) for window in windows]
            own = np.asarray(labels[row], dtype=np.int64)
            doubt = _doubt_of(texts[row], own, of_words)
            for window, placed in zip(windows, self._placed(of_words, own), strict=False):
                yield Window(found[IDS][window], *placed[:2], numbers[row], placed[2], doubt)

    def _placed(
        self, of_words: list[np.ndarray], labels: Int[np.ndarray, " words"]
    ) -> Iterator[tuple[list[int], list[int], int]]:
        """Labels, words and tokens left out, of each window of a row; from the words of its tokens, -1 for special
        tokens, and the row's labels."""
        sizes = [int((each >= 0).sum()) for each in of_words]
        step = sizes[0] - self.stride
        starts = [number * step for number in range(len(sizes))]
        length = starts[-1] + sizes[-1]
        words = np.empty(length, dtype=np.int64)
        for start, size, each in zip(starts, sizes, of_words, strict=True):
            words[start : start + size] = each[each >= 0]
        first = np.diff(words, prepend=-1) != 0
        targets = labels[words]
        if self.options.label_all_tokens:
            later = np.where(targets == IGNORED, IGNORED, self.inside[np.maximum(targets, 0)])
        else:
            later = np.full(length, IGNORED)
        targets = np.where(first, targets, later)
        if self.options.long_rows == "cut":
            here = slice(sizes[0])
            kept = _in_window(of_words[0], targets[here], np.where(first, words, -1)[here])
            yield *kept, length - sizes[0]
            return
        owner = owners(starts, sizes)
        for number, (start, size, each) in enumerate(zip(starts, sizes, of_words, strict=True)):
            here = slice(start, start + size)
            own = owner[here] == number
            scored = np.where(own, targets[here], IGNORED)
            yield *_in_window(each, scored, np.where(own & first[here], words[here], -1)), 0


def owners(starts: Sequence[int], sizes: Sequence[int]) -> Int[np.ndarray, " tokens"]:
    """For each token of a row the window in which it has most context: where the nearer end of the window, unless it is
    the row's own, is furthest away; the first of equal ones."""
    length, last = starts[-1] + sizes[-1], len(sizes) - 1
    best, owner = np.full(length, -1), np.zeros(length, dtype=np.int64)
    for number, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        place = np.arange(size)
        left = place if number else np.full(size, length)
        right = size - 1 - place if number < last else np.full(size, length)
        context = np.minimum(left, right)
        better = context > best[start : start + size]
        best[start : start + size][better] = context[better]
        owner[start : start + size][better] = number
    return owner


def _inside(labels: Sequence[str]) -> Int[np.ndarray, " labels"]:
    """For each label that of a word's later pieces: `I-` in place of `B-`, where there is such a label."""
    known = {name: number for number, name in enumerate(labels)}
    later = [known.get(f"I-{name[2:]}", n) if name.startswith("B-") else n for n, name in enumerate(labels)]
    return np.array(later, dtype=np.int64)


def _numbers_of_words(words: Sequence[int | None]) -> Int[np.ndarray, " tokens"]:
    return np.nan_to_num(np.array(words, dtype=np.float64), nan=-1).astype(np.int64)


def _in_window(words: np.ndarray, labels: np.ndarray, marks: np.ndarray) -> tuple[list[int], list[int]]:
    """Labels and words of all tokens of a window, from those of its tokens that are of words."""
    whole_labels, whole_marks = np.full(len(words), IGNORED), np.full(len(words), -1)
    whole_labels[words >= 0], whole_marks[words >= 0] = labels, marks
    return whole_labels.tolist(), whole_marks.tolist()


def _doubt_of(words: list[str], labels: Int[np.ndarray, " words"], of_words: list[np.ndarray]) -> Doubt:
    """Whether a word with a label is empty, or has no token among those of the row's windows."""
    present = np.unique(np.concatenate(of_words))
    last = present[-1] if len(present) else -1
    lost = np.array([not word.strip() for word in words], dtype=bool)
    lost[:last] |= ~np.isin(np.arange(max(last, 0)), present)
    return Doubt.EMPTY_WORD if (lost & (labels != IGNORED)).any() else NO_DOUBT


def _list_of(kind: type, values: Any, name: str, index: int, place: RowPlace) -> list:
    if not isinstance(values, list) or not all(isinstance(each, kind) for each in values):
        what = "words, each a text" if kind is str else "token ids"
        raise place.error(index, f"{name!r} is {describe(values)}; it must be a list of {what}.")
    return values


def _table(windows: list[Window]) -> pa.Table:
    """Noted rows, under `NOTED_TAGS`."""
    scored = np.array([len(each.labels) - each.labels.count(IGNORED) for each in windows], dtype=np.int64)
    lengths = np.array([len(each.token_ids) for each in windows], dtype=np.int64)
    cut = np.array([each.cut for each in windows], dtype=np.int64)
    dropped = np.select([lengths == 0, scored == 0], [1, 2], default=0)
    kept = [each if not out else None for each, out in zip(windows, dropped, strict=True)]
    columns = {
        name: list_column(*flatten([[] if each is None else getattr(each, field) for each in kept]))
        for name, field in ((IDS, "token_ids"), ("labels", "labels"), (WORDS, "words"))
    }
    return pa.table(
        {
            **columns,
            DOCUMENT: pa.array([each.document for each in windows], pa.int32()),
            "scored": pa.array(scored, pa.int32()),
            "cut": pa.array(np.where(dropped == 0, cut, lengths + cut), pa.int32()),
            "dropped": pa.array(dropped, pa.int8()),
            "merged": pa.array(np.zeros(len(windows), dtype=bool)),
            "doubts": pa.array([each.doubt for each in windows], pa.int16()),
            "row": pa.array([each.document for each in windows], pa.int64()),
        }
    )
