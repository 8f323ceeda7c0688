"""Rows of any format to token ids and labels.

A completion that is one message of the assistant is taken as it is generated (see `rounds`). With `turns="whole"`, and
in other rows, ids and labels are those of TRL 1.16 (`SFTTrainer._prepare_dataset`), made a batch at a time: a text
gets the end token and the tokenizer's own special tokens; a conversation gets what its chat template writes, and
nothing else; a completion begins where the tokens of the prompt alone and of prompt and completion together diverge.

Where we differ: a `completion_mask` that comes with tokenized rows is used unless `completion_only_loss=False`
(TRL ignores it unless True), and templates without generation marks are taken turn by turn (see `chat`).
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, cast

import numpy as np
from datasets import Features
from jaxtyping import Bool, Float, Int
from transformers import PreTrainedTokenizerBase

from lowtide.data.batches.token_rows import (
    IGNORED,
    LENGTHS_FEATURE,
    TOKEN_FEATURES,
    WEIGHTS,
    WEIGHTS_FEATURE,
    TokenRows,
    flatten,
)
from lowtide.data.encode.chat import ChatEncoder
from lowtide.data.encode.rounds import Round
from lowtide.data.encode.text import TextEncoder
from lowtide.data.encode.tokenized import encode_tokenized
from lowtide.data.encode.truncation import Truncation, truncate
from lowtide.data.formats.conversation import TRAINED, trained_roles, weight_of
from lowtide.data.formats.reading import ChatSample, RowFormat, RowPlace, Sample, TextSample, TokenSample
from lowtide.data.options import PrepareOptions
from lowtide.data.report.doubts import Doubt, doubts_of, ending_ids, relabelled, special_ids, without

logger = logging.getLogger(__name__)
TRAINED_KEYS = frozenset(TRAINED)


class RowEncoder:
    """Encodes batches of one dataset's rows, which are all of the first row's kind.

    Raises:
        ValueError: an option that can't work with these rows, or something that the tokenizer lacks.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        row_format: RowFormat[Sample],
        options: PrepareOptions,
        first_row: Mapping[str, Any],
        source: str,
    ) -> None:
        self.features = TOKEN_FEATURES
        self.tokenizer = tokenizer
        self.format = row_format
        self.options = options
        self.source = source
        self.vocab_size = options.vocab_size or len(tokenizer)
        self.saying_nothing, self.ending = special_ids(tokenizer), ending_ids(tokenizer)
        first = self._read({name: [value] for name, value in first_row.items()}, RowPlace(source, [0]))[0]
        self.kind = first.kind
        options.check_for(first, source)
        answers = self._learns_answers(first)
        self.text = TextEncoder(tokenizer) if isinstance(first, TextSample) else None
        self.chat = (
            ChatEncoder.for_rows(
                *(first, tokenizer, options.chat_template, source),
                in_parts=options.contents_in_parts,
                stop_ids=options.stop_ids,
                thought_end=options.thought_end,
                by_turns=options.turns == "as_generated" and (options.assistant_only_loss or answers),
                heeds_marks=options.assistant_only_loss,
            )
            if isinstance(first, ChatSample)
            else None
        )
        self.roles = trained_roles(["assistant"] if options.roles_to_train is None else options.roles_to_train)
        self.by_rounds = self.chat is not None and self.chat.by_turns
        self._check_trained(first)
        if self.chat is not None and (options.assistant_only_loss or self.by_rounds):
            lengths = LENGTHS_FEATURE if self.by_rounds else {}
            self.features = Features({**TOKEN_FEATURES, **lengths, **WEIGHTS_FEATURE})
        self._encode = {
            TokenSample: self._encode_tokenized,
            TextSample: self._encode_texts,
            ChatSample: self._encode_chats,
        }[type(first)]

    def _learns_answers(self, first: Sample) -> bool:
        """Whether the completions of prompts are scored, and nothing else."""
        has_prompts = isinstance(first, ChatSample) and first.prompt_messages is not None
        return has_prompts and not self.options.assistant_only_loss and self.options.completion_only_loss is not False

    def _check_trained(self, first: Sample) -> None:
        """Refuses roles whose messages can't be told, and says where what messages say of themselves is not read.

        Raises:
            ValueError: other roles than the assistant's are to be trained, and conversations are taken whole.
        """
        if self.roles != {"assistant"} and not self.by_rounds:
            raise ValueError(
                f"roles_to_train={sorted(self.roles)} requires turns='as_generated', and assistant_only_loss=True with "
                "a chat template without {% generation %} marks, or prompts whose completions alone are scored: "
                "messages of other roles than the assistant's can't be told else."
            )
        if self.options.thought_end is not None and not (self.chat is not None and self.chat.by_turns):
            raise ValueError(
                f"thought_end={self.options.thought_end!r} requires turns='as_generated': conversations of which "
                "completions alone are scored, or with assistant_only_loss=True and a chat template without "
                "{% generation %} marks. Leave it out."
            )
        marked = isinstance(first, ChatSample) and any(TRAINED_KEYS & message.keys() for message in first.messages)
        if marked and not (self.options.assistant_only_loss or self.by_rounds):
            logger.warning(
                "%s: messages say whether they are trained (%s), which is read with assistant_only_loss=True, or where "
                "the completions of prompts are taken as they are generated: here they are trained like all others.",
                self.source,
                ", ".join(TRAINED),
            )

    def __call__(self, batch: Mapping[str, Sequence[Any]], numbers: Sequence[int]) -> TokenRows:
        """Encode a batch of columns, whose rows have these numbers in the dataset.

        Raises:
            ValueError: a row that can't be used; the message names it.
        """
        place = RowPlace(self.source, numbers)
        samples = self._read(batch, place)
        for index, sample in enumerate(samples):
            if sample.kind != self.kind:
                raise place.error(index, f"this is a {sample.kind}, and the dataset's first row a {self.kind}.")
        rows = self._encode(samples, place)
        check_vocabulary(rows, self.vocab_size, place)
        weights = rows.weights if WEIGHTS in self.features else None
        return replace(rows, doubts=self._doubts(samples, rows), weights=weights)

    def _doubts(self, samples: Sequence[Sample], rows: TokenRows) -> Int[np.ndarray, " rows"]:
        """What is doubtful in each row."""
        empty = without(rows, self.saying_nothing, others=True)
        if rows.groups is not None:
            empty = np.logical_or.reduceat(empty, rows.groups[:-1])
        doubts = doubts_of(samples) | Doubt.NO_ANSWER * empty
        if isinstance(samples[0], TokenSample):
            doubts |= Doubt.NO_END * without(rows, self.ending) | Doubt.OTHER_LABELS * relabelled(rows)
        if self.chat is not None:
            doubts |= np.array(self.chat.doubts(cast(Sequence[ChatSample], samples)), dtype=np.int64)
        return doubts if rows.doubts is None else doubts | rows.doubts

    def _read(self, batch: Mapping[str, Sequence[Any]], place: RowPlace) -> list[Sample]:
        samples = self.format.read_batch(batch, place)
        if not self.options.last_turn_only:
            return samples
        return [_with_last_turn(sample, index, place) for index, sample in enumerate(samples)]

    def cut(self, rows: TokenRows, truncation: Truncation) -> TokenRows:
        """Rows within the limits on their lengths."""
        return truncate(rows, truncation)[0]

    def _encode_tokenized(self, samples: Sequence[TokenSample], place: RowPlace) -> TokenRows:
        return encode_tokenized(samples, place, mask_prompts=self.options.completion_only_loss is not False)

    def _encode_texts(self, samples: Sequence[TextSample], place: RowPlace) -> TokenRows:
        assert self.text is not None
        token_ids = self.text.encode(samples, place)
        if samples[0].prompt is None:
            return _rows(*flatten(token_ids))
        return self._after_prompts(self.text.encode_prompts(samples, place), token_ids)

    def _encode_chats(self, samples: Sequence[ChatSample], place: RowPlace) -> TokenRows:
        assert self.chat is not None
        if self.by_rounds:
            return self._encode_rounds(self.chat, samples, place)
        if self.options.assistant_only_loss:
            return self._encode_whole_turns(self.chat, samples, place)
        token_ids = self.chat.encode(samples, place)
        if samples[0].prompt_messages is None:
            return _rows(*flatten(token_ids))
        return self._after_prompts(self.chat.encode_prompts(samples, place), token_ids)

    def _encode_whole_turns(self, chat: ChatEncoder, samples: Sequence[ChatSample], place: RowPlace) -> TokenRows:
        """Conversations as they stand, of which turns are scored."""
        wanted = [self._wanted(sample, index, place, 0) for index, sample in enumerate(samples)]
        token_ids, masks = chat.encode_with_turns(samples, place, wanted)
        weights = np.fromiter(chain.from_iterable(masks), np.float32)
        if samples[0].prompt_messages is None:
            rows = _rows(*flatten(token_ids), weights)
        else:
            rows = self._after_prompts(chat.encode_prompts(samples, place), token_ids, weights)
        lost = [chat.loses_thoughts(*pair) for pair in zip(samples, wanted, strict=True)]
        return replace(rows, doubts=np.array(lost, dtype=np.int64) * Doubt.NOT_SHOWN)

    def _encode_rounds(self, chat: ChatEncoder, samples: Sequence[ChatSample], place: RowPlace) -> TokenRows:
        all_count = self.options.completion_only_loss is False
        firsts = [0 if all_count else sample.prompt_messages or 0 for sample in samples]
        pairs = enumerate(zip(samples, firsts, strict=True))
        wanted = [self._wanted(sample, index, place, first) for index, (sample, first) in pairs]
        silent = [not (weights or self._speaks(sample)) for sample, weights in zip(samples, wanted, strict=True)]
        rounds = chat.encode_rounds(samples, wanted, place)
        for number, row in self._as_they_stand(chat, samples, place, silent):
            rounds[number], wanted[number] = [row], {0: 1.0}
        rows = [row for of_sample in rounds for row in of_sample]
        if not self.options.assistant_only_loss:  # nothing is learned of what follows the last answer
            rows = [replace(row, token_ids=row.token_ids[: row.turns[-1][1]]) if row.turns else row for row in rows]
        token_ids, offsets = flatten([row.token_ids for row in rows])
        weights = np.zeros(len(token_ids), dtype=np.float32)
        of_turns = [[*of_sample.values()] for of_sample, made in zip(wanted, rounds, strict=True) for _ in made]
        for start, row, own in zip(offsets.tolist(), rows, of_turns, strict=False):
            for number, (begin, end) in zip(row.numbers, row.turns, strict=True):
                weights[start + begin : start + end] = own[number]
        prompts = None
        if samples[0].prompt_messages is not None:
            prompts = np.array([row.turns[0][0] if row.turns else len(row.token_ids) for row in rows], dtype=np.int64)
        groups = np.cumsum([0, *map(len, rounds)])
        doubts = np.array([of_sample[0].doubt for of_sample in rounds], dtype=np.int64)
        return replace(_rows(token_ids, offsets, weights, prompts), groups=groups, doubts=doubts)

    def _speaks(self, sample: ChatSample) -> bool:
        """Whether a message of a role to train is there; in a completion, where these alone are scored."""
        if self.options.assistant_only_loss:
            return True
        return any(message["role"] in self.roles for message in sample.messages[sample.prompt_messages or 0 :])

    def _as_they_stand(
        self, chat: ChatEncoder, samples: Sequence[ChatSample], place: RowPlace, silent: Sequence[bool]
    ) -> Iterator[tuple[int, Round]]:
        """The conversations whose completions nobody to train says, as the template writes them, by their numbers."""
        these = [number for number, each in enumerate(silent) if each]
        rows = RowPlace(place.source, [place.numbers[number] for number in these])
        answers = chat.encode_answers([samples[number] for number in these], rows, [False] * len(these))
        for number, answer in zip(these, answers, strict=True):
            span = shared_prefix(answer.prompt, answer.token_ids), len(answer.token_ids)
            yield number, Round(answer.token_ids, [span], [0], Doubt.SEVERAL_TURNS)

    def _wanted(self, sample: ChatSample, index: int, place: RowPlace, first: int) -> dict[int, float]:
        """The numbers of the messages that are scored, from `first` on, with their weights."""
        try:
            found = {
                number: weight
                for number, message in enumerate(sample.messages)
                if number >= first and message["role"] in self.roles and (weight := weight_of(message, number))
            }
        except ValueError as error:
            raise place.error(index, error) from error
        return dict([*found.items()][-1:]) if self.options.train_on_last_turn_only else found

    def _after_prompts(
        self,
        prompts: Sequence[Sequence[int]],
        whole: Sequence[Sequence[int]],
        weights: Float[np.ndarray, " tokens"] | None = None,
    ) -> TokenRows:
        token_ids, offsets = flatten(whole)
        lengths = np.array([shared_prefix(a, b) for a, b in zip(prompts, whole, strict=True)], dtype=np.int64)
        merged = lengths < np.array([len(prompt) for prompt in prompts])
        weights = np.ones(len(token_ids), dtype=np.float32) if weights is None else weights
        if self.options.completion_only_loss is not False:
            position = np.arange(len(token_ids)) - np.repeat(offsets[:-1], np.diff(offsets))
            weights = weights * (position >= np.repeat(lengths, np.diff(offsets)))
        return _rows(token_ids, offsets, weights, lengths, merged)


