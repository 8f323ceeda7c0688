"""Rows of preferences to token ids: each side whole, and how many of its tokens are the prompt.

The token boundaries are those of TRL 1.16 (`DPOTrainer`, `KTOTrainer` and `RewardTrainer`): a completion begins where
the tokens of the prompt alone and of prompt and completion together diverge, and both sides of a pair at the earlier
of their two boundaries.

Where we differ: the implicit prompt of two texts is the tokens that both begin with, each side being tokenized once
and whole. TRL takes the characters that both begin with, and tokenizes these alone; its prompt may end inside a word,
whose first token then belongs to both completions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
from jaxtyping import Bool, Int
from transformers import PreTrainedTokenizerBase

from lowtide.data.batches.token_rows import TokenRows, flatten
from lowtide.data.encode.chat import ChatEncoder
from lowtide.data.encode.rows import check_ids, shared_prefix
from lowtide.data.encode.text import TextEncoder
from lowtide.data.formats.preferences import PreferenceSample
from lowtide.data.formats.reading import ChatSample, RowFormat, RowPlace, Sample, TextSample, TokenSample
from lowtide.data.options import PreferenceOptions
from lowtide.data.report.doubts import Doubt, doubts_of, ending_ids, special_ids, without

TokenLists = list[list[int]]
SIDE_NAMES = {1: ("completion",), 2: ("chosen", "rejected")}


@dataclass(frozen=True)
class EncodedSides:
    """A batch of rows, and each of their sides as token rows with prompt lengths."""

    rows: list[PreferenceSample]
    sides: list[TokenRows]


class SideEncoder:
    """Encodes batches of one dataset's rows of preferences, which are all of the first row's kind.

    With `whole`, a pair's prompt is whatever its sides have in common, each keeping a token: that is all a reward
    model needs, which scores a side at its end.

    Raises:
        ValueError: something that the rows need and the tokenizer lacks.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        row_format: RowFormat[PreferenceSample],
        options: PreferenceOptions,
        first_row: Mapping[str, Any],
        source: str,
        *,
        whole: bool = False,
    ) -> None:
        self.tokenizer = tokenizer
        self.format = row_format
        self.source = source
        self.whole = whole
        self.vocab_size = options.vocab_size or len(tokenizer)
        self.special_ids = frozenset(tokenizer.all_special_ids)
        self.saying_nothing, self.ending = special_ids(tokenizer), ending_ids(tokenizer)
        first = row_format.read_batch({name: [value] for name, value in first_row.items()}, RowPlace(source, [0]))[0]
        self.kind = first.sides[0].kind
        self.is_paired = len(first.sides) == 2
        self.encoder = _encoder(first.sides[0], tokenizer, options, source)

    def __call__(self, batch: Mapping[str, Sequence[Any]], numbers: Sequence[int]) -> EncodedSides:
        """Encode a batch of columns, whose rows have these numbers in the dataset.

        Raises:
            ValueError: a row that can't be used; the message names it.
        """
        place = RowPlace(self.source, numbers)
        rows = self.format.read_batch(batch, place)
        for index, row in enumerate(rows):
            if row.sides[0].kind != self.kind:
                raise place.error(index, f"this is a {row.sides[0].kind}, and the dataset's first row a {self.kind}.")
        samples = list(zip(*(row.sides for row in rows), strict=True))
        token_ids = [self.encoder.encode(side, place) for side in samples]
        if self.whole or _is_implicit(rows[0].sides[0]):
            lengths = [self._common_lengths(token_ids[0], token_ids[1], place)] * len(samples)
            prompt_lengths = lengths[0]
        else:
            self._check_prompts(rows, place)
            prompts = self.encoder.encode_prompts(samples[0], place)
            lengths = [
                np.array([shared_prefix(*both) for both in zip(prompts, side, strict=True)], dtype=np.int64)
                for side in token_ids
            ]
            prompt_lengths = np.array([len(prompt) for prompt in prompts])
        sides = []
        for name, given, side, length in zip(SIDE_NAMES[len(samples)], samples, token_ids, lengths, strict=True):
            flat, offsets = flatten(side)
            check_ids(f"the row's {name} side", flat, offsets, self.vocab_size, place)
            encoded = TokenRows(flat, flat, offsets, length, length < prompt_lengths)
            sides.append(replace(encoded, doubts=self._doubts(given, encoded)))
        return EncodedSides(rows, sides)

    def _doubts(self, samples: Sequence[Sample], side: TokenRows) -> Int[np.ndarray, " rows"]:
        """What is doubtful in one side of each row."""
        doubts = doubts_of(samples)
        if not (self.whole or _is_implicit(samples[0])):
            doubts |= Doubt.NO_ANSWER * without(side, self.saying_nothing, others=True)
        if isinstance(samples[0], TokenSample):
            doubts |= Doubt.NO_END * without(side, self.ending)
        if isinstance(self.encoder, ChatEncoder):
            doubts |= np.array(self.encoder.doubts(cast(Sequence[ChatSample], samples)), dtype=np.int64)
        return doubts

    def _common_lengths(self, chosen: TokenLists, rejected: TokenLists, place: RowPlace) -> Int[np.ndarray, " rows"]:
        """How many tokens both sides of each pair begin with."""
        lengths = []
        for index, (one, other) in enumerate(zip(chosen, rejected, strict=True)):
            length = shared_prefix(one, other)
            if self.whole:
                length = max(min(length, len(one) - 1, len(other) - 1), 0)
            elif one != other and self.special_ids.issuperset(one[:length]):
                raise place.error(index, NO_PROMPT.format("the texts" if self.kind == "text" else "the token ids"))
            lengths.append(length)
        return np.array(lengths, dtype=np.int64)

    def _check_prompts(self, rows: Sequence[PreferenceSample], place: RowPlace) -> None:
        """Refuse conversations that have no message in common; an explicit prompt has at least one."""
        for index, row in enumerate(rows):
            side = row.sides[0]
            if isinstance(side, ChatSample) and side.prompt_messages == 0:
                raise place.error(index, NO_PROMPT.format("the conversations"))


