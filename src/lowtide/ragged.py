"""The ragged batch: token-major, without a batch dimension and without padding.

All that a post-training method wants from a model is the log-probability of some tokens. A `RaggedBatch` says
which: segments of tokens laid end to end, and beside them a list of *scores*, each a position whose hidden state
predicts a target token. Scores are a list of their own because a shared prompt's last token predicts the first
token of several completions, and because only scored positions have any business with the vocabulary.

A preference pair of prompt P (5 tokens), chosen C (4) and rejected R (3) is three segments of 5 + 4 + 3 = 12
tokens with `prefix = [-1, 0, 0]`; padded it would be 2 x 9 = 18.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lowtide.score_rules import IGNORE, NEXT_TOKEN, LaidSegment, ScoreRule, ShiftedRight

UNTOLD = -2
"""For how many tokens of a prefix are seen, and for a completion, where a number alone is given."""
SECOND_TEXT = "second_text"
"""Row value: the position at which the second text of a pair begins, for models that tell the two apart."""
WEIGHT = "weight"
"""Score value: the weight of a score in a loss that is a sum over scores; absent where each is 1."""


class Segment(NamedTuple):
    """One segment's place in the batch, as host integers: planning a batch never waits for the device."""

    start: int
    """First token."""
    stop: int
    """One past the last token."""
    prefix: int
    """The segment whose tokens it also attends to, or -1."""
    row: int
    """The dataset row that it belongs to."""
    score_start: int
    """First score."""
    score_stop: int
    """One past the last score."""
    key: int = 0
    """The same for prefixes of the same tokens, within one process; 0 for what is no prefix."""
    prefix_length: int = -1
    """So many of the prefix's first tokens are seen; -1 for all."""
    completion: int = -1
    """Which of its row's completions it is a part of; -1 where it is of none, as a prompt that they share."""
    uncut: frozenset[int] = frozenset()
    """Places in it, from its start, at which no piece of a long row begins: scores on both sides are read together."""

    @property
    def length(self) -> int:
        return self.stop - self.start

    def prefix_among(self, segments: Sequence[Segment]) -> Segment | None:
        """Its prefix as far as it sees it; None where it has none."""
        if self.prefix < 0:
            return None
        whole = segments[self.prefix]
        return whole if self.prefix_length < 0 else whole._replace(stop=whole.start + self.prefix_length)

    def after(self, segments: Sequence[Segment]) -> int:
        """How many tokens of its prefix it goes on from."""
        before = self.prefix_among(segments)
        return 0 if before is None else before.length

    def images_before(
        self, segments: Sequence[Segment], images: Sequence[Sequence[SegmentImage]]
    ) -> list[SegmentImage]:
        """Those of the images of segments that it sees in its prefix."""
        seen = self.after(segments)
        return [each for each in images[self.prefix] if each.start < seen] if seen else []


class ImageSource(NamedTuple):
    """Where an image among the tokens of a segment comes from."""

    stored: Mapping[str, Any]
    """The image as `datasets` stores it: `bytes`, or `path`."""
    before: int
    """Tokens before the first that the image fills, which the processor wrote in the place of its mark too."""
    tokens: int
    """All that it wrote there."""


@dataclass(frozen=True)
class SegmentImage:
    """An image among the tokens of a segment, made ready for a model."""

    inputs: Mapping[str, Tensor]
    """What the model's vision tower takes of this image, by the names of its arguments; in host memory until a
    micro-batch runs."""
    start: int
    """Place of the first token in its segment that the image fills."""
    tokens: int
    """How many tokens it fills."""
    key: int
    """The same for the same image, within one process."""
    marked: tuple[int, ...] = ()
    """The token ids that the processor says are of images, to models whose forward is told of each token."""
    source: ImageSource | None = None
    """For who reads the same image with another processor; None where it is not known."""


class PositionRule(Protocol):
    """How a model counts positions where they have several axes (M-RoPE)."""

    def positions(self, tokens: int, images: Sequence[SegmentImage]) -> Int[Tensor, "axes tokens"]:
        """Of a row of so many tokens, some of which are of images; starts are places in the row."""
        ...


class Shown(NamedTuple):
    """The images of segments, and how their positions are counted."""

    images: Sequence[Sequence[SegmentImage]]
    """Of each segment those among its tokens, in their order."""
    position_rule: PositionRule | None = None
    """None for a model whose positions have one axis."""


