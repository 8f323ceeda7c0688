"""The masks of tokens that scripts ask a trainer for, against TRL's."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from trl import GRPOTrainer as Theirs

from lowtide import GRPOTrainer
from tests.support.runs.online_runs import online

ALONE = SimpleNamespace(
    accelerator=SimpleNamespace(gather=lambda values: values, pad_across_processes=lambda values, **_: values)
)


@pytest.mark.parametrize("threshold", [0.0, 0.5, 0.8, 1.0])
@pytest.mark.parametrize("kept", ["all", "some", "none"])
def test_the_tokens_of_highest_entropy_are_trls(threshold, kept):
    generator = torch.Generator().manual_seed(0)
    entropies = torch.rand(3, 7, generator=generator)
    mask = {"all": torch.ones(3, 7), "none": torch.zeros(3, 7)}.get(kept)
    mask = (torch.rand(3, 7, generator=generator) > 0.4).long() if mask is None else mask
    expected = Theirs.get_high_entropy_mask(ALONE, entropies, mask, threshold)
    found = GRPOTrainer.get_high_entropy_mask(ALONE, entropies, mask, threshold)
    assert torch.equal(found, expected)


def test_completions_that_the_policy_left_behind_are_trls():
    generator = torch.Generator().manual_seed(0)
    old, new = (torch.randn(40, 6, generator=generator) for _ in range(2))
    mask = (torch.rand(40, 6, generator=generator) > 0.3).float()
    old[mask == 0] = 1e6  # what stands in padding is not read
    old[0, 0] = float("nan")  # not known
    mask[1] = 0
    advantages = torch.randn(40, 1, generator=generator)
    expected = Theirs.get_off_policy_mask(advantages, new, old, mask, 0.2)
    found = GRPOTrainer.get_off_policy_mask(advantages, new, old, mask, 0.2)
    assert 0 < found.sum() < 40
    assert torch.equal(found, expected)


def test_a_mask_of_ones_own_is_refused(tmp_path, monkeypatch):
    """It would have no part in a step."""

    class Own(GRPOTrainer):
        def get_high_entropy_mask(self, entropies, mask, threshold):
            return mask.bool()

    monkeypatch.setattr("lowtide.GRPOTrainer", Own, raising=False)
    with pytest.raises(ValueError, match=r"Own.get_high_entropy_mask would not be called.*make_objective"):
        online(tmp_path)
