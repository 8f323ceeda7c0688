"""Collators: a list of rows becomes what a trainer's step, or the plain `transformers.Trainer`, takes.

`RaggedCollator` is the one that lowtide's own trainers use. The other two are for people who stay with the plain
`Trainer` and want to be rid of padding there. They have the names, arguments and outputs of the classes in Hugging
Face's article "Improving Hugging Face Training Efficiency Through Packing with Flash Attention 2" (2024), so its
scripts run with their imports changed:

- `DataCollatorWithFlattening`, transformers' own, with the boundaries that attention takes returned by default,
  and the segments of packed rows kept apart too;
- `DataCollatorForCompletionOnlyLM`, which TRL had until 0.19: only what follows a response template is scored.

How neighbours are kept apart in a flattened batch depends on the model's attention, see docs/padding-free.md. On
any hardware without flash-attention transformers reads the boundaries from `position_ids`, but only in a call that
builds no key-value cache; so these batches switch the cache off, and the isolation holds outside a Trainer too.
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
import transformers
from jaxtyping import Bool, Int
from numpy.lib.stride_tricks import sliding_window_view
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lowtide.data.batches.completion_rounds import CompletionRound, completion_rounds
from lowtide.data.batches.images import IMAGES, ImageReader
from lowtide.data.batches.shared_rounds import whole_rounds
from lowtide.data.batches.token_rows import PREFIX, PREFIX_LENGTH, SEGMENTS
from lowtide.data.batches.values import DOCUMENT, LABEL, LENGTHS, NUMBER, OF_PROMPT, REFERENCE, WORDS
from lowtide.ragged import SECOND_TEXT, RaggedBatch, SegmentImage, Shown
from lowtide.score_rules import IGNORE, NEXT_TOKEN, ScoreRule, ShiftedRight

Row = Mapping[str, Any]
REFERENCE_COLUMN = "ref_logprobs"
"""The column of a reference's log-probabilities, of all scores of a row."""
OF_TOKENS = ("input_ids", "labels", "attention_mask", "position_ids", "token_type_ids")
"""Tensors of a collated batch that are of its tokens."""


@dataclass(frozen=True)
class RaggedCollator:
    """Prepared rows to a `RaggedBatch`, as `RaggedBatch.from_rows` reads them."""

    score_rule: ScoreRule = NEXT_TOKEN
    """Which positions are scored."""
    reader: ImageReader | None = None
    """Makes the images of rows ready, of a vision-language model."""

    def __call__(self, rows: Sequence[Row]) -> RaggedBatch:
        return RaggedBatch.from_rows(rows, self.score_rule, shown=_shown_in_rounds(self.reader, rows))


def _shown_in_rounds(reader: ImageReader | None, rows: Sequence[Row]) -> Shown | None:
    """The images among the tokens of rows, each of one segment or of several rounds; None of text alone.

    A round shows the first of its row's images: as many as were shown until then.
    """
    if reader is None:
        return None
    known: dict[Any, Any] = {}
    found: list[list[SegmentImage]] = []
    for row in rows:
        images, first = row.get(IMAGES) or [], len(found)
        lengths = row.get(SEGMENTS) or [len(row["input_ids"])]
        prefix, seen = row.get(PREFIX) or [-1] * len(lengths), row.get(PREFIX_LENGTH) or [-1] * len(lengths)
        stop = 0
        for length, other, most in zip(lengths, prefix, seen, strict=True):
            before = [] if other < 0 else [each for each in found[first + other] if most < 0 or each.start < most]
            tokens = row["input_ids"][stop : stop + length]
            found.append(reader.shown(tokens, images[len(before) :], known, whole=len(lengths) == 1))
            stop += length
    return Shown(found, reader.position_rule)


def shown(reader: ImageReader | None, rows: Sequence[Row], segments: Sequence[Sequence[int]]) -> Shown | None:
    """The images among the tokens of segments, each of which is of a row; None of text alone."""
    if reader is None:
        return None
    known: dict[Any, Any] = {}
    pairs = zip(rows, segments, strict=True)
    return Shown([reader.shown(tokens, row.get(IMAGES) or [], known) for row, tokens in pairs], reader.position_rule)


