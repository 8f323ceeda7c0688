"""What methods declare: their objectives from their options alone, and what they say of unwise options."""

from __future__ import annotations

import pytest

from lowtide import MaskedLMConfig
from lowtide.methods import METHODS
from lowtide.methods.cpo import CPOOptions
from lowtide.methods.dpo import DPOOptions
from lowtide.methods.method import EXPERTS, Labels

LABELS = Labels(("a", "b"), problem="single_label_classification")


@pytest.mark.parametrize("name", sorted({*METHODS} - {"reward"}))  # as in TRL, a reward model has no such loss
def test_the_load_balancing_loss_of_experts_is_left_out_unless_it_is_weighed(name):
    method = METHODS[name]
    labels = {"labels": LABELS} if method.rows.labelled else {}
    alone, weighed = (method.objective(method.options(), **labels, **more) for more in ({}, {"aux_coefficient": 0.25}))
    assert [term.aux_coefficient for term in alone.terms] == [0.0] * len(alone.terms)
    assert weighed.terms[0].aux_coefficient == 0.25
    assert weighed.why_whole_rows == EXPERTS
    assert alone.why_whole_rows != EXPERTS


WHOLE = {"aot", "aot_unpaired"}
"""Losses that sort the pairs of a step."""


@pytest.mark.parametrize("loss", ["sigmoid", "aot", "aot_unpaired", "ipo"])
def test_losses_that_sort_pairs_see_the_whole_step(loss):
    objective = METHODS["dpo"].objective(DPOOptions(loss_type=[loss]))
    assert (objective.whole, objective.over) == ((True, "step") if loss in WHOLE else (False, "row"))


@pytest.mark.parametrize("options", [DPOOptions, CPOOptions])
@pytest.mark.parametrize(
    ("smoothing", "said"), [(0.0, None), (0.49, None), (0.5, "either completion is as good"), (0.51, "is preferred")]
)
def test_smoothing_that_leaves_no_preference_is_said(options, smoothing, said):
    found = options(label_smoothing=smoothing).advice
    assert (said is None and found == []) or said in found[0]


@pytest.mark.parametrize("token", [0, 7, None])
def test_masks_are_drawn_with_the_tokenizers_mask_token(token, tmp_path):
    """Special tokens outside of the vocabulary are left out."""
    options = MaskedLMConfig(str(tmp_path), use_cpu=True, report_to="none")
    kind = type("Tokenizer", (), {"__len__": lambda self: 60, "mask_token_id": token, "all_special_ids": [2, 0, 61]})
    drawing = METHODS["masked-lm"].rows.drawing(options, kind(), 64)
    assert (drawing.mask_token, drawing.vocabulary, drawing.special) == (token or 0, 60, (0, 2))
