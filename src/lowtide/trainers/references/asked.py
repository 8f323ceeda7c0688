"""A teacher that is asked says what it knows of a batch before the step: log-probabilities of tokens at each place.

The student's micro-batches find them among their score values, so that budgets, pieces of long rows and ranks are as in
any step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lowtide.data.batches.values import TEACHER_NUMBER
from lowtide.data.teacher_logprobs import Answers, Asked, Teacher, answers_of, texts_of
from lowtide.engine.forward import same_rows_of
from lowtide.ragged import RaggedBatch
from lowtide.run.asked_teacher import make_asked
from lowtide.step.rank_sync import RankSync


class AskedTeacher:
    """Has the teacher of a run say what it knows of batches.

    Args:
        teachers: who is asked; of several, each of the rows that say so.
        text: what the start-up report says of it.
        trainer: whose batches they are.
    """

    def __init__(self, teachers: Sequence[Teacher], text: str, trainer: Any) -> None:
        self.teachers, self.text, self.runner, self.options = teachers, text, trainer.runner, trainer.args
        self.same_rows = same_rows_of(trainer.training_run.model)

    @classmethod
    def of(cls, trainer: Any) -> AskedTeacher | None:
        """Of a trainer; None where its teacher is loaded.

        Raises:
            ValueError: rows show images, or the teacher cannot be asked; says what to do.
        """
        run, options = trainer.training_run, trainer.args
        temperature = trainer.inner_objective.temperature
        made = make_asked(options, vocabulary=run.vocab_size, tokenizer=run.tokenizer, temperature=temperature)
        if made is None:
            return None
        if run.shows_images:
            raise ValueError(f"{options.asked} asks of texts, and rows show images: load the teacher")
        return cls(*made, trainer)

    def ask(self, batch: RaggedBatch, texts: Sequence[Asked]) -> Answers:
        """What is said of the texts of a batch, in the order of its scores."""
        numbers = [0] * len(texts)
        if len(self.teachers) > 1:
            of_rows = batch.row_values[TEACHER_NUMBER].tolist()
            numbers = [of_rows[part.row] for part in batch.segments if part.score_start < part.score_stop]
        return answers_of([each.ask for each in self.teachers], texts, numbers)

    def read(self, batch: RaggedBatch, seen: RaggedBatch | None = None) -> RaggedBatch:
        """The batch with what the teacher says of it; all ranks call this together.

        Args:
            seen: the same as the teacher reads it, score by score, where that is another text.
        """
        sync, found = RankSync("teacher", part=batch), []
        with sync.local(), self.runner.phases.during("score"):
            if self.same_rows is None or self.same_rows.rank == 0:
                found.append(self.ask(batch, texts_of(batch if seen is None else seen)))
        sync.meet(self.runner.device)
        if self.same_rows is not None:
            found = self.same_rows.of_first(found)
        (answers,) = found
        said = self.options.said(answers, batch.score_target.cpu())
        said = {name: each.to(batch.token_ids.device) for name, each in said.items()}
        return replace(batch, score_values={**batch.score_values, **said})