@dataclass(frozen=True)
class RaggedBatch:
    """Segments of tokens end to end, and the tokens to score among them.

    Segments of one row stand together, rows in ascending order from 0, scores in the order of their segments. A
    prefix stands before the segments that share it, and has no prefix of its own. It belongs to their row; only
    `arranged` lets rows have one in common, which `stands_for` says.

    Raises:
        ValueError: at construction, if the fields contradict each other; the message names the field and place.
    """

    token_ids: Int[Tensor, " tokens"]
    position_ids: Int[Tensor, " tokens"]
    """Restart in each segment; a segment with a prefix goes on from as much of it as it sees."""
    row: Int[Tensor, " segments"]
    """The dataset row (example, pair, prompt group) that the segment belongs to."""
    score_index: Int[Tensor, " scores"]
    """The position whose hidden state predicts the target."""
    score_target: Int[Tensor, " scores"]
    """The token predicted there."""
    score_segment: Int[Tensor, " scores"]
    """The segment that the score counts for."""
    segments: tuple[Segment, ...]
    """Where they lie, and which they go on from; on the host."""
    row_values: Mapping[str, Tensor] = field(default_factory=dict)
    """What else is known of each row, [rows] each: a label, a margin."""
    score_values: Mapping[str, Tensor] = field(default_factory=dict)
    """What else is known of each score, [scores] each: a reference's log-probability, say."""
    images: tuple[tuple[SegmentImage, ...], ...] = ()
    """Of each segment the images among its tokens, in their order; () where no row has any."""
    axis_positions: Int[Tensor, "axes tokens"] | None = None
    """Positions on several axes, of a model that has them; None for one that reads `position_ids`."""
    piece: Any = None
    """`ops.attention.piece_keys.PieceKeys` of a batch that is a piece of a long row: all its segments go on from the
    piece before it. What is made of parts of the batch has none."""
    stands_in: bool = False
    """Whether its rows only keep a rank that has none busy: they are not scored, and no row counts."""

    def __post_init__(self) -> None:
        _validate(self)

    # -- construction ------------------------------------------------------------------------------------------

    @classmethod
    def from_segments(
        cls,
        token_ids: Sequence[Sequence[int]],
        labels: Sequence[Sequence[int]] | None = None,
        *,
        prefix: Sequence[int | tuple[int, int]] | None = None,
        row: Sequence[int | tuple[int, int]] | None = None,
        score_rule: ScoreRule = NEXT_TOKEN,
        row_values: Mapping[str, Tensor] | None = None,
        score_values: Mapping[str, Tensor] | None = None,
        shown: Shown | None = None,
    ) -> RaggedBatch:
        """Lays segments end to end.

        Args:
            token_ids: the tokens of each segment; none may be empty.
            labels: for each token its target, or -100; the tokens themselves if None. The rule says where a target is
                predicted. By the default one that is the token before it: the first token of a segment is predicted
                from its prefix's last token; without a prefix nothing predicts it, and its label is not scored.
            prefix: for each segment the index of the segment it goes on from, or -1 (the default); with a number of
                tokens, if it goes on after so many of that, and does not see what follows them there.
            row: for each segment its row, or its row and completion, -1 for a part of none; each segment a row of its
                own if None. By rows alone, the segments of a row that are no prefix are its completions.
            score_rule: which positions are scored.
            row_values: further values, [rows] each; likewise score_values, [scores] each.
            shown: the images of the segments; None of text alone.

        Raises:
            ValueError: a segment is empty, a label list has another length, a prefix or row is out of order.
        """
        count = len(token_ids)
        labels = token_ids if labels is None else labels
        seen = _told([-1] * count if prefix is None else prefix)
        shared = {each for each, _ in seen}
        owner = _completions_of([(number, -1) for number in range(count)] if row is None else _told(row), shared)
        _check_lists(token_ids, labels, [each for each, _ in seen], [each for each, _ in owner])
        segments: list[Segment] = []
        laid: list[LaidSegment] = []
        places: list[tuple[Tensor, Tensor, Tensor]] = []  # position_ids, score_index and score_target of each
        images = ((),) * count if shown is None else tuple(map(tuple, shown.images))
        start = scored = 0
        given = zip(token_ids, labels, seen, owner, strict=True)
        for number, (tokens, wanted, (other, most), (of_row, of)) in enumerate(given):
            stop, most = start + len(tokens), max(most, -1)
            before = laid[other] if other >= 0 else None
            if before is not None and most >= 0:
                before = before._replace(token_ids=before.token_ids[:most])
            laid.append(LaidSegment(start, tokens, wanted, before, number in shared))
            index, target = score_rule.places(laid[-1])
            first = len(before.token_ids) if before is not None else 0
            places.append((torch.arange(first, first + len(tokens)), index, target))
            key = _key(tokens, images[number]) if number in shared else 0
            segments.append(Segment(start, stop, other, of_row, scored, scored + len(index), key, most, of))
            start, scored = stop, scored + len(index)
        tokens = torch.cat([torch.as_tensor(tokens, dtype=torch.long) for tokens in token_ids])
        positions, indices, targets = (torch.cat(each) for each in zip(*places, strict=True))
        rule = None if shown is None else shown.position_rule
        axes = None if rule is None else _axis_positions(rule, segments, images)
        looks = images if any(images) else (), axes
        return cls.assembled(tokens, positions, indices, targets, segments, row_values, score_values, looks)

    @classmethod
    def from_rows(
        cls,
        rows: Sequence[Mapping[str, Any]],
        score_rule: ScoreRule = NEXT_TOKEN,
        *,
        shown: Shown | None = None,
    ) -> RaggedBatch:
        """Lays prepared dataset rows end to end.

        Args:
            rows: each with `input_ids`, optionally `labels` (the tokens themselves if absent), and optionally
                `seq_lengths` where a row is of several segments, with `prefix` and `prefix_length` where some of them
                go on from others of the row, as of `from_segments`; optionally `loss_weights`, a number for each token.
            score_rule: which positions are scored.
            shown: the images of the rows, which are not packed then.

        Raises:
            ValueError: a row lacks `input_ids`, or its lengths do not add up; the message names the row.
        """
        token_ids, labels, weights, owner, prefix = [], [], [], [], []
        weighted = any(entry.get("loss_weights") for entry in rows)
        for number, entry in enumerate(rows):
            if "input_ids" not in entry:
                raise ValueError(f"row {number} of the batch has no `input_ids`, only {sorted(entry)}")
            tokens = entry["input_ids"]
            wanted = entry.get("labels")
            wanted = tokens if wanted is None else wanted
            lengths = entry.get("seq_lengths") or [len(tokens)]
            if sum(lengths) != len(tokens) or len(wanted) != len(tokens):
                raise ValueError(
                    f"row {number} of the batch: {len(tokens)} input_ids, {len(wanted)} labels, "
                    f"{sum(lengths)} tokens by seq_lengths; the three must agree"
                )
            own = (entry.get("loss_weights") or [1.0] * len(tokens)) if weighted else []
            places = [entry.get(name) for name in ("prefix", "prefix_length")]
            befores, seen = ([-1] * len(lengths) if each is None else each for each in places)
            if not len(befores) == len(seen) == len(lengths):
                raise ValueError(
                    f"row {number} of the batch: {len(lengths)} seq_lengths, {len(befores)} entries in prefix, "
                    f"{len(seen)} in prefix_length; the three must agree"
                )
            first = len(token_ids)
            prefix += [(other + first if other >= 0 else -1, most) for other, most in zip(befores, seen, strict=True)]
            start = 0
            for length in lengths:
                token_ids.append(tokens[start : start + length])
                labels.append(wanted[start : start + length])
                weights.append(own[start : start + length])
                owner.append((number, -1))
                start += length
        batch = cls.from_segments(token_ids, labels, prefix=prefix, row=owner, score_rule=score_rule, shown=shown)
        return replace(batch, score_values={WEIGHT: _weights(batch.segments, labels, weights)}) if weighted else batch

    @classmethod
    def from_pairs(
        cls,
        pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
        rule: ShiftedRight,
        *,
        row_values: Mapping[str, Tensor] | None = None,
    ) -> RaggedBatch:
        """Lays sources and targets end to end, each pair a row: the source is the prefix of what the decoder is given.

        Args:
            pairs: the tokens of a source, and of its target, -100 where one is not scored.
            rule: what the decoder is given for a target.
            row_values: further values, [rows] each.

        Raises:
            ValueError: a source or a target is empty.
        """
        token_ids, labels, prefix, row = [], [], [], []
        for number, (source, target) in enumerate(pairs):
            prefix += [-1, len(token_ids)]
            token_ids += [source, rule.tokens(target)]
            labels += [[IGNORE] * len(source), target]
            row += [number, number]
        return cls.from_segments(token_ids, labels, prefix=prefix, row=row, score_rule=rule, row_values=row_values)

    @classmethod
    def concat(cls, batches: Sequence[RaggedBatch]) -> RaggedBatch:
        """Joins batches into one; the rows of each go on from those of the one before."""
        if len(batches) == 1:
            return batches[0]
        segments: list[Segment] = []
        indices: list[Tensor] = []
        axes = [batch.axis_positions for batch in batches if batch.axis_positions is not None]
        images = tuple(each for batch in batches for each in batch.segment_images)
        images = images if any(images) else ()
        token = row = score = 0
        for batch in batches:
            count = len(segments)
            indices.append(batch.score_index + token)
            segments += [
                part._replace(
                    start=part.start + token,
                    stop=part.stop + token,
                    prefix=part.prefix + count if part.prefix >= 0 else -1,
                    row=part.row + row,
                    score_start=part.score_start + score,
                    score_stop=part.score_stop + score,
                )
                for part in batch.segments
            ]
            token, row, score = token + batch.tokens, row + batch.rows, score + batch.scores
        return cls.assembled(
            torch.cat([batch.token_ids for batch in batches]),
            torch.cat([batch.position_ids for batch in batches]),
            torch.cat(indices),
            torch.cat([batch.score_target for batch in batches]),
            segments,
            _joined([batch.row_values for batch in batches]),
            _joined(_with_weights(batches)),
            (images, torch.cat(axes, 1) if axes else None),
        )

    @classmethod
    def assembled(
        cls,
        token_ids: Tensor,
        position_ids: Tensor,
        index: Tensor,
        target: Tensor,
        segments: Sequence[Segment],
        row_values: Mapping[str, Tensor] | None = None,
        score_values: Mapping[str, Tensor] | None = None,
        seen: tuple[tuple[tuple[SegmentImage, ...], ...], Tensor | None] = ((), None),
    ) -> RaggedBatch:
        """The device-side copies of what `segments` says on the host; `seen` are images and positions on axes."""
        device = token_ids.device
        scores = torch.tensor([part.score_stop - part.score_start for part in segments])
        owner = torch.repeat_interleave(torch.arange(len(segments)), scores, output_size=segments[-1].score_stop)
        return cls(
            token_ids=token_ids,
            position_ids=position_ids,
            row=sent(torch.tensor([part.row for part in segments]), device),
            score_index=index,
            score_target=target,
            score_segment=sent(owner, device),
            segments=tuple(segments),
            row_values=row_values or {},
            score_values=score_values or {},
            images=seen[0],
            axis_positions=seen[1],
        )

    # -- sizes, all from the host ------------------------------------------------------------------------------

    @property
    def tokens(self) -> int:
        return self.segments[-1].stop

    @property
    def scores(self) -> int:
        return self.segments[-1].score_stop

    @property
    def rows(self) -> int:
        return self.segments[-1].row + 1

    @functools.cached_property
    def completions(self) -> int:
        """Completions of a row."""
        return 1 + max(part.completion for part in self.segments)

    @functools.cached_property
    def completion(self) -> Int[Tensor, " segments"]:
        """Which of its row's completions each segment is a part of, or -1, on the batch's device."""
        return sent(torch.tensor([part.completion for part in self.segments]), self.token_ids.device)

    @functools.cached_property
    def row_tokens(self) -> list[int]:
        """Tokens of each row."""
        counts = [0] * self.rows
        for part in self.segments:
            counts[part.row] += part.length
        return counts

    @property
    def segment_images(self) -> tuple[tuple[SegmentImage, ...], ...]:
        """Of each segment the images among its tokens; none where no row has any."""
        return self.images or ((),) * len(self.segments)

    @functools.cached_property
    def row_segments(self) -> list[list[int]]:
        """The segments of each row."""
        numbers: list[list[int]] = [[] for _ in range(self.rows)]
        for number, part in enumerate(self.segments):
            numbers[part.row].append(number)
        return numbers

    @property
    def lengths(self) -> Int[Tensor, " segments"]:
        """The tokens of each segment, on the batch's device."""
        return sent(torch.tensor([part.length for part in self.segments]), self.token_ids.device)

    @property
    def token_types(self) -> Int[Tensor, " tokens"] | None:
        """1 in the second text of a pair and 0 elsewhere; None of rows that are no pairs."""
        second = self.row_values.get(SECOND_TEXT)
        if second is None:
            return None
        begins = second[self.row].repeat_interleave(self.lengths, output_size=self.tokens)
        return (self.position_ids >= begins).long()

    @property
    def repeated_tokens(self) -> int:
        """Tokens of the form that repeats each prompt before each completion that shares it; a prefix that is scored
        itself is not repeated."""
        prompts = {
            part.prefix
            for part in self.segments
            if part.prefix >= 0 and self.segments[part.prefix].score_start == self.segments[part.prefix].score_stop
        }
        return sum(
            part.length + (part.after(self.segments) if part.prefix in prompts else 0)
            for number, part in enumerate(self.segments)
            if number not in prompts
        )

    # -- change ------------------------------------------------------------------------------------------------

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> RaggedBatch:
        """The same batch on another device; images stay in host memory, until those of a micro-batch are needed.

        Args:
            non_blocking: as of tensors; copies to a device never wait.
        """
        device = torch.device(device)
        return replace(replace(self, images=()).map(lambda tensor: sent(tensor, device)), images=self.images)

    def pin_memory(self) -> RaggedBatch:
        """The same batch in page-locked host memory, from which copies to a GPU overlap with compute."""
        return self.map(lambda tensor: tensor.pin_memory())

    def map(self, change: Callable[[Tensor], Tensor]) -> RaggedBatch:
        """The same batch with each of its tensors changed, pixels of images too, once for each image; other inputs of
        images are small, and read on the host."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        changed: dict[str, Any] = {name: change(v) for name, v in values.items() if isinstance(v, Tensor)}
        for name in ("row_values", "score_values"):
            changed[name] = {key: change(value) for key, value in values[name].items()}
        inputs: dict[int, dict[str, Tensor]] = {}
        for image in (image for part in self.images for image in part):
            if image.key not in inputs:
                inputs[image.key] = {
                    name: change(value) if value.is_floating_point() else value for name, value in image.inputs.items()
                }
        images = tuple(tuple(replace(image, inputs=inputs[image.key]) for image in part) for part in self.images)
        return replace(self, **changed, images=images)

    def thinned(self, most: int) -> RaggedBatch:
        """The same tokens with no more than so many scores, or one of each segment that has any: the first of each. For
        what depends on tokens alone."""
        counts, left = [part.score_stop - part.score_start for part in self.segments], most
        shortest_first = sorted(range(len(counts)), key=counts.__getitem__)  # they are kept whole
        for done, number in enumerate(shortest_first):
            counts[number] = min(counts[number], max(left // (len(counts) - done), 1))
            left -= counts[number]
        kept = [
            torch.arange(part.score_start, part.score_start + n) for part, n in zip(self.segments, counts, strict=True)
        ]
        return self._with_scores(torch.cat(kept), counts)

    def unscored(self) -> RaggedBatch:
        """The same tokens with nothing to score: an empty micro-batch, so that all ranks run equally many."""
        return self._with_scores(torch.arange(0), [0] * len(self.segments))

    def select_scores(self, kept: Bool[Tensor, " scores"]) -> RaggedBatch:
        """The same tokens with some of the scores."""
        counts = torch.bincount(self.score_segment[kept], minlength=len(self.segments)).tolist()
        return self._with_scores(torch.nonzero(kept).flatten(), counts)

    def _with_scores(self, place: Int[Tensor, " kept"], counts: Sequence[int]) -> RaggedBatch:
        """The same tokens with the scores at some places, ascending; `counts` says how many are of each segment."""
        segments, score = [], 0
        for part, count in zip(self.segments, counts, strict=True):
            segments.append(part._replace(score_start=score, score_stop=score + count))
            score += count
        place = sent(place, self.score_index.device)
        values = {name: value[place] for name, value in self.score_values.items()}
        places = self.token_ids, self.position_ids, self.score_index[place], self.score_target[place]
        return self.assembled(*places, segments, self.row_values, values, (self.images, self.axis_positions))

    def times(self, number: int) -> RaggedBatch:
        """The batch so many times, one behind the other, with prefixes that are taken for others each time: none is
        shared between two."""

        def other(again: int) -> RaggedBatch:
            segments = [part._replace(key=hash((part.key, again)) if part.key else 0) for part in self.segments]
            return replace(self, segments=tuple(segments))

        return RaggedBatch.concat([self, *map(other, range(1, number))])

    def select_rows(self, rows: Sequence[int]) -> RaggedBatch:
        """The batch of some rows alone, in ascending order, renumbered from 0."""
        chosen = set(rows)
        return self.select_segments([n for n, part in enumerate(self.segments) if part.row in chosen])

    def select_segments(self, kept: Sequence[int]) -> RaggedBatch:
        """The batch of some segments alone, ascending, with their prefixes among them; rows renumbered from 0."""
        return arranged(self, [kept])[0]

    def without_completion(self, place: int) -> RaggedBatch:
        """The batch without the completion of each row that has this place."""
        return self.select_segments([n for n, part in enumerate(self.segments) if part.completion != place])

    def share_prefixes(self) -> RaggedBatch:
        """The same scores with each prefix that several rows repeat computed once, for the first of them.

        The last thing to do with a batch: its rows can't be told apart again. A prefix with scores of its own stays.
        """
        numbers = range(len(self.segments))
        stands_for = self.repeated_prefixes(numbers)
        if not stands_for:
            return self
        return arranged(self, [[n for n in numbers if n not in stands_for]], stands_for=stands_for)[0]

    def repeated_prefixes(self, among: Iterable[int]) -> dict[int, int]:
        """Which earlier one a prefix among some segments repeats; one with scores of its own repeats none."""
        first: dict[tuple[int, int], int] = {}
        found: dict[int, int] = {}
        for number in among:
            part = self.segments[number]
            if part.key and part.score_start == part.score_stop:
                kept = first.setdefault((part.key, part.length), number)
                if kept != number:
                    found[number] = kept
        return found


def arranged(
    batch: RaggedBatch,
    groups: Sequence[Sequence[int]],
    *,
    stands_for: Mapping[int, int] | None = None,
    device: torch.device | None = None,
) -> list[RaggedBatch]:
    """Batches of some segments of a batch each: views of one copy, in which they are laid end to end.

    Args:
        groups: the segments of each, ascending, with their prefixes among them; rows are renumbered from 0.
        stands_for: which segment of the same group a prefix that is left out is the same as.
        device: where they are; a batch in host memory is laid out there, and copied once. By default the batch's own.
    """
    return _Arrangement(batch, groups, stands_for or {}, device or batch.token_ids.device).batches()


class _Arrangement:
    """The segments of a batch in a new order, in groups; arguments as of `arranged`.

    Each method gives for each group its part of what all of them have end to end.
    """

    def __init__(
        self,
        batch: RaggedBatch,
        groups: Sequence[Sequence[int]],
        stands_for: Mapping[int, int],
        device: torch.device,
    ) -> None:
        self.batch, self.groups, self.stands_for, self.device = batch, groups, stands_for, device
        self.order = [number for kept in groups for number in kept]
        self.segments = [_renumbered(batch.segments, kept, stands_for) for kept in groups]
        self.new = [part for own in self.segments for part in own]
        self.starts, stops, self.prefixes, _, first, last = np.array([part[:6] for part in batch.segments]).T
        self.counts = (last - first)[self.order]
        self.tokens = _places(self.starts[self.order], (stops - self.starts)[self.order])
        self.scores = _places(first[self.order], self.counts)

    def batches(self) -> list[RaggedBatch]:
        batch, groups = self.batch, self.groups
        axes = batch.axis_positions
        columns = zip(
            self.of_tokens(batch.token_ids),
            self.of_tokens(batch.position_ids),
            sent(torch.tensor([part.row for part in self.new]), self.device).split([*map(len, groups)]),
            self.score_index(),
            self.of_scores(batch.score_target),
            self.score_segment(),
            self.segments,
            self.of_each(self.of_rows, batch.row_values),
            self.of_each(self.of_scores, batch.score_values),
            [tuple(batch.images[number] for number in kept) if batch.images else () for kept in groups],
            [None] * len(groups) if axes is None else self.of_tokens(axes),
            strict=True,
        )
        return [RaggedBatch(*column) for column in columns]

    def of_tokens(self, values: Tensor) -> Sequence[Tensor]:
        laid = values.index_select(-1, sent(self.tokens, values.device))
        return sent(laid, self.device).split([own[-1].stop for own in self.segments], -1)

    def of_scores(self, values: Tensor) -> Sequence[Tensor]:
        return self._by_scores(values.index_select(0, sent(self.scores, values.device)))

    def of_rows(self, values: Tensor) -> Sequence[Tensor]:
        rows = [dict.fromkeys(self.batch.segments[number].row for number in kept) for kept in self.groups]
        chosen = sent(torch.tensor([row for own in rows for row in own]), values.device)
        return sent(values.index_select(0, chosen), self.device).split([*map(len, rows)])

    def of_each(
        self, of: Callable[[Tensor], Sequence[Tensor]], values: Mapping[str, Tensor]
    ) -> list[dict[str, Tensor]]:
        """What a method gives for each of several values: for each group, by name."""
        found = {name: of(value) for name, value in values.items()}
        return [{name: each[number] for name, each in found.items()} for number in range(len(self.groups))]

    def score_segment(self) -> Sequence[Tensor]:
        numbers = [number for own in self.segments for number in range(len(own))]
        return self._by_scores(torch.from_numpy(np.repeat(numbers, self.counts)))

    def score_index(self) -> Sequence[Tensor]:
        """A score moves with its segment; the first of a segment may be read in its prefix, and moves with that."""
        before, here = self.batch.score_index, self.batch.score_index.device
        laid = before.index_select(0, sent(self.scores, here))
        moved = np.zeros_like(self.starts)
        moved[self.order] = [part.start for part in self.new] - self.starts[self.order]
        for left_out, kept in self.stands_for.items():
            moved[left_out] = moved[kept] + self.starts[kept] - self.starts[left_out]
        own = moved[self.order]
        found = laid + sent(torch.from_numpy(np.repeat(own, self.counts)), here)
        prefixes = self.prefixes[self.order]
        have = np.flatnonzero((prefixes >= 0) & (self.counts > 0))
        if len(have):
            places, starts = self.counts.cumsum() - self.counts, self.starts[self.order]
            numbers = np.stack([places, starts, moved[prefixes] - own])[:, have]
            firsts, starts, further = sent(torch.from_numpy(numbers), here).unbind()
            found.index_add_(0, firsts, torch.where(laid.index_select(0, firsts) < starts, further, 0))
        return self._by_scores(found)

    def _by_scores(self, laid: Tensor) -> Sequence[Tensor]:
        return sent(laid, self.device).split([own[-1].score_stop for own in self.segments])


def _places(starts: np.ndarray, lengths: np.ndarray) -> Int[Tensor, " places"]:
    """All places of some spans, one span after the other."""
    ends = lengths.cumsum()
    return torch.from_numpy(np.arange(ends[-1]) + np.repeat(starts - ends + lengths, lengths))


def _renumbered(segments: Sequence[Segment], kept: Sequence[int], stands_for: Mapping[int, int]) -> tuple[Segment, ...]:
    """Some segments, laid end to end; rows by their order, from 0."""
    place = {old: new for new, old in enumerate(kept)}
    rows: dict[int, int] = {}
    found: list[Segment] = []
    token = score = 0
    for old in kept:
        part = segments[old]
        start, stop, before, of_row, first, last = part[:6]
        before = place[stands_for.get(before, before)] if before >= 0 else -1
        token_stop, score_stop = token + stop - start, score + last - first
        row = rows.setdefault(of_row, len(rows))
        found.append(Segment(token, token_stop, before, row, score, score_stop, *part[6:]))
        token, score = token_stop, score_stop
    return tuple(found)


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor on a device, from page-locked memory, so that what runs there is not waited for.

    What goes to the host is waited for, since it may be read at once.
    """
    if tensor.device == device:
        return tensor
    pinned = tensor.pin_memory() if device.type == "cuda" and tensor.device.type == "cpu" else tensor
    return pinned.to(device, non_blocking=device.type != "cpu")


