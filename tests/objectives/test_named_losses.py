"""A user's own loss by its path is computed, checked and refused as a built-in one is."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from lowtide.methods import cpo, dpo, kto, sft, tpo
from lowtide.methods.method import RowObjective
from lowtide.methods.online import grpo
from lowtide.objectives import kto as unpaired
from lowtide.objectives import policy_gradient, preference, reference_free
from lowtide.objectives import sft as tokens
from lowtide.objectives.kto import Unpaired
from lowtide.objectives.policy_gradient import Written
from lowtide.objectives.preference import Pairs
from lowtide.ops.logits.linear_logprobs import TokenStats
from lowtide.run.options.configs import config_class

NUMBERS = itertools.count()
OWN = """
import torch
from lowtide.objectives import kto, policy_gradient, preference, reference_free, sft
from lowtide.objectives.preference import PairLoss

nll, hinge, contrast, rows = sft.nll, preference.hinge, reference_free.hinge, kto.apo_zero_unpaired
whole = PairLoss(preference.aot, reads=frozenset({"label_smoothing", "f_divergence_type"}), whole=True)
clipped = policy_gradient.clipped
per_completion = policy_gradient.PolicyLoss(clipped, policy_gradient.Scale.COMPLETION, reads=policy_gradient.CLIP)
dividing = PairLoss(preference.ipo, divides_by_beta=True)
number = 3


def bare():
    return 0.0


def mean(pairs, options):
    return hinge(pairs, options).mean()


def counted(pairs, options):
    return (pairs.chosen > 0).long()


def listed(pairs, options):
    return pairs.chosen.tolist()


def detached(pairs, options):
    return hinge(pairs, options).detach()


def failing(pairs, options):
    raise ZeroDivisionError("by nothing")
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module in the current folder; a new one each time, since Python imports a module once."""
    name = f"own_losses_{next(NUMBERS)}"
    Path(tmp_path, f"{name}.py").write_text(OWN, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return name


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def pairs() -> Pairs:
    return Pairs(*draw(4, 5), *(torch.full((2, 5), 3.0)))


@pytest.mark.parametrize("name", ["hinge", "whole", "dividing"])
def test_a_loss_of_pairs_is_what_it_is_by_its_own_name(module, name):
    options = dpo.DPOOptions(beta=0.3)
    builtin = {"hinge": "hinge", "whole": "aot", "dividing": "ipo"}[name]
    ours, theirs = preference.LOSSES[f"{module}.{name}"], preference.LOSSES[builtin]
    assert torch.equal(ours.fn(pairs(), options), theirs.fn(pairs(), options))
    assert (ours.whole, ours.divides_by_beta) == (theirs.whole, theirs.divides_by_beta)
    made: Any = dpo.objective(dpo.DPOOptions(loss_type=f"{module}.{name}"))
    assert isinstance(made, RowObjective)
    assert made.whole == theirs.whole


def test_losses_of_other_rows_are_found_likewise(module):
    contrast = draw(6)
    for table, options in ((reference_free.LOSSES, cpo.CPOOptions()), (reference_free.TPO_LOSSES, tpo.TPOOptions())):
        assert torch.equal(table[f"{module}.contrast"].fn(contrast, options), reference_free.hinge(contrast, options))
    rows, options = Unpaired(*draw(2, 4), desirable=torch.tensor([True, False, True, True])), kto.KTOOptions()
    found = unpaired.LOSSES[f"{module}.rows"]
    assert torch.equal(found.fn(rows, options), unpaired.apo_zero_unpaired(rows, options))
    assert not found.baseline
    stats = TokenStats(draw(7))
    assert torch.equal(tokens.LOSSES[f"{module}.nll"](stats), -stats.logprobs)


def test_a_loss_of_tokens_that_a_policy_wrote_is_added_up_as_its_entry_says(module):
    ratio, advantages = draw(2, 5).unbind()
    of, lengths = torch.tensor([0, 0, 0, 1, 1]), torch.tensor([3.0, 2.0])
    zeros, window = torch.zeros(5), torch.full((5,), 4.0)
    written = Written(draw(5), draw(5), advantages, of, lengths, window, zeros)
    counts = {"scores": 5, "completions": 2}
    found = {}
    for name in ("clipped", "per_completion", "dapo", "grpo"):
        path = name if name in policy_gradient.LOSSES else f"{module}.{name}"
        options, variant = grpo.GRPOOptions(loss_type=path), policy_gradient.LOSSES[path]
        share = policy_gradient.shares(written, variant.scale, counts, options.max_completion_length)
        found[name] = variant.fn(written, ratio, options) * share
    assert torch.equal(found["clipped"], found["dapo"])
    assert torch.equal(found["per_completion"], found["grpo"])
    assert not torch.equal(found["dapo"], found["grpo"])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mean", r"mean' gave a tensor of float64 \[\], and a loss gives a number for each, .*floating point \[5\]"),
        ("counted", r"counted' gave a tensor of int64 \[5\]"),
        ("listed", "listed' gave a list"),
        ("detached", "detached' gave losses without a gradient, from which nothing can be learned"),
    ],
)
def test_what_a_loss_gives_is_checked(module, name, message):
    given = pairs()
    given.chosen.requires_grad_()
    with pytest.raises(ValueError, match=message):
        preference.LOSSES[f"{module}.{name}"].fn(given, dpo.DPOOptions())


def test_what_it_raises_says_whose_it_is(module):
    with pytest.raises(ZeroDivisionError, match="by nothing") as caught:
        preference.LOSSES[f"{module}.failing"].fn(pairs(), dpo.DPOOptions())
    assert "loss_type, a function that was passed (failing)" in caught.value.__notes__[0]


@pytest.mark.parametrize("method", [dpo, cpo, tpo, kto, sft, grpo], ids=lambda method: method.METHOD.name)
@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("{}.hing", r"has no 'hing'; did you mean 'hinge'\?"),
        ("{}.number", "number' is of type int, and no function"),
        ("{}.bare", r"bare' is called with \(.*\): too many positional arguments"),
        ("no_such_module_here.loss", "there is no module 'no_such_module_here', neither installed nor as a file in"),
        ("hing.", r"loss_type='hing\.' is not one of"),
    ],
)
def test_what_is_not_there_is_refused_at_construction(module, method, path, message, tmp_path):
    config = config_class(method.METHOD)
    with pytest.raises(ValueError, match=message):
        config(output_dir=str(tmp_path), loss_type=path.format(module), report_to="none", use_cpu=True)


def test_options_that_it_does_not_read_are_refused_and_others_are_not(module, tmp_path):
    config, common = config_class(dpo.METHOD), {"output_dir": str(tmp_path), "report_to": "none", "use_cpu": True}
    config(**common, loss_type=f"{module}.whole", label_smoothing=0.1, f_divergence_type="js_divergence")
    with pytest.raises(ValueError, match=r"label_smoothing=0\.1 would have no effect"):
        config(**common, loss_type=f"{module}.hinge", label_smoothing=0.1)
    with pytest.raises(ValueError, match="f_divergence_type='js_divergence' would have no effect"):
        config(**common, loss_type=f"{module}.hinge", f_divergence_type="js_divergence")
    with pytest.raises(ValueError, match="beta=0 must be above 0"):
        config(**common, loss_type=f"{module}.dividing", beta=0)
