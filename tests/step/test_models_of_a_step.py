"""What a step asks of its models: what keeps rows whole, and when a teacher or a reference is asked."""

from __future__ import annotations

import pytest
import torch

from lowtide.data.batches.values import REFERENCE
from lowtide.engine.forward import install
from lowtide.engine.reference import FrozenModel
from lowtide.methods.dpo import METHOD as DPO
from lowtide.methods.dpo import DPOOptions
from lowtide.methods.method import TokenObjective
from lowtide.methods.taught.gkd import METHOD as GKD
from lowtide.methods.taught.gkd import GKDOptions
from lowtide.objectives.sft import LOSSES
from lowtide.ragged import RaggedBatch
from lowtide.step.cut import parts_of
from lowtide.step.models import Models, why_not_pieces
from lowtide.step_plan import Limits
from tests.support.models.tiny_models import build

NLL = TokenObjective(LOSSES["nll"])
TAUGHT = GKD.objective(GKDOptions())
DROPS = "its attention dropout (0.1) would be drawn anew in each piece; attention_dropout=0 ends that"


def model(*, drops: bool = False):
    made = build()
    install(made)
    if drops:
        made.model.layers[0].self_attn.attention_dropout = 0.1
    return made.train()


def batch(*lengths: int) -> RaggedBatch:
    return RaggedBatch.from_segments([[3] * length for length in lengths])


@pytest.mark.parametrize("drops", [False, True])
def test_the_model_and_its_teacher_may_keep_rows_whole(drops):
    whole = DROPS if drops else None
    assert why_not_pieces(model(drops=drops), ()) == whole
    assert why_not_pieces(model(drops=drops), [model()]) == whole
    assert why_not_pieces(model(), [model(drops=drops)]) == (whole and f"of the teacher, {DROPS}")


@pytest.mark.parametrize("together", [False, True])
def test_a_teacher_is_asked_ahead_where_a_row_is_cut(together):
    models = Models(model(), FrozenModel(model(), padding_free=True), together=together)
    assert [models.teaches_ahead(TAUGHT, batch(9, 4), most) for most in (None, 8, 9)] == [False, True, together]
    assert not models.teaches_ahead(NLL, batch(9, 4), 8)
    assert not Models(model(drops=True), models.reference, together=together).teaches_ahead(TAUGHT, batch(9, 4), 8)


@pytest.mark.parametrize("together", [False, True])
def test_a_reference_is_asked_where_something_is_scored_and_it_is_not_known(together):
    asked: list[int] = []

    def reference(part: RaggedBatch) -> torch.Tensor:
        asked.append(part.tokens)
        return torch.full((part.scores,), -2.0)

    models, compared = Models(model(), reference, together=together), DPO.objective(DPOOptions())
    [part], [unscored] = (parts_of(batch(*lengths), Limits()) for lengths in ((3, 2), (1,)))
    assert models.referred(part, NLL) is None
    assert asked == []
    assert models.referred(part, compared).tolist() == [-2.0] * 3
    found = models.referred(unscored, compared)
    assert (found is None, asked) == ((False, [5, 1]) if together else (True, [5])), "its ranks forward together"
    part.batch.score_values[REFERENCE] = torch.ones(3)
    assert models.referred(part, compared).tolist() == [1.0] * 3
    assert asked[:1] == [5]
    assert asked.count(5) == 1
