"""Texts with labels to token ids with labels; what is too long is cut as transformers' tokenizers cut it."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from datasets import Features, List, Value
from transformers import PreTrainedTokenizerBase

from lowtide.data.batches.token_rows import flatten, list_column
from lowtide.data.batches.values import LABEL, NUMBER
from lowtide.data.formats.conversation import describe
from lowtide.data.formats.labelled import IDS, MULTIPLE, REGRESSION, SINGLE, LabelFormat
from lowtide.data.formats.labels import numbers_of, shown_labels
from lowtide.data.formats.reading import RowPlace
from lowtide.data.formats.samples import text_of
from lowtide.data.formats.token_columns import attended_range, is_token_list
from lowtide.data.options import LabelOptions
from lowtide.data.report.doubts import DOUBT_NOTES, NO_DOUBT, Doubt, doubt_of_mask
from lowtide.data.report.row_stats import NOTES
from lowtide.ragged import SECOND_TEXT

logger = logging.getLogger(__name__)

TYPES = "token_type_ids"
Tokens = list[int]


class LabelEncoder:
    """Prepares batches of one dataset's rows.

    Args:
        vectors: whether lists of integers say by 0 and 1 of each class whether it holds.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, labels: LabelFormat, options: LabelOptions, source: str, vectors: bool
    ) -> None:
        self.labels, self.options, self.source = labels, options, source
        self.vectors = vectors or labels.has_fractions
        self.numbers = numbers_of(options.labels, labels.names, texts=labels.has_names)
        self.tokenizer: Any = copy.deepcopy(tokenizer)  # calls leave their limits on length in it
        self.vocab_size = options.vocab_size or len(tokenizer)
        self.tells_apart = len(labels.texts) > 1 and TYPES in tokenizer("a", "a")
        of_label = Value("int64") if options.problem == SINGLE else Value("float32")
        several = options.problem == MULTIPLE or (options.problem == REGRESSION and labels.is_list)
        columns = {IDS: List(Value("int32")), LABEL: List(of_label) if several else of_label, NUMBER: Value("int64")}
        self.features = Features({**columns, **({SECOND_TEXT: Value("int32")} if self.tells_apart else {})})
        self.noted = Features({**self.features, **NOTES, **DOUBT_NOTES})
        if not labels.is_tokenized:
            self._check_places(source)

    def __call__(self, batch: Mapping[str, Sequence[Any]], numbers: Sequence[int]) -> pa.Table:
        """Noted rows of a batch of columns, whose rows have these numbers in the dataset.

        Raises:
            ValueError: a row that cannot be used; names it.
        """
        place = RowPlace(self.source, numbers)
        labels = [self._label(each, index, place) for index, each in enumerate(batch[self.labels.label])]
        types: list[Tokens] | None = None
        doubts = [NO_DOUBT] * len(labels)
        if self.labels.is_tokenized:
            tokens, lengths, doubts = self._tokenized(batch[IDS], batch.get("attention_mask"), place)
        else:
            tokens, types, lengths = self._encoded(self._texts(batch, place))
        for index, each in enumerate(tokens):
            if not each:
                raise place.error(index, f"{self.labels.texts[0]!r} has no tokens: remove the row, or give it a text.")
        kept = np.array([len(each) for each in tokens], dtype=np.int64)
        columns = {
            IDS: list_column(*flatten(tokens)),
            LABEL: pa.array(labels, self.features.arrow_schema.field(LABEL).type),
            NUMBER: pa.array(numbers, pa.int64()),
        }
        if types is not None and self.tells_apart:
            columns[SECOND_TEXT] = pa.array([self._second(each) for each in types], pa.int32())
        return pa.table(
            {
                **columns,
                "scored": pa.array(np.ones(len(tokens)), pa.int32()),
                "cut": pa.array(lengths - kept, pa.int32()),
                "dropped": pa.array(np.zeros(len(tokens)), pa.int8()),
                "merged": pa.array(np.zeros(len(tokens), dtype=bool)),
                "doubts": pa.array(doubts, pa.int16()),
                "row": pa.array(numbers, pa.int64()),
            }
        )

    # -- texts ---------------------------------------------------------------------------------------------------------

    def _check_places(self, source: str) -> None:
        """Refuses a limit that leaves a text no token, and says where it leaves one."""
        most = self.options.max_length
        if most is None:
            return
        special = self.tokenizer.num_special_tokens_to_add(pair=len(self.labels.texts) > 1)
        places, least = most - special, len(self.labels.texts)
        if places < least:
            raise ValueError(
                f"max_length={most} leaves {max(places, 0)} places beside the {special} special tokens of "
                f"{type(self.tokenizer).__name__}, and {least} text{'s' if least > 1 else ''} of a row need one each: "
                "raise max_length"
            )
        if places == least:
            logger.warning("%s: max_length=%s keeps one token of a text: raise it to have more", source, most)

    def _texts(self, batch: Mapping[str, Sequence[Any]], place: RowPlace) -> list[list[str]]:
        """The texts of the rows, a list for each column."""
        columns: list[list[str]] = []
        for name in self.labels.texts:
            columns.append([])
            for index, value in enumerate(batch[name]):
                try:
                    columns[-1].append(text_of(value, name))
                except ValueError as error:
                    raise place.error(index, error) from error
                if not columns[-1][-1].strip():
                    raise place.error(index, f"{name!r} is empty: remove the row, or give it a text.")
        return columns

    def _encoded(self, texts: list[list[str]]) -> tuple[list[Tokens], list[Tokens] | None, np.ndarray]:
        """Token ids and types as far as limits allow, and how many tokens there were."""
        found = self.tokenizer(*texts, truncation=False, verbose=False)
        tokens, types = found[IDS], found.get(TYPES)
        lengths = np.array([len(each) for each in tokens], dtype=np.int64)
        most = self.options.max_length
        long = [] if most is None else np.flatnonzero(lengths > most).tolist()
        if long:
            cut = self.tokenizer(*([column[n] for n in long] for column in texts), truncation=True, max_length=most)
            for at, number in enumerate(long):
                tokens[number] = cut[IDS][at]
                if types is not None:
                    types[number] = cut[TYPES][at]
        return tokens, types, lengths

    def _second(self, types: Tokens) -> int:
        """Where the second text begins."""
        begins = types.index(1) if 1 in types else len(types)
        if types != [0] * begins + [1] * (len(types) - begins):
            raise ValueError(
                f"{type(self.tokenizer).__name__} gives tokens of a pair the types {sorted({*types})}, and types are 0 "
                "up to the second text and 1 from there: join the two texts to one column"
            )
        return begins

    def _tokenized(
        self, rows: Sequence[Any], masks: Sequence[Any] | None, place: RowPlace
    ) -> tuple[list[Tokens], np.ndarray, list[Doubt]]:
        kept, lengths, doubts = [], [], []
        for index, row in enumerate(rows):
            if not is_token_list(row):
                raise place.error(index, f"{IDS!r} is {describe(row)}; it must be a list of token ids.")
            mask = None if masks is None else masks[index]
            try:
                attended = attended_range(mask, "attention_mask", len(row))
            except ValueError as problem:
                raise place.error(index, problem) from None
            tokens = row[attended]
            doubts.append(doubt_of_mask(row, attended, self.tokenizer.pad_token_id))
            wrong = next((each for each in tokens if not 0 <= each < self.vocab_size), None)
            if wrong is not None:
                raise place.error(index, f"token id {wrong} is none of the model's {self.vocab_size:,}.")
            kept.append(tokens[: self.options.max_length])
            lengths.append(len(tokens))
        return kept, np.array(lengths, dtype=np.int64), doubts

    # -- labels --------------------------------------------------------------------------------------------------------

    def _label(self, label: Any, index: int, place: RowPlace) -> Any:
        """A row's label as the model has it."""
        name = self.labels.label
        if label is None:
            raise place.error(index, f"{name!r} is missing: give the row a label, or remove it.")
        if self.options.problem == SINGLE:
            return self._number(label, name, index, place)
        if self.options.problem == MULTIPLE and not self.vectors:
            held = {self._number(each, f"{name}[{at}]", index, place) for at, each in enumerate(label)}
            return [float(number in held) for number in range(len(self.options.labels))]
        return self._values(label, index, place)

    def _number(self, label: Any, name: str, index: int, place: RowPlace) -> int:
        if label in self.numbers:
            return self.numbers[label]
        raise place.error(
            index,
            f"{name} is {label!r}, which is not among the model's {len(self.options.labels)} labels "
            f"({shown_labels(self.options.labels)}): correct the row, or name all labels in `class_names`.",
        )

    def _values(self, label: Any, index: int, place: RowPlace) -> Any:
        """A number for each class, 0 or 1, or for each value that is predicted."""
        name, wanted = self.labels.label, len(self.options.labels)
        values = label if isinstance(label, list) else [label]
        if len(values) != wanted:
            raise place.error(index, f"{name!r} has {len(values)} numbers, and the model gives {wanted}.")
        for at, each in enumerate(values):
            if each is None or not math.isfinite(each):
                raise place.error(index, f"{name}[{at}] is {each}, which is no number.")
            if self.options.problem == MULTIPLE and each not in (0, 1):
                raise place.error(index, f"{name}[{at}] is {each}; of each class a row says 0 or 1, whether it holds.")
        return [float(each) for each in values] if self.labels.is_list else float(values[0])
