"""The start-up report has a line for each technique that was switched on: what it changes, or that it does nothing."""

import re

import pytest

from lowtide.ranks.sharding import Sharding
from lowtide.trainers.reports.start import StartReport
from tests.support.matrix.matrix import TECHNIQUES, installed, make, with_it

NAMED = [technique for technique in TECHNIQUES.values() if technique.named and technique.options]


def lines(**options) -> dict[str, str]:
    trainer = make("SFT", **options)
    (report,) = [each for each in trainer.callback_handler.callbacks if isinstance(each, StartReport)]
    return dict(report.lines())


@pytest.mark.parametrize("technique", NAMED, ids=lambda technique: technique.name)
def test_a_technique_that_is_on_is_said_to_be(technique):
    if technique.needs and not installed(technique) and "liger" not in technique.name:
        pytest.skip(f"needs {', '.join(technique.needs)}")
    said = lines(**with_it(technique))[technique.name]
    if technique.name in ("liger kernels", "optimizer states in host memory"):
        assert said.startswith("does nothing here: ")
        assert "GPU" in said or "CPU" in said
    elif technique.changes:
        assert said.startswith(f"not exact: {technique.changes}")
    else:
        assert said.startswith("exact")
    assert "backward" not in technique.name or "steps of several micro-batches keep their gradients" in said


@pytest.mark.parametrize(
    ("kind", "said"),
    {
        "ddp": r"whole on each of 2 ranks",
        "zero1": r"whole on each of 2 ranks; moments in parts \(ZeRO-1\)",
        "zero2": r"whole on each of 2 ranks; gradients and moments in parts \(ZeRO-2\)",
        "zero3": r"sharded over 2 ranks \(ZeRO-3\), .* a rank",
        "fsdp2": r"sharded over 2 ranks \(FSDP2\), .* a rank",
    }.items(),
)
def test_where_weights_lie_is_said_by_the_name_of_what_spreads_them(kind, said, monkeypatch):
    trainer = make("SFT")
    (report,) = [each for each in trainer.callback_handler.callbacks if isinstance(each, StartReport)]
    monkeypatch.setitem(trainer.args.__dict__, "_sharding", Sharding(kind=kind, devices=2))
    assert re.fullmatch(said, dict(report.lines())["weights"])


def test_nothing_is_said_of_what_is_off():
    assert not lines(fused_layers=False).keys() & TECHNIQUES.keys()


def test_an_older_name_of_the_head_is_answered():
    assert "always on" in lines(use_liger_loss=True)["use_liger_loss"]