@dataclass(frozen=True)
class MaskedCollator(RaggedCollator):
    """Prepared rows of a masked language model, of which `Masking` draws what is masked, to a `RaggedBatch`: each token
    that may be masked is a score, whose target is the token."""

    def __call__(self, rows: Sequence[Row]) -> RaggedBatch:
        batch = super().__call__(rows)
        values = {NUMBER: torch.tensor([row[NUMBER] for row in rows])}
        if WORDS not in rows[0]:
            return replace(batch, row_values=values)
        pairs = (zip(row[WORDS], row["labels"], strict=True) for row in rows)
        words = [word for row in pairs for word, label in row if label != IGNORE]
        return replace(batch, row_values=values, score_values={WORDS: torch.tensor(words, dtype=torch.long)})


@dataclass(frozen=True)
class TagCollator(RaggedCollator):
    """Windows of labelled words to a `RaggedBatch` that knows which word of which document each score is of."""

    def __call__(self, rows: Sequence[Row]) -> RaggedBatch:
        batch = super().__call__(rows)
        if not {WORDS, DOCUMENT} <= rows[0].keys():
            return batch
        words = torch.tensor([word for row in rows for word in row[WORDS]])
        documents = torch.tensor([row[DOCUMENT] for row in rows])
        return replace(batch, score_values={WORDS: words[batch.score_index]}, row_values={DOCUMENT: documents})


@dataclass(frozen=True)
class LabelCollator(RaggedCollator):
    """Texts with a label each to a `RaggedBatch` that knows the labels, the rows' numbers, and where the second text of
    a pair begins."""

    def __call__(self, rows: Sequence[Row]) -> RaggedBatch:
        batch = super().__call__([{"input_ids": row["input_ids"]} for row in rows])
        known = [name for name in (LABEL, SECOND_TEXT, NUMBER) if name in rows[0]]
        return replace(batch, row_values={name: torch.tensor([row[name] for row in rows]) for name in known})


@dataclass(frozen=True)
class CompletionCollator:
    """Prepared rows of a prompt and its completions to a `RaggedBatch`; a prompt is computed once for all of them.

    A completion is a segment, or several where it has several rounds (see `completion_rounds`).
    """

    completions: tuple[str, ...]
    """The columns of the completions, in the order of their segments."""
    sharing: bool = True
    """False repeats the prompt in front of each completion; the scores are the same."""
    scores_prompt: bool = False
    """Also score the prompt, in the first completion's context."""
    score_rule: ScoreRule = NEXT_TOKEN
    """Which positions of a completion are scored."""
    values: tuple[str, ...] = ()
    """Columns that become row values."""
    reader: ImageReader | None = None
    """Makes the images of prompts ready, of a vision-language model."""
    apart: tuple[str, ...] = ()
    """Columns of completions that are only scored, without gradients, in a forward of their own."""

    def __call__(self, rows: Sequence[Row]) -> RaggedBatch:
        token_ids, labels, prefix, owner, flags, lengths = [], [], [], [], [], []

        def add(
            row: tuple[int, int],
            prompt: Sequence[int],
            own: CompletionRound,
            before: tuple[int, int] | int,
            scored: bool,
        ) -> None:
            mask = prompt if scored else [IGNORE] * len(prompt)
            if self.reader is not None:
                mask = self.reader.unscored(mask)
            unpredicted = own.labels[:1] if before == -1 and not prompt else []
            token_ids.append([*prompt, *own.token_ids])
            labels.append([*mask, *own.labels])
            prefix.append(before)
            owner.append(row)
            flags.extend([True] * sum(label != IGNORE for label in mask[1:]))
            flags.extend([False] * (own.scored - sum(label != IGNORE for label in unpredicted)))

        for number, row in enumerate(rows):
            prompt, shared = row["prompt_ids"], -1
            if self.sharing and prompt:
                shared = len(token_ids)
                add((number, -1), prompt, CompletionRound([], [], 0), -1, self.scores_prompt)
            rounds = [completion_rounds(row, name) for name in self.completions]
            for place, parts in enumerate(rounds):
                for part, own in enumerate(parts):
                    repeated, before = own.placed(prompt, shared)
                    first = place == 0 and part == 0
                    add((number, place), repeated, own, before, self.scores_prompt and first)
            lengths.append([sum(own.scored for own in parts) for parts in rounds])
        score_values = {OF_PROMPT: torch.tensor(flags)} if self.scores_prompt else {}
        if REFERENCE_COLUMN in rows[0]:
            known = [value for row in rows for value in row[REFERENCE_COLUMN]]
            score_values[REFERENCE] = torch.tensor(known, dtype=torch.float32)
        columns = {name: torch.tensor([row[name] for row in rows]) for name in self.values if name in rows[0]}
        return RaggedBatch.from_segments(
            token_ids,
            labels,
            prefix=prefix,
            row=owner,
            score_rule=self.score_rule,
            row_values={LENGTHS: torch.tensor(lengths), **columns},
            score_values=score_values,
            shown=shown(self.reader, [rows[number] for number, _ in owner], token_ids),
        )


