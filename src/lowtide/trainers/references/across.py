"""A teacher with a vocabulary of its own reads a batch before the step: the same text, in its own tokens.

What it says of each span of text (`data.two_tokenizers`) then stands at the score whose distribution is the span's: the
hidden state that its own distribution of the span is read off, and the log-probability of its other tokens of the span.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lowtide.data.batches.images import ReadyImage
from lowtide.data.batches.values import LIKELIHOOD, SPAN_BASE, SPAN_TEACHER, TEACHER
from lowtide.data.two_tokenizers import Read, TwoTokenizers
from lowtide.ops.logits.across_vocabularies import LEAST, NO_SPAN
from lowtide.ragged import WEIGHT, RaggedBatch, Shown
from lowtide.score_rules import IGNORE, NEXT_TOKEN, OWN_TOKEN
from lowtide.step.runner import StepRunner
from lowtide.trainers.references.ahead import scored_ahead


class Reader:
    """Has the teacher of a run read batches.

    Args:
        options: of a method whose teacher has its own tokens.
    """

    def __init__(self, runner: StepRunner, tokenizers: TwoTokenizers, options: Any) -> None:
        self.runner, self.tokenizers, self.options = runner, tokenizers, options
        self._dtype: torch.dtype | None = None
        """Of the teacher's hidden states."""

    def read(self, batch: RaggedBatch) -> RaggedBatch:
        """The batch with what the teacher says of it; all ranks call this together.

        Raises:
            ValueError: a row is not one text with one completion.
        """
        known: dict[Any, ReadyImage] = {}
        rows = [self._row(batch, number, known) for number in range(len(batch.segments))]
        found = scored_ahead(self.runner, self._theirs(rows), self._scorer)
        base, weights = torch.full((batch.scores,), NO_SPAN), torch.zeros(batch.scores)
        places, bases, others, goes_with, first = [], [], [], [], 0
        for part, row in zip(batch.segments, rows, strict=True):
            for span in row.spans:
                ours, theirs = span.ours[self._base], span.theirs[self._base]
                for each in span.ours:
                    base[part.score_start + each] = ours - each
                others += [first + each for each in span.theirs if each != theirs]
                goes_with += [len(places)] * (len(span.theirs) - 1)
                places.append(part.score_start + ours)
                bases.append(first + theirs)
                weights[places[-1]] = 1 / len(row.spans)
            first += len(row.completion)
        said = torch.zeros(0, 1 + self.runner.models().teacher.width) if found is None else found
        logprobs, states = said[:, 0].clamp(min=LEAST), said[:, 1:].to(self._dtype or said.dtype)
        together = logprobs.new_zeros(len(places)).index_add(
            0, torch.tensor(goes_with, dtype=torch.long), logprobs[others]
        )
        at = torch.tensor(places, dtype=torch.long)
        values = {
            SPAN_BASE: base,
            SPAN_TEACHER: logprobs.new_zeros(batch.scores).index_copy(0, at, together),
            TEACHER: states.new_zeros(batch.scores, states.shape[1]).index_copy(0, at, states[bases]),
            WEIGHT: weights,
            **self._likelihood(batch),
        }
        index = batch.score_index if self._next else batch.score_index + 1
        moved = {name: value.to(index.device) for name, value in values.items()}
        segments = tuple(
            part._replace(uncut=self._uncut(row, int(batch.score_index[part.score_start]) - part.start))
            if row.spans
            else part
            for part, row in zip(batch.segments, rows, strict=True)
        )
        return replace(batch, score_index=index, score_values={**batch.score_values, **moved}, segments=segments)

    def _uncut(self, row: Read, first: int) -> frozenset[int]:
        """Where a piece would begin within a span, whose tokens are read together.

        Args:
            first: the place in the row whose hidden state predicts the first token of the completion.
        """
        read = first if self._next else first + 1
        return frozenset(read + each for span in row.spans for each in span.ours[1:])

    @property
    def _next(self) -> bool:
        """Whether what is compared is predicted at the token before."""
        return self.options.uld_token_merge_strategy == "bayesian"

    @property
    def _base(self) -> int:
        """The token of a span whose distribution is taken: the last, or the first."""
        return -1 if self._next else 0

    def _row(self, batch: RaggedBatch, number: int, known: dict[Any, ReadyImage]) -> Read:
        part = batch.segments[number]
        scores = slice(part.score_start, part.score_stop)
        index, completion = batch.score_index[scores].tolist(), batch.score_target[scores].tolist()
        first = index[0] if index else 0
        if part.prefix >= 0 or index != [*range(first, first + len(index))]:
            raise ValueError(
                "use_uld_loss=True aligns one completion a row with the teacher's tokens, and a row has several: set "
                "turns='whole' and leave assistant_only_loss and completion_only_loss out"
            )
        stop = first + 1 if index else part.stop
        shown = batch.segment_images[number]
        return self.tokenizers.read(batch.token_ids[part.start : stop].tolist(), completion, shown, known)

    def _theirs(self, rows: Sequence[Read]) -> RaggedBatch:
        """The batch that the teacher reads; of each row the scores are the tokens of its completion."""
        prompts = [row.prompt or [self.tokenizers.teacher.eos_token_id or 0] for row in rows]
        tokens = [[*prompt, *row.completion] for prompt, row in zip(prompts, rows, strict=True)]
        labels = [[IGNORE] * len(prompt) + row.completion for prompt, row in zip(prompts, rows, strict=True)]
        reader, rule = self.tokenizers.reader, NEXT_TOKEN if self._next else OWN_TOKEN
        shown = None if reader is None else Shown([row.images for row in rows], reader.position_rule)
        return RaggedBatch.from_segments(tokens, labels, score_rule=rule, shown=shown)

    def _scorer(self, part: RaggedBatch) -> Tensor:
        """[scores, 1 + hidden]: log-probabilities and hidden states, in float32."""
        states, logprobs = self.runner.models().teacher.states_and_logprobs(part, self.options.uld_teacher_temperature)
        self._dtype = states.dtype
        return torch.cat([logprobs[:, None], states.to(logprobs)], 1)

    def _likelihood(self, batch: RaggedBatch) -> dict[str, Tensor]:
        """A mean over rows of means over their tokens, where the likelihood counts too."""
        weight = self.options.uld_crossentropy_weight
        if not weight:
            return {}
        counts = torch.tensor([part.score_stop - part.score_start for part in batch.segments])
        return {LIKELIHOOD: torch.repeat_interleave(weight / counts.clamp(min=1), counts)}