def _with_last_turn(sample: Sample, index: int, place: RowPlace) -> Sample:
    """A conversation without a prompt, with its last message as the completion."""
    if not isinstance(sample, ChatSample) or sample.prompt_messages is not None:
        return sample
    if len(sample.messages) < 2 or sample.messages[-1]["role"] != "assistant":
        raise place.error(index, "the conversation does not end with what the assistant answers, which is learned.")
    return replace(sample, prompt_messages=len(sample.messages) - 1)


def shared_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens both begin with."""
    if other[: len(one)] == one:
        return len(one)
    return next((index for index, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), len(other))


def check_vocabulary(rows: TokenRows, vocab_size: int, place: RowPlace) -> None:
    """Refuse token ids and labels that the model does not know."""
    check_ids("input_ids", rows.token_ids, rows.offsets, vocab_size, place)
    check_ids("labels", rows.labels, rows.offsets, vocab_size, place, lowest=IGNORED)


def check_ids(
    name: str,
    ids: Int[np.ndarray, " tokens"],
    offsets: Int[np.ndarray, " rows+1"],
    vocab_size: int,
    place: RowPlace,
    lowest: int = 0,
) -> None:
    """Refuse ids that are neither in the vocabulary nor `lowest`."""
    if len(ids) == 0 or (ids.max() < vocab_size and ids.min() >= 0):
        return
    outside = (ids >= vocab_size) | ((ids < 0) & (ids != lowest))
    if not outside.any():
        return
    token = int(outside.argmax())
    wrong = int(ids[token])
    if wrong < 0:
        also = f", or {lowest} for a token that is not trained" if lowest else ""
        said = f"{name} holds {wrong}: a token id is 0 or above{also}"
    else:
        said = (
            f"{name} holds {wrong}, outside the vocabulary of {vocab_size} ids (0 to {vocab_size - 1}). "
            "Is the tokenizer the model's own?"
        )
    raise place.error(int(np.searchsorted(offsets, token, side="right")) - 1, said)


def _rows(
    token_ids: Int[np.ndarray, " tokens"],
    offsets: Int[np.ndarray, " rows+1"],
    weights: Float[np.ndarray, " tokens"] | None = None,
    prompt_lengths: Int[np.ndarray, " rows"] | None = None,
    merged: Bool[np.ndarray, " rows"] | None = None,
) -> TokenRows:
    """Rows of which tokens of weight 0 are not scored."""
    labels = token_ids if weights is None else np.where(weights != 0, token_ids, IGNORED)
    rest = None if weights is None else np.where(weights != 0, weights, 1)
    return TokenRows(token_ids, labels, offsets, prompt_lengths, merged, weights=rest)
