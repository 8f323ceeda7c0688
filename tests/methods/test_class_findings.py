"""What an evaluation of a classifier finds over all of its texts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from lowtide.data.batches.values import LABEL
from lowtide.engine.heads.head import ScoreOutput
from lowtide.methods.sequence_classification import LOGITS, MULTIPLE, REGRESSION, SINGLE, ClassFindings
from lowtide.ragged import RaggedBatch


def kept(problem: str, logits: torch.Tensor, labels: torch.Tensor) -> dict[str, Any]:
    rows = [[5, 6, 7]] * len(logits)
    batch = RaggedBatch.from_segments(rows, [[-100, -100, 7]] * len(logits), row_values={LABEL: labels})
    output: Any = ScoreOutput(torch.zeros(()), {LOGITS: logits}, None)
    return dict(ClassFindings(problem).keep(batch, output))


def test_a_label_is_said_where_its_logit_is_above_0():
    logits = torch.tensor([[0.25, -0.5, 0.0], [3.0, 0.75, -2.0], [-1.0, 0.5, 0.5]])
    labels = torch.tensor([[1.0, 0.0, 1.0], [1.0, 1.0, 0.0], [0.0, 0.0, 1.0]])
    found = kept(MULTIPLE, logits, labels)
    assert found["found"].tolist() == [[1, 0, 0], [1, 1, 0], [0, 1, 1]]
    f1 = [2 * 2 / (2 + 2), 2 * 1 / (2 + 1), 2 * 1 / (1 + 2)]
    assert ClassFindings(MULTIPLE).metrics(found) == {"f1": pytest.approx(sum(f1) / 3)}


def test_the_class_of_the_largest_logit_is_said():
    """Class 2 is neither said nor true, and does not count."""
    logits = torch.tensor([[0.25, -0.5, 0.0], [-3.0, 0.75, -2.0], [-1.0, 0.5, 0.25], [2.0, 0.0, 0.0]])
    found = kept(SINGLE, logits, torch.tensor([0, 1, 0, 0]))
    assert found["found"].tolist() == [0, 1, 1, 0]
    assert ClassFindings(SINGLE).metrics(found) == {"f1": pytest.approx((2 * 2 / (2 + 3) + 2 * 1 / (2 + 1)) / 2)}


def test_values_are_compared_by_their_squares_and_their_correlation():
    generator = torch.Generator().manual_seed(0)
    labels = torch.randn(7, 2, generator=generator) + 3.0
    logits = labels + torch.randn(7, 2, generator=generator)
    found = ClassFindings(REGRESSION).metrics(kept(REGRESSION, logits, labels))
    correlations = [np.corrcoef(labels[:, each].numpy(), logits[:, each].numpy())[0, 1] for each in (0, 1)]
    assert found == {
        "mse": pytest.approx(((labels - logits) ** 2).mean().item(), rel=1e-5),
        "pearson": pytest.approx(np.mean(correlations), rel=1e-5),
    }
    equal = ClassFindings(REGRESSION).metrics(kept(REGRESSION, logits, torch.full((7, 2), 0.1)))
    assert "pearson" not in equal