@dataclass(frozen=True)
class PairCollator:
    """Prepared rows of a source and a target (`source_ids`, `target_ids`) to a `RaggedBatch`."""

    score_rule: ShiftedRight
    """What a decoder is given for a target."""

    def __call__(self, rows: Sequence[Row]) -> RaggedBatch:
        return RaggedBatch.from_pairs([(row["source_ids"], row["target_ids"]) for row in rows], self.score_rule)


def ragged_from_collated(batch: Mapping[str, Any], score_rule: ScoreRule = NEXT_TOKEN) -> RaggedBatch:
    """The `RaggedBatch` of what another library's collator returned; padding is dropped, each sequence is a row.

    Args:
        batch: `input_ids` `[rows, positions]`, and of the same shape `labels` (the tokens themselves if absent)
            and either `attention_mask` (0 where padded) or, for a flattened batch, `position_ids` (a new sequence
            starts wherever they do not go on by one). Further tensors [rows, ...] of a padded batch become row values.
        score_rule: where a label is predicted.

    Raises:
        ValueError: it holds images, whose places are not known.
    """
    if "pixel_values" in batch:
        raise ValueError(
            "the data_collator makes pixel_values: leave it out (and skip_prepare_dataset), and pass rows with a "
            "column 'images' and the model's processor as processing_class, which lowtide's own collator takes"
        )
    input_ids: Tensor = batch["input_ids"]
    labels: Tensor = batch.get("labels", input_ids)
    if "attention_mask" in batch:
        kept = batch["attention_mask"].bool()
        lengths = kept.sum(1).tolist()
    else:
        kept = torch.ones_like(input_ids, dtype=torch.bool)
        positions = batch.get("position_ids", torch.arange(input_ids.shape[1]).expand_as(input_ids))
        starts = torch.diff(positions, prepend=positions[:, :1] - 2) != 1
        bounds = [*torch.nonzero(starts.flatten()).flatten().tolist(), input_ids.numel()]
        lengths = np.diff(bounds).tolist()
    rows, lengths = len(input_ids), [length for length in lengths if length]
    values = {name: each for name, each in batch.items() if name not in OF_TOKENS and isinstance(each, Tensor)}
    return RaggedBatch.from_segments(
        [tokens.tolist() for tokens in input_ids[kept].split(lengths)],
        [wanted.tolist() for wanted in labels[kept].split(lengths)],
        score_rule=score_rule,
        row_values={name: each for name, each in values.items() if each.shape[:1] == (rows,) and rows == len(lengths)},
    )


