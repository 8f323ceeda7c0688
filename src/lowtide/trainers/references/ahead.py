"""What a teacher says of a step's completions where it reads other prompts than the student.

Its forward is a pass of its own before the step: of each scored token its hidden state, where distributions are
compared, or its log-probability. The student's micro-batches then find these among their score values, so that budgets,
pieces of long rows and ranks are as in any step, and no logits exist whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from lowtide.data.batches.values import REFERENCE, TEACHER
from lowtide.methods.method import Scorer
from lowtide.ragged import RaggedBatch
from lowtide.step.rank_sync import RankSync
from lowtide.step.runner import StepRunner
from lowtide.trainers.references.asked import AskedTeacher


def with_teacher(
    runner: StepRunner, batch: RaggedBatch, taught: Sequence[RaggedBatch | None], asked: AskedTeacher | None = None
) -> RaggedBatch:
    """The batch, with what the teacher says of its scores.

    Args:
        taught: the parts of the batch as the teacher reads them, all or none; the weights are those before the step.
        asked: the teacher, where it is not loaded.
    """
    parts = [each for each in taught if each is not None]
    if not parts:
        return batch if asked is None else asked.read(batch)
    whole, models = RaggedBatch.concat(parts), runner.models()
    assert whole.scores == batch.scores
    if asked is not None:
        return asked.read(batch, whole)
    compares = runner.method_objective.taught

    def scorer(part: RaggedBatch) -> Tensor:
        assert models.reference is not None
        return models.placed_states(part) if compares else models.reference(part)

    found = scored_ahead(runner, whole, scorer)
    said = {} if found is None else {TEACHER if compares else REFERENCE: found}
    return replace(batch, score_values={**batch.score_values, **said})


def scored_ahead(runner: StepRunner, batch: RaggedBatch, scorer: Scorer) -> Tensor | None:
    """[scores, ..] in host memory: what a scorer gives of a batch before a step, which all ranks ask for together; None
    where nothing is scored."""
    sync, found = RankSync("teacher", part=batch), []
    with sync.local(waited_for=runner.waited_for), runner.phases.during("score"):
        if batch.scores:
            found.append(runner.scored(batch, lambda part: scorer(part).cpu()))
    sync.meet(runner.device)
    return found[0] if found else None
