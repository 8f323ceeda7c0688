"""Several teachers in memory, of which each reads the rows of a batch that name it.

The hidden states of a score stand in the columns of its own teacher, with 0 in those of the others, so that the sum of
the products with all heads is the logits of its own: `linear_logprobs` knows one teacher whose head has several terms.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from lowtide.data.batches.values import TEACHER_NUMBER
from lowtide.engine.forward import causal_model
from lowtide.engine.heads.head import TeacherStates
from lowtide.engine.heads.head_parts import head_parts, projection_of
from lowtide.engine.reference import FrozenModel, ReferenceModel
from lowtide.ragged import RaggedBatch


class TeachersByRow(ReferenceModel):
    """Teachers by names, in the order of the numbers that rows have; rows without one, as those of plans, are the
    largest teacher's.

    Raises:
        ValueError: their logits are made in ways that differ; names two of them.
    """

    def __init__(self, teachers: Mapping[str, FrozenModel]) -> None:
        self.each = [*teachers.values()]
        super().__init__(
            nn.ModuleList(self.models),
            padding_free=all(each.padding_free for each in self.each),
            temperature=self.each[0].temperature,
        )
        _check_alike(teachers)
        sizes = [sum(p.numel() for p in each.parameters()) for each in self.models]
        self.largest = sizes.index(max(sizes))

    @property
    def models(self) -> list[nn.Module]:
        return [each.model for each in self.each]

    @property
    def width(self) -> int:
        return sum(each.width for each in self.each)

    def active(self) -> AbstractContextManager[Any]:
        with ExitStack() as stack:
            for each in self.each:
                stack.enter_context(each.active())
            return stack.pop_all()

    def __call__(self, batch: RaggedBatch) -> Tensor:
        found = self._read(batch, lambda teacher, own: teacher(own)[:, None], [1] * len(self.each))
        return torch.stack(found).sum(0)[:, 0]

    def states(self, batch: RaggedBatch, *, placed: bool = False) -> Tensor:
        widths = [each.width for each in self.each]
        return torch.cat(self._read(batch, lambda teacher, own: teacher.states(own, placed=placed), widths), -1)

    def teaching(self, states: Tensor) -> TeacherStates | None:
        parts = tuple(head_parts(causal_model(each)) for each in self.models)
        return TeacherStates(states, parts, projection_of(causal_model(self.models[0]).config))

    def _read(
        self, batch: RaggedBatch, ask: Callable[[FrozenModel, RaggedBatch], Tensor], widths: Sequence[int]
    ) -> list[Tensor]:
        """[scores, width] of each teacher: what it says of the scores of its own rows, 0 at others."""
        named = batch.row_values.get(TEACHER_NUMBER)
        numbers = [self.largest] * batch.rows if named is None else [int(each) for each in named.tolist()]
        said: dict[int, Tensor] = {}
        for number in sorted({*numbers}):
            rows = [row for row, each in enumerate(numbers) if each == number]
            said[number] = ask(self.each[number], batch if len(rows) == batch.rows else batch.select_rows(rows))
        like, found = next(iter(said.values())), []
        for number, width in enumerate(widths):
            found.append(like.new_zeros(batch.scores, width))
            if number in said:
                own = [part for part in batch.segments if numbers[part.row] == number]
                at = torch.tensor([score for part in own for score in range(part.score_start, part.score_stop)])
                found[-1].index_copy_(0, at.long().to(like.device), said[number].to(like))
        return found


def _check_alike(teachers: Mapping[str, FrozenModel]) -> None:
    """Whether one head can make the logits of all."""
    inner = {name: causal_model(each.model) for name, each in teachers.items()}
    made = {name: projection_of(model.config) for name, model in inner.items()}
    (first, ours), *others = made.items()
    other = next((name for name, theirs in others if theirs != ours), None)
    if other is not None:
        raise ValueError(
            f"the teachers {first!r} and {other!r} scale or cap their logits in ways that differ, and several loaded "
            "teachers are read by one head: load teachers of one model type, or serve them (teacher_model_server_urls)"
        )
    biased = next((name for name, model in inner.items() if head_parts(model).base.bias is not None), None)
    if biased is not None:
        raise ValueError(
            f"the head of the teacher {biased!r} has a bias, and several loaded teachers are read by one head: serve "
            "them (teacher_model_server_urls)"
        )
