"""Memory in the logs: the peak and its phase, what was predicted, and one warning where that did not hold."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from lowtide import SFTTrainer
from lowtide.step import phases
from lowtide.step.phases import BETWEEN, HighWater, Phases
from lowtide.trainers.reports.memory_log import GIB, SLACK, MemoryLog, Prediction
from tests.support.runs.small_sft import rows, trainer

MIB = 1 << 20
CPU = torch.device("cpu")


def logged(run: SFTTrainer) -> list[dict]:
    run.train()
    return [entry for entry in run.state.log_history if "loss" in entry]


def seen_by(run: SFTTrainer) -> list[str]:
    """The phases that a run enters, in their order."""
    seen: list[str] = []
    run.phases.listeners.append(lambda ended, begins: seen.append(begins))
    return seen


def test_a_step_goes_through_its_phases(tmp_path: Path):
    run = trainer(tmp_path, max_steps=2, rehearsal=False, gradient_accumulation_steps=2)
    seen = seen_by(run)
    run.train()
    micro_batch = ["forward", "head", BETWEEN, "backward", BETWEEN]
    assert seen == 2 * (2 * micro_batch + ["optimizer", BETWEEN])


def test_evaluation_and_saving_are_phases_of_their_own(tmp_path: Path):
    run = trainer(tmp_path, max_steps=1, rehearsal=False, save_strategy="steps", save_steps=1)
    seen = seen_by(run)
    run.train()
    run.evaluate(rows(4))
    assert seen[-4:] == ["saving", BETWEEN, "evaluation", BETWEEN]


def test_after_training_a_models_forward_tells_nobody(tmp_path: Path):
    run = trainer(tmp_path, max_steps=1, rehearsal=False)
    run.train()
    seen = seen_by(run)
    with run.phases.during("forward"):
        run.model(input_ids=torch.tensor([[1, 2]]))
    assert seen == ["forward", BETWEEN]


def test_the_log_has_the_peak_in_gib_its_phase_and_the_rehearsed_one(tmp_path: Path):
    run = trainer(tmp_path, logging_steps=1)
    entries = logged(run)
    peaks = [entry["memory/peak"] for entry in entries]
    assert peaks == sorted(peaks)
    assert peaks[-1] == pytest.approx(phases.peak_bytes(CPU) / GIB, rel=0.1)
    assert all(entry["memory/predicted"] == run.rehearsed_bytes / GIB for entry in entries)
    assert entries[0]["memory/phase"] in ("loading", BETWEEN, "forward", "head", "backward", "optimizer")


def test_without_a_prediction_there_is_none_in_the_log(tmp_path: Path):
    entries = logged(trainer(tmp_path, rehearsal=False, logging_steps=1))
    assert ["memory/peak" in entry for entry in entries] == [True] * 3
    assert not any("memory/predicted" in entry for entry in entries)


def test_an_estimate_goes_before_the_rehearsal(tmp_path: Path):
    run = trainer(tmp_path, logging_steps=1)
    run.predicted_bytes = 7 * GIB
    assert {entry["memory/predicted"] for entry in logged(run)} == {7.0}


def test_the_phase_is_that_which_raised_the_peak(monkeypatch: pytest.MonkeyPatch):
    peak = 100 * MIB
    monkeypatch.setattr(phases, "peak_bytes", lambda device: peak)
    told = Phases()
    mark = HighWater(CPU)
    told.listeners.append(mark)
    log = MemoryLog(mark)
    mark.note("loading")
    assert log.metrics(None) == {"memory/peak": 100 * MIB / GIB, "memory/phase": "loading"}
    with told.during("forward"):
        peak = 150 * MIB
        told.enter("head")
        peak = 300 * MIB
    with told.during("backward"):
        pass
    assert log.metrics(None) == {"memory/peak": 300 * MIB / GIB, "memory/phase": "head"}
    assert log.metrics(None) == {"memory/peak": 300 * MIB / GIB}


@pytest.mark.parametrize(
    ("prediction", "peak", "warns"),
    [
        (Prediction.estimated(10 * GIB, "cpu"), 10.59 * GIB, False),
        (Prediction.estimated(10 * GIB, "cpu"), 10.61 * GIB, True),
        (Prediction.rehearsed(10 * GIB), 10.19 * GIB, False),
        (Prediction.rehearsed(10 * GIB), 10.21 * GIB, True),
        (Prediction.rehearsed(GIB // 10), GIB // 10 + SLACK, False),
    ],
)
def test_it_warns_once_when_more_is_taken_than_the_band(monkeypatch, caplog, prediction, peak, warns):
    monkeypatch.setattr(phases, "peak_bytes", lambda device: int(peak))
    log = MemoryLog(HighWater(CPU))
    with caplog.at_level(logging.WARNING):
        log.metrics(prediction)
        log.metrics(prediction)
    assert len(caplog.records) == warns
    if warns:
        assert f"more than the {prediction.by.removeprefix('the ')} had" in caplog.text