NO_PROMPT = (
    "'chosen' and 'rejected' begin with no prompt in common: {} differ from the start. Give the prompt in a column "
    "of its own, or drop the row."
)


class _TokenEncoder:
    """The counterpart of `TextEncoder` and `ChatEncoder` for rows that are tokenized already."""

    def encode(self, samples: Sequence[TokenSample], place: RowPlace) -> TokenLists:
        return [list(sample.input_ids) for sample in samples]

    def encode_prompts(self, samples: Sequence[TokenSample], place: RowPlace) -> TokenLists:
        return [list(sample.input_ids[: sample.prompt_tokens]) for sample in samples]


def _encoder(first: Sample, tokenizer: PreTrainedTokenizerBase, options: PreferenceOptions, source: str) -> Any:
    """Something with `encode` and `encode_prompts` for samples of this kind."""
    if isinstance(first, TextSample):
        return TextEncoder(tokenizer)
    if isinstance(first, ChatSample):
        return ChatEncoder.for_rows(first, tokenizer, options.chat_template, source, in_parts=options.contents_in_parts)
    return _TokenEncoder()


def _is_implicit(sample: Sample) -> bool:
    """Whether the row does not say where its prompt ends."""
    if isinstance(sample, TextSample):
        return sample.prompt is None
    return isinstance(sample, TokenSample) and sample.prompt_tokens is None


def share_prompts(sides: Sequence[TokenRows]) -> list[TokenRows]:
    """The same rows with one prompt length a row: up to the earliest boundary of the sides."""
    prompts = np.minimum.reduce([prompt_lengths(side) for side in sides])
    merged = np.logical_or.reduce([merged_prompts(side) for side in sides])
    return [replace(side, prompt_lengths=prompts, merged=merged) for side in sides]


def prompt_lengths(side: TokenRows) -> Int[np.ndarray, " rows"]:
    assert side.prompt_lengths is not None
    return side.prompt_lengths


def merged_prompts(side: TokenRows) -> Bool[np.ndarray, " rows"]:
    assert side.merged is not None
    return side.merged
