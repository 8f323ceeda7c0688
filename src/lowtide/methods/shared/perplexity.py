"""Perplexity, a metric of the methods that predict tokens of texts."""

from __future__ import annotations

import math
from collections.abc import Mapping


def with_perplexity(metrics: Mapping[str, float]) -> dict[str, float]:
    """exp of the mean loss of a predicted token, where it is known: in evaluation."""
    return {"perplexity": math.exp(metrics["loss"])} if "loss" in metrics else {}
