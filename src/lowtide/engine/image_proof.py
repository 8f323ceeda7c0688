"""Proof on the real model, before the first step, that rows with images have the numbers of the model's own forward.

The model's own forward is given what the processor makes of a few small rows with images, one row at a time, before the
engine changes anything. Then the engine is given the same rows together. What a processor says beside tokens and pixels
may change how tokens attend: the image tokens of some models attend to each other in both directions. Rows that are
laid end to end are causal, so such a model runs padded, where its own forward makes the masks.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lowtide.compat.transformers import attends_both_ways
from lowtide.engine.forward import causal_model, embedding_weight, inference, score
from lowtide.engine.heads import head_of
from lowtide.engine.heads.head import ScoreOutput
from lowtide.engine.images import TYPES
from lowtide.engine.probe import TOLERANCE
from lowtide.engine.vision import position_rule
from lowtide.engine.weights.sharded.split_vocabulary import whole_vocabulary
from lowtide.ragged import RaggedBatch, SegmentImage, Shown
from lowtide.score_rules import IGNORE

SCORED = 6
"""Tokens at the end of a row that are compared, all of them after its images."""
BOTH_WAYS = "image tokens attend to each other in both directions, which rows laid end to end do not"


class ShownRow(NamedTuple):
    """A row with images."""

    token_ids: Sequence[int]
    images: Sequence[SegmentImage]
    inputs: Mapping[str, Tensor]
    """What the model's own forward takes of it, as the processor makes it: a batch of one row."""


class ImageProof:
    """Compares a model that the engine is installed in with what its own forward gave before.

    Args:
        model: wrapped or not, on the device where it will run, without the engine's attention.
        rows: whose last tokens are text.

    Raises:
        ValueError: the model's own forward cannot take the rows.
    """

    def __init__(self, model: nn.Module, rows: Sequence[ShownRow]) -> None:
        inner = causal_model(model)
        self.kind = inner.config.model_type
        weight = embedding_weight(model)
        self.tolerance = TOLERANCE.get(weight.dtype, TOLERANCE[torch.bfloat16])
        self.head = head_of(inner)
        rule, lines = position_rule(model), [row.token_ids for row in rows]
        labels = [[IGNORE] * (len(line) - SCORED) + list(line[-SCORED:]) for line in lines]
        shown = Shown([row.images for row in rows], rule)
        batch = RaggedBatch.from_segments(lines, labels, score_rule=self.head.score_rule(inner), shown=shown)
        self.batch = batch.to(weight.device)
        with inference(model), whole_vocabulary(model):
            try:
                own = [self._own(model, row.inputs, number) for number, row in enumerate(rows)]
            except (TypeError, ValueError, RuntimeError, AttributeError, LookupError) as error:
                _raise_if_of_memory(error)
                raise ValueError(
                    f"model type {self.kind} does not take what the processor makes of a row with images "
                    f"({_said(error)}): processor and model do not belong together"
                ) from error
            self.own = torch.cat(own)
            self.both_ways = attends_both_ways(inner.config) or self._reads_types(model, rows)

    def why_not_ragged(self, model: nn.Module) -> str | None:
        """What keeps rows with images from running without padding; None if nothing does. `install` prepared it so."""
        return BOTH_WAYS if self.both_ways else self._difference(model, padding_free=True)

    def check_padded(self, model: nn.Module) -> None:
        """Refuses a model, prepared to run padded, whose numbers are not those of its own forward.

        Raises:
            ValueError: names the model type, and says what differs.
        """
        if (reason := self._difference(model, padding_free=False)) is not None:
            raise ValueError(
                f"rows show images, and lowtide does not know how model type {self.kind} reads them: {reason}. Train "
                "it on text alone, or report the model type"
            )

    def _difference(self, model: nn.Module, *, padding_free: bool) -> str | None:
        """In what the engine's numbers differ from the own ones, as a clause."""
        with inference(model):
            try:
                found = score(model, self.batch, padding_free=padding_free).scored
            except (TypeError, ValueError, RuntimeError, AttributeError, LookupError) as error:
                _raise_if_of_memory(error)
                traceback.clear_frames(error.__traceback__)  # they hold the tensors of the forward
                return f"its forward fails with {_said(error)}"
        error = self.head.distances(found, self.own).max().item()
        if error <= self.tolerance:
            return None
        return f"{self.head.numbers} after images differ by up to {error:.2g}{self.head.unit} from its own forward's"

    def _reads_types(self, model: nn.Module, rows: Sequence[ShownRow]) -> bool:
        """Whether what the processor says of the kinds of tokens changes more than positions, which are known."""
        if not any(name in row.inputs for row in rows for name in TYPES):
            return False
        without = []
        for number, row in enumerate(rows):
            inputs = {name: value for name, value in row.inputs.items() if name not in TYPES}
            if self.batch.axis_positions is not None:
                part = self.batch.segments[number]
                inputs["position_ids"] = self.batch.axis_positions[:, None, part.start : part.stop]
            without.append(self._own(model, inputs, number))
        return bool((torch.cat(without) != self.own).any())

    def _own(self, model: nn.Module, inputs: Mapping[str, Tensor], number: int) -> Tensor:
        """[scores]: of a row, from the model's own outputs."""
        inner: Any = causal_model(model)
        part, device = self.batch.segments[number], self.batch.token_ids.device
        scored = slice(part.score_start, part.score_stop)
        index, kept, more = self.batch.score_index[scored] - part.start, part.length, {}
        if "logits_to_keep" in inspect.signature(type(inner).forward).parameters:
            kept = SCORED + 1
            index, more = index - (part.length - kept), {"logits_to_keep": kept}
        given = {
            name: value.to(device, inner.dtype if value.is_floating_point() else None) for name, value in inputs.items()
        }
        logits = model(**given, use_cache=False, **more).logits
        stats = self.head.dense_stats(logits, index, self.batch.score_target[scored], kept)
        return ScoreOutput(stats=stats).scored


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"


def _raise_if_of_memory(error: Exception) -> None:
    if isinstance(error, torch.OutOfMemoryError):
        raise error  # it says nothing of the model