def _told(given: Sequence[int | tuple[int, int]]) -> list[tuple[int, int]]:
    """Pairs of numbers, of which the second may have been left out."""
    return [each if isinstance(each, tuple) else (each, UNTOLD) for each in given]


def _completions_of(told: Sequence[tuple[int, int]], shared: Collection[int]) -> list[tuple[int, int]]:
    """The row and the completion of each segment. Where rows alone are told, segments that are `shared` are of none."""
    counts: dict[int, int] = {}
    found: list[tuple[int, int]] = []
    for number, (row, completion) in enumerate(told):
        if completion == UNTOLD:
            completion = -1 if number in shared else counts.get(row, 0)
            counts[row] = counts.get(row, 0) + (number not in shared)
        found.append((row, completion))
    return found


def _check_lists(
    token_ids: Sequence[Sequence[int]],
    labels: Sequence[Sequence[int]],
    prefix: Sequence[int],
    row: Sequence[int],
) -> None:
    """Refuses lists of segments that contradict each other, before anything is made of them."""
    for name, values in (("labels", labels), ("prefix", prefix), ("row", row)):
        if len(values) != len(token_ids):
            raise ValueError(f"RaggedBatch: {len(token_ids)} segments but {len(values)} entries in `{name}`")
    if len(token_ids) == 0:
        raise ValueError("RaggedBatch: no segments")
    for number, (tokens, wanted, before) in enumerate(zip(token_ids, labels, prefix, strict=True)):
        where = f"RaggedBatch: segment {number}"
        if len(tokens) == 0:
            raise ValueError(f"{where} (row {row[number]}) holds no token")
        if len(wanted) != len(tokens):
            raise ValueError(f"{where} (row {row[number]}) has {len(tokens)} tokens but {len(wanted)} labels")
        if not -1 <= before < number:
            raise ValueError(f"{where} names segment {before} as its prefix, which does not stand before it")
        if before >= 0 and row[before] != row[number]:
            raise ValueError(
                f"{where} has prefix {before}, which belongs to another row ({row[before]} instead of {row[number]})"
            )


