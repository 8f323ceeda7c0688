"""Importance ratios against the generator, against TRL's formulas on padded rows."""

from __future__ import annotations

import math

import pytest
import torch

from lowtide.objectives.correction import MODES, correction, sampling_metrics

LENGTHS = (5, 0, 3, 7)
BOUNDS = [(None, 3.0), (0.5, 1.5), (0.9, None)]


def numbers(unknown: bool = True) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Two log-probabilities of each token, and its completion; one token's is unknown, and one is far off."""
    generator = torch.Generator().manual_seed(0)
    completion = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
    old = -torch.rand(sum(LENGTHS), generator=generator) * 4
    sampled = old + torch.randn(sum(LENGTHS), generator=generator) * 0.5
    if unknown:
        sampled[2] = torch.nan
    sampled[-1] -= 8
    return old, sampled, completion


def padded(values: torch.Tensor) -> torch.Tensor:
    parts = values.split(list(LENGTHS))
    return torch.nn.utils.rnn.pad_sequence(list(parts), batch_first=True)


def dense(old: torch.Tensor, sampled: torch.Tensor, mode: str, least: float | None, most: float | None) -> torch.Tensor:
    """As TRL 1.16 computes it: [completions, longest], or [completions, 1]."""
    mask = padded(torch.ones_like(old))
    logs = torch.nan_to_num((padded(old) - padded(sampled)) * mask, nan=0.0)
    if mode.startswith("sequence"):
        logs = logs.sum(-1, keepdim=True)
    ratio = torch.exp(logs)
    if mode.endswith("truncate"):
        return torch.clamp(ratio, min=least, max=most)
    low, high = -math.inf if least is None else least, math.inf if most is None else most
    return ratio.masked_fill((ratio < low) | (ratio > high), 0.0)


@pytest.mark.parametrize("bounds", BOUNDS)
@pytest.mark.parametrize("mode", MODES)
def test_ratios_are_those_of_the_padded_formulas(mode: str, bounds: tuple):
    old, sampled, completion = numbers()
    expected = dense(old, sampled, mode, *bounds)
    mask = padded(torch.ones_like(old)).bool()

    found = correction(old, sampled, completion, len(LENGTHS), mode=mode, least=bounds[0], most=bounds[1])

    torch.testing.assert_close(found.ratios, expected.expand(mask.shape)[mask])
    distinct = expected.flatten()[mask.any(1)] if mode.startswith("sequence") else expected[mask]
    torch.testing.assert_close(found.distinct, distinct)
    logs = expected.log().clamp(math.log(1e-8), 20.0)
    logs = logs if mode.startswith("sequence") else logs * mask
    torch.testing.assert_close(found.logs, logs.sum(-1))


def test_ratios_are_one_where_the_generator_says_nothing():
    old, _, completion = numbers()
    found = correction(old, torch.full_like(old, torch.nan), completion, len(LENGTHS), mode="token_mask", most=3.0)
    assert (found.ratios == 1).all()
    assert found.distances.numel() == 0
    assert sampling_metrics(found)["sampling/sampling_logp_difference/mean"] == 0.0


@pytest.mark.parametrize("last", [1, 2, sum(LENGTHS)])
def test_metrics_are_over_tokens_that_are_known_and_over_all_ranks(last):
    """So many of the last ones."""
    old, sampled, completion = numbers()
    sampled[: sum(LENGTHS) - last] = torch.nan
    found = correction(old, sampled, completion, len(LENGTHS), mode="token_truncate", most=3.0)
    known = ~sampled.isnan()
    expected = (old - sampled).abs()[known]

    alone = sampling_metrics(found)
    twice = sampling_metrics(found, lambda own: torch.cat([own, own]))

    assert alone == pytest.approx(twice)
    assert alone["sampling/sampling_logp_difference/mean"] == pytest.approx(expected.mean().item())
    assert alone["sampling/sampling_logp_difference/max"] == pytest.approx(expected.max().item())
    assert alone["sampling/importance_sampling_ratio/max"] == pytest.approx(3.0)
    assert alone["sampling/importance_sampling_ratio/min"] == pytest.approx(found.ratios.min().item())