class DataCollatorWithFlattening(transformers.DataCollatorWithFlattening):
    """transformers' collator of this name: all rows in one sequence `[1, tokens]`, without padding.

    Takes the arguments of transformers' class, and returns `input_ids`, `labels` (`separator_id` at each
    sequence's first token) and `position_ids` (restarting in each sequence), int64 `[1, tokens]`. Other than
    there,

    - `return_flash_attn_kwargs` is on: `cu_seq_lens_q` and `cu_seq_lens_k`, int32 `[sequences + 1]`, and
      `max_length_q` and `max_length_k`, integers;
    - a packed row (one with `seq_lengths`) is as many sequences as it holds segments. The plain Trainer passes
      that column on only with `remove_unused_columns=False`;
    - `use_cache=False` goes with the batch, as above.
    """

    def __init__(self, *args: Any, return_flash_attn_kwargs: bool = True, **kwargs: Any) -> None:
        super().__init__(*args, return_flash_attn_kwargs=return_flash_attn_kwargs, **kwargs)

    def __call__(
        self, features: Sequence[Row], return_tensors: str | None = None, separator_id: int | None = None
    ) -> dict[str, Any]:
        sequences = [sequence for row in features for sequence in _segments_of(row)]
        batch = super().__call__(sequences, return_tensors=return_tensors, separator_id=separator_id)
        return {**batch, "use_cache": False}