def _key(tokens: Sequence[int], images: Sequence[SegmentImage]) -> int:
    """The same for the same tokens with the same images, within one process."""
    seen = torch.as_tensor(tokens, dtype=torch.long).numpy().tobytes()
    return hash((seen, *(image.key for image in images))) if images else hash(seen)


def _axis_positions(
    rule: PositionRule, segments: Sequence[Segment], images: Sequence[Sequence[SegmentImage]]
) -> Int[Tensor, "axes tokens"]:
    """Positions of segments on several axes; one with a prefix goes on from it."""
    found = []
    for part, shown in zip(segments, images, strict=True):
        first = part.after(segments)
        own = [replace(image, start=image.start + first) for image in shown]
        found.append(rule.positions(first + part.length, [*part.images_before(segments, images), *own])[:, first:])
    return torch.cat(found, 1)


def _with_weights(batches: Sequence[RaggedBatch]) -> list[Mapping[str, Tensor]]:
    """The score values of batches, with weights in all of them where some have any."""
    if not any(WEIGHT in batch.score_values for batch in batches):
        return [batch.score_values for batch in batches]
    return [{WEIGHT: torch.ones(batch.scores), **batch.score_values} for batch in batches]


def _weights(
    segments: Sequence[Segment], labels: Sequence[Sequence[int]], weights: Sequence[Sequence[float]]
) -> Float[Tensor, " scores"]:
    """The weights of scores, from those of the tokens of segments; of labels the first may be no score's."""
    found: list[float] = []
    for part, wanted, own in zip(segments, labels, weights, strict=True):
        scored = [weight for label, weight in zip(wanted, own, strict=True) if label != IGNORE]
        found += scored[len(scored) - (part.score_stop - part.score_start) :]
    return torch.tensor(found)


