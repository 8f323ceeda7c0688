"""Rows of preferences to token ids: each side whole, and how many of its tokens are the prompt.

What the assistant says in a completion is taken as it is generated (see `rounds`), each turn in the context that the
model would be given, up to the token at which generation stops. With `turns="whole"`, and in texts, the token
boundaries are those of TRL 1.16 (`DPOTrainer`, `KTOTrainer` and `RewardTrainer`): a completion begins where the tokens
of the prompt alone and of prompt and completion together diverge, and all sides of a pair at the earliest of their
boundaries.

Where we differ: the implicit prompt of texts is the tokens that all begin with, each side being tokenized once
and whole. TRL takes the characters that both begin with, and tokenizes these alone; its prompt may end inside a word,
whose first token then belongs to both completions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
from jaxtyping import Bool, Int
from transformers import PreTrainedTokenizerBase

from lowtide.data.batches.token_rows import Rounds, TokenRows, flatten
from lowtide.data.encode.chat import ChatEncoder
from lowtide.data.encode.rounds import Answer, answers_of_rounds
from lowtide.data.encode.rows import check_ids, shared_prefix
from lowtide.data.encode.text import TextEncoder
from lowtide.data.formats.conversation import assistant_turns, quoted, weight_of
from lowtide.data.formats.preferences import PreferenceSample
from lowtide.data.formats.reading import ChatSample, RowFormat, RowPlace, Sample, TextSample, TokenSample
from lowtide.data.options import PreferenceOptions
from lowtide.data.report.doubts import NO_DOUBT, Doubt, doubts_of, ending_ids, special_ids, without

TokenLists = list[list[int]]


@dataclass(frozen=True)
class EncodedSides:
    """A batch of rows, and each of their sides as token rows with prompt lengths."""

    rows: list[PreferenceSample]
    sides: list[TokenRows]
    names: tuple[str, ...]
    """Of the sides."""


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
        self.is_paired = len(first.sides) > 1
        self.side_names = tuple(options.sides) if self.is_paired else ("completion",)
        self.is_implicit = _is_implicit(first.sides[0])
        self.encoder = _encoder(first.sides[0], tokenizer, options, source)
        self._by_turns = isinstance(self.encoder, ChatEncoder) and self.encoder.by_turns
        self.in_rounds = self._by_turns and not whole and not options.contents_in_parts
        if options.thought_end is not None and not self._by_turns:
            raise ValueError(
                f"{source}: thought_end={options.thought_end!r} requires conversations and "
                "turns='as_generated': leave it out."
            )

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
        if not (self.whole or self.is_implicit):
            self._check_prompts(rows, place)
        encoded = self._encoded(rows, place)
        token_ids = [[each.token_ids for each in side] for side in encoded]
        if self.whole or self.is_implicit:
            lengths = [self._common_lengths(token_ids, place)] * len(encoded)
            prompt_lengths = lengths[0]
        else:
            lengths = [
                np.array([shared_prefix(each.prompt, each.token_ids) for each in side], dtype=np.int64)
                for side in encoded
            ]
            prompt_lengths = np.array([len(each.prompt) for each in encoded[0]])
        sides = []
        for number, (ids, length) in enumerate(zip(token_ids, lengths, strict=True)):
            flat, offsets = flatten(ids)
            check_ids(f"the row's {self.side_names[number]} side", flat, offsets, self.vocab_size, place)
            labels, rounds = self._rounds(encoded[number], flat)
            side = TokenRows(flat, labels, offsets, length, length < prompt_lengths, rounds=rounds)
            doubts = self._doubts([row.sides[number] for row in rows], side)
            doubts |= np.array([each.doubt for each in encoded[number]], dtype=np.int64)
            sides.append(replace(side, doubts=doubts))
        return EncodedSides(rows, sides, self.side_names)

    def _encoded(self, rows: Sequence[PreferenceSample], place: RowPlace) -> list[list[Answer]]:
        """Each side of each row."""
        if self._by_turns:
            several = [self._has_rounds(row) for row in rows]
            by_row: list[Any] = [()] * len(rows)
            for encode, how in ((self._in_one_round, False), (self._in_rounds, True)):
                these = [number for number, each in enumerate(several) if each == how]
                if these:
                    own = RowPlace(place.source, [place.numbers[number] for number in these])
                    for number, answers in zip(these, encode([rows[number] for number in these], own), strict=True):
                        by_row[number] = answers
            return [list(side) for side in zip(*by_row, strict=True)]
        sides: list[Any] = list(zip(*(row.sides for row in rows), strict=True))
        prompts: TokenLists = [[] for _ in rows]
        if not (self.whole or self.is_implicit):
            prompts = self.encoder.encode_prompts(sides[0], place)
        return [
            [Answer(prompt, ids) for prompt, ids in zip(prompts, self.encoder.encode(side, place), strict=True)]
            for side in sides
        ]

    def _in_one_round(self, rows: Sequence[PreferenceSample], place: RowPlace) -> list[tuple[Answer, ...]]:
        """Of each row its sides, each one answer; or as the chat template writes them."""
        generated = [all(map(self._is_generated, row.sides)) for row in rows]
        for number, row in enumerate(rows):
            if generated[number] and not self.whole:
                for side in row.sides:
                    _trained_turns(cast(ChatSample, side), number, place)  # an answer of no weight is refused
        sides: list[Any] = list(zip(*(row.sides for row in rows), strict=True))
        by_row = zip(*(self.encoder.encode_answers(side, place, generated) for side in sides), strict=True)
        doubts = [NO_DOUBT if self.whole or each else Doubt.SEVERAL_TURNS for each in generated]
        return [
            tuple(replace(answer, doubt=answer.doubt | doubt) for answer in answers)
            for answers, doubt in zip(by_row, doubts, strict=True)
        ]

    def _in_rounds(self, rows: Sequence[PreferenceSample], place: RowPlace) -> list[list[Answer]]:
        """Of each row its sides, of which some have several turns."""
        sides: list[Any] = list(zip(*(row.sides for row in rows), strict=True))
        wanted = [[_trained_turns(each, number, place) for number, each in enumerate(side)] for side in sides]
        rounds = [self.encoder.encode_rounds(side, own, place) for side, own in zip(sides, wanted, strict=True)]
        found = [answers_of_rounds(own) for own in zip(*rounds, strict=True)]
        for number, answers in enumerate(found):
            if not answers[0].prompt:
                raise place.error(number, self._no_prompt("what the chat template writes of the conversations"))
        return found

    def _has_rounds(self, row: PreferenceSample) -> bool:
        """Whether a side has several turns of the assistant, and no side none."""
        if not self.in_rounds or all(map(self._is_generated, row.sides)):
            return False
        return all(isinstance(side, ChatSample) and _turns_of(side) for side in row.sides)

    def _rounds(
        self, answers: Sequence[Answer], flat: Int[np.ndarray, " tokens"]
    ) -> tuple[Int[np.ndarray, " tokens"], list[Rounds] | None]:
        """The labels of a side of some rows, and their rounds."""
        if not self.in_rounds:
            return flat, None
        rounds: list[Rounds] = [[(part.seen, len(part.token_ids)) for part in answer.rounds] for answer in answers]
        if not any(rounds):
            return flat, rounds
        labels, _ = flatten(
            [
                [*answer.prompt, *(label for part in answer.rounds for label in part.labels)]
                if answer.rounds
                else answer.token_ids
                for answer in answers
            ]
        )
        return labels, rounds

    def _is_generated(self, side: Sample) -> bool:
        """Whether a side is a prompt and one answer; as far as a reward model goes, whether it ends with an answer."""
        assert isinstance(side, ChatSample)
        return side.messages[-1]["role"] == "assistant" if self.whole else side.has_one_answer

    def _doubts(self, samples: Sequence[Sample], side: TokenRows) -> Int[np.ndarray, " rows"]:
        """What is doubtful in one side of each row, by what is read of it."""
        doubts = doubts_of(samples)
        if not (self.whole or self.is_implicit):
            doubts |= Doubt.NO_ANSWER * without(side, self.saying_nothing, others=True)
        if isinstance(samples[0], TokenSample):
            doubts |= Doubt.NO_END * without(side, self.ending)
        if isinstance(self.encoder, ChatEncoder):
            doubts |= np.array(self.encoder.doubts(cast(Sequence[ChatSample], samples)), dtype=np.int64)
        return doubts

    def _common_lengths(self, sides: Sequence[TokenLists], place: RowPlace) -> Int[np.ndarray, " rows"]:
        """How many tokens all sides of each pair begin with."""
        lengths = []
        for index, (one, *others) in enumerate(zip(*sides, strict=True)):
            length = min(shared_prefix(one, other) for other in others)
            if self.whole:
                length = max(min(length, len(one) - 1, *(len(other) - 1 for other in others)), 0)
            elif any(one != other for other in others) and self.special_ids.issuperset(one[:length]):
                raise place.error(index, self._no_prompt("the texts" if self.kind == "text" else "the token ids"))
            lengths.append(length)
        return np.array(lengths, dtype=np.int64)

    def _check_prompts(self, rows: Sequence[PreferenceSample], place: RowPlace) -> None:
        """Refuse conversations that have no message in common; an explicit prompt has at least one."""
        for index, row in enumerate(rows):
            side = row.sides[0]
            if isinstance(side, ChatSample) and side.prompt_messages == 0:
                raise place.error(index, self._no_prompt("the conversations"))

    def _no_prompt(self, what: str) -> str:
        return NO_PROMPT.format(quoted(self.side_names), what)


NO_PROMPT = (
    "{} begin with no prompt in common: {} differ from the start. Give the prompt in a column "
    "of its own, or drop the row."
)


def _turns_of(side: ChatSample) -> list[int]:
    """The messages of the assistant behind the prompt, by their numbers."""
    return [number for number in assistant_turns(side.messages) if number >= (side.prompt_messages or 0)]


def _trained_turns(side: ChatSample, index: int, place: RowPlace) -> list[int]:
    """Those of them that are trained, by what the messages say."""
    try:
        weights = {number: weight_of(side.messages[number], number) for number in _turns_of(side)}
        other = next((number for number, weight in weights.items() if weight not in (0, 1)), None)
        if other is not None:
            raise ValueError(
                f"message {other} has the weight {weights[other]}; in pairs and labelled rows it is 0 or 1."
            )
        if not any(weights.values()):
            raise ValueError("no message of the completion is trained: each has the weight 0.")
    except ValueError as error:
        raise place.error(index, error) from error
    return [number for number, weight in weights.items() if weight]


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
        return ChatEncoder.for_rows(
            *(first, tokenizer, options.chat_template, source),
            in_parts=options.contents_in_parts,
            stop_ids=options.stop_ids,
            thought_end=options.thought_end,
            by_turns=options.turns == "as_generated",
            heeds_marks=False,
        )
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