class DataCollatorForCompletionOnlyLM:
    """Scores only what follows the response template: TRL's collator of this name, which it dropped after 0.19.

    Without an instruction template, a row is scored from its last response template to its end. With one (for
    conversations), from each response template to the next instruction. A row in which a template is not found is
    not scored at all: it is counted in `rows_without_response` (per dataloader worker) and warned of.

    Returns `input_ids`, `attention_mask` and `labels`, int64 `[rows, longest]`; with `padding_free=True` what
    `DataCollatorWithFlattening` returns. Other than in TRL, only padding is left out of the labels, and not every
    token with the padding token's id: a model whose padding token is its end token still learns to end.

    Args:
        response_template: what comes before each response, as text or as token ids. Many tokenizers encode text
            otherwise at the start than in context; then give the ids as they stand in a row.
        instruction_template: what comes before each instruction, likewise.
        tokenizer: encodes the templates and pads.
        mlm: must be False; it is there for those who pass it.
        ignore_index: the label of tokens that are not scored.
        padding_free: return one sequence `[1, tokens]` without padding.
        pad_to_multiple_of: pad further, to a multiple of so many tokens; not with `padding_free`.
        return_tensors: must be "pt"; it is there for those who pass it.

    Raises:
        ValueError: no tokenizer, an empty template, or options that exclude each other.
    """

    def __init__(
        self,
        response_template: str | Sequence[int],
        instruction_template: str | Sequence[int] | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        mlm: bool = False,
        ignore_index: int = IGNORE,
        padding_free: bool = False,
        pad_to_multiple_of: int | None = None,
        return_tensors: Literal["pt"] = "pt",
    ) -> None:
        name = type(self).__name__
        if tokenizer is None:
            raise ValueError(f"{name} needs a tokenizer; pass tokenizer=...")
        if mlm:
            raise ValueError(f"{name} trains causal language models; mlm=True is for masked ones, leave it out")
        if padding_free and pad_to_multiple_of is not None:
            raise ValueError(f"{name}: pad_to_multiple_of pads and padding_free=True does not; leave one out")
        if return_tensors != "pt":
            raise ValueError(f"{name} returns torch tensors; return_tensors={return_tensors!r} is not there")
        self.tokenizer = tokenizer
        self.response_token_ids = _template_ids(response_template, tokenizer, "response_template")
        self.instruction_token_ids = (
            None
            if instruction_template is None
            else _template_ids(instruction_template, tokenizer, "instruction_template")
        )
        self.ignore_index = ignore_index
        self.padding_free = padding_free
        self.pad_to_multiple_of = pad_to_multiple_of
        self.rows_without_response = 0
        self._flatten = DataCollatorWithFlattening(separator_id=ignore_index)

    def __call__(self, features: Sequence[Row | Sequence[int]]) -> dict[str, Any]:
        tokens = [_tokens_of(row) for row in features]
        scored = [self._scored(row) for row in tokens]
        self._report([row for row, of_row in enumerate(scored) if of_row is None], len(tokens))
        labels = [
            np.full_like(row, self.ignore_index) if of_row is None else np.where(of_row, row, self.ignore_index)
            for row, of_row in zip(tokens, scored, strict=True)
        ]
        if self.padding_free:
            rows = zip(tokens, labels, strict=True)
            return self._flatten([{"input_ids": row, "labels": of_row} for row, of_row in rows])
        batch = self.tokenizer.pad(
            {"input_ids": [row.tolist() for row in tokens]},
            pad_to_multiple_of=self.pad_to_multiple_of,
            return_tensors="pt",
        )
        padded = torch.full_like(batch["input_ids"], self.ignore_index)
        padded[batch["attention_mask"].bool()] = torch.from_numpy(np.concatenate(labels))
        return {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"], "labels": padded}

    def _scored(self, tokens: Int[np.ndarray, " tokens"]) -> Bool[np.ndarray, " tokens"] | None:
        """Which tokens of one row are scored; None where a template is missing from it."""
        responses = _occurrences(tokens, self.response_token_ids)
        scored = np.zeros(len(tokens), dtype=bool)
        if self.instruction_token_ids is None:
            if responses:
                scored[responses[-1] + len(self.response_token_ids) :] = True
            return scored if responses else None
        instructions = _occurrences(tokens, self.instruction_token_ids)
        turns = sorted([*responses, *instructions, len(tokens)])
        for start in responses:
            begin = start + len(self.response_token_ids)
            scored[begin : next((turn for turn in turns if turn >= begin), begin)] = True
        return scored if responses and instructions else None

    def _report(self, missing: list[int], rows: int) -> None:
        if not missing:
            return
        self.rows_without_response += len(missing)
        looked_for = [self.response_token_ids.tolist()]
        if self.instruction_token_ids is not None:
            looked_for.append(self.instruction_token_ids.tolist())
        warnings.warn(
            f"{len(missing)} of this batch's {rows} rows (the first is row {missing[0]} of the batch) lack a "
            f"template, looked for as the token ids {' and '.join(map(str, looked_for))}, so nothing in them is "
            f"scored; {self.rows_without_response} rows so far. If the text is there, it is encoded otherwise in "
            "context: pass the token ids as they stand in a row; if it was cut off, raise max_length.",
            stacklevel=3,
        )


def _segments_of(row: Row) -> Iterator[Row]:
    """A packed row's segments, each as a row of lists; another row as it is."""
    row = whole_rounds(row)
    lengths = row.get("seq_lengths")
    if lengths is None:
        yield row
        return
    ends = np.cumsum(lengths).tolist()
    for start, stop in zip([0, *ends], ends, strict=False):
        yield {name: row[name][start:stop] for name in ("input_ids", "labels") if name in row}


def _tokens_of(row: Row | Sequence[int]) -> Int[np.ndarray, " tokens"]:
    """A row's tokens, without the padding that its attention mask shows."""
    if not isinstance(row, Mapping):
        return np.asarray(row, dtype=np.int64)
    tokens = np.asarray(row["input_ids"], dtype=np.int64)
    return tokens[np.asarray(row["attention_mask"], dtype=bool)] if "attention_mask" in row else tokens


def _template_ids(
    template: str | Sequence[int], tokenizer: PreTrainedTokenizerBase, option: str
) -> Int[np.ndarray, " template"]:
    ids = tokenizer.encode(template, add_special_tokens=False) if isinstance(template, str) else template
    if len(ids) == 0:
        raise ValueError(f"{option} {template!r} holds no token; give the text, or the token ids, to look for")
    return np.asarray(ids, dtype=np.int64)


def _occurrences(tokens: Int[np.ndarray, " tokens"], template: Int[np.ndarray, " template"]) -> list[int]:
    """Where the template starts in the tokens, ascending."""
    if len(tokens) < len(template):
        return []
    return np.flatnonzero((sliding_window_view(tokens, len(template)) == template).all(axis=1)).tolist()