def _joined(values: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Each value of all batches, end to end."""
    return {name: torch.cat([each[name] for each in values]) for name in values[0]}


def _validate(batch: RaggedBatch) -> None:
    segments = batch.segments
    if not segments:
        raise ValueError("RaggedBatch: no segments")
    expected = {
        "token_ids": batch.tokens,
        "position_ids": batch.tokens,
        "row": len(segments),
        "score_index": batch.scores,
        "score_target": batch.scores,
        "score_segment": batch.scores,
    }
    for name, size in expected.items():
        tensor = getattr(batch, name)
        if tensor.shape != (size,):
            raise ValueError(f"RaggedBatch: `{name}` has shape {tuple(tensor.shape)}, but the segments say ({size},)")
    if batch.images and len(batch.images) != len(segments):
        raise ValueError(f"RaggedBatch: {len(segments)} segments but {len(batch.images)} entries in `images`")
    if batch.axis_positions is not None and batch.axis_positions.shape[1:] != (batch.tokens,):
        raise ValueError(
            f"RaggedBatch: `axis_positions` has shape {tuple(batch.axis_positions.shape)} for {batch.tokens} tokens"
        )
    for kind, values, size in (("row", batch.row_values, batch.rows), ("score", batch.score_values, batch.scores)):
        for name, tensor in values.items():
            if tensor.shape[:1] != (size,):
                raise ValueError(
                    f"RaggedBatch: {kind} value {name!r} has shape {tuple(tensor.shape)}, but there are {size} {kind}s"
                )
    token = score = 0
    row = 0
    for number, part in enumerate(segments):
        start, stop, prefix, of_row, first, last, _, seen = part[:8]
        wrong = None
        if start != token or stop <= start or first != score:
            wrong = (
                f"spans tokens {start}..{stop} and scores from {first}; tokens from {token} and scores from {score} "
                "were next"
            )
        elif of_row not in (row, row + 1) or (number == 0 and of_row != 0):
            wrong = f"belongs to row {of_row} after row {row}; rows ascend by one from 0"
        elif seen < -1 or (prefix < 0 <= seen):
            wrong = f"sees {seen} tokens of prefix {prefix}"
        elif prefix >= number:
            wrong = f"has prefix {prefix}, which does not stand before it"
        elif prefix >= 0 and segments[prefix].prefix >= 0:
            wrong = f"has prefix {prefix}, which has a prefix itself"
        elif prefix >= 0 and (seen == 0 or seen > (length := segments[prefix].length)):
            wrong = f"sees {seen} tokens of prefix {prefix}, of 1 to {length}"
        if wrong:
            raise ValueError(f"RaggedBatch: segment {number} {wrong}")
        token, score, row = stop, last, of_row
