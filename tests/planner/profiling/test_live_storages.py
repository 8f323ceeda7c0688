"""Recorded storages against sums that can be counted by hand, and against what a trainer holds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from lowtide.planner.profiling.cuda_history import Named, Note, recording_of
from lowtide.planner.profiling.live_storages import LiveStorages
from lowtide.planner.profiling.recording import CATEGORIES, Block, Levels, Recording
from lowtide.step.phases import BETWEEN
from lowtide.trainers.profiling import record
from tests.support.runs.small_sft import trainer

KIB = 1024


def totals(recording: Recording) -> list[int]:
    return recording.levels().total.tolist()


def test_storages_are_counted_once_from_birth_to_end():
    with LiveStorages() as recorder:
        first = torch.zeros(256)  # 1 KiB
        view = first[:10].view(2, 5)
        second = first + 1
        del first
        del view  # the last that held the first
        second.resize_(512)
        del second
    assert totals(recorder.finished()) == [KIB, 2 * KIB, KIB, 2 * KIB, 0]


def test_what_autograd_holds_lives():
    weight = torch.ones(256, requires_grad=True)
    with LiveStorages() as recorder:
        loss = (weight * 2).exp().sum()
        held = totals(recorder.recording)[-1]
        loss.backward()
    assert held == KIB + 4  # what exp gave, and the sum
    assert totals(recorder.finished())[-1] == KIB + 4  # the gradient, and the sum


def test_a_block_is_what_it_became_and_knows_where_it_was_made():
    weight = nn.Parameter(torch.ones(16, 16))
    with LiveStorages() as recorder:
        recorder.belongs([("weight", weight)], "weights")
        recorder.enter(BETWEEN, "forward")
        hidden = weight.square()
        recorder.enter("forward", "backward")
        hidden.sum().backward()
        assert weight.grad is not None
        recorder.belongs([("weight", weight.grad)], "gradients")
    recording = recorder.finished()
    found = {block.category: block for _, block in recording.living(len(recording.block) - 1)}
    assert found["weights"] == Block("weights", BETWEEN, 0, "weight", (16, 16), "float32", "")
    line = f"tests/planner/profiling/test_live_storages.py:{number_of('hidden = weight.square()')} in "
    assert found["activations"].line.startswith(line)
    assert (found["activations"].made, found["activations"].phase) == ("pow", "forward")
    assert found["gradients"].line.startswith(f"backward of {line}")
    assert (found["gradients"].made, found["gradients"].phase) == ("weight", "backward")
    assert recording.phases(recording.levels())["forward"] == {"weights": KIB, "activations": KIB}


def number_of(text: str) -> int:
    """The number of the first line of this file with a text."""
    lines = Path(__file__).read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if text in line)


def test_tensors_that_wrap_others_are_these():
    from torch.testing._internal.two_tensor import TwoTensor

    with LiveStorages() as recorder:
        pair = TwoTensor(torch.zeros(256), torch.zeros(256))
        recorder.belongs([("pair", pair)], "optimizer")
        assert totals(recorder.recording)[-1] == 2 * KIB


def test_a_recorded_run_has_the_same_weights_and_holds_what_a_run_holds(tmp_path: Path):
    options = {"max_steps": 2, "gradient_accumulation_steps": 1, "gradient_checkpointing": False}
    plain = trainer(tmp_path, **options)
    plain.train()
    recorded = trainer(tmp_path, **options)
    listeners = list(recorded.phases.listeners)
    recording = record(recorded)
    theirs = dict(recorded.model.named_parameters())
    assert all(torch.equal(p, theirs[name]) for name, p in plain.model.named_parameters())
    weights = sum(p.nbytes for p in recorded.model.parameters())
    phases = recording.phases(recording.levels())
    assert set(phases) == {BETWEEN, "rehearsal", "forward", "head", "backward", "optimizer"}
    stepping = phases["optimizer"]
    assert weights <= stepping["weights"] <= 1.02 * weights  # and the buffers
    assert stepping["gradients"] == weights
    assert 2 * weights <= stepping["optimizer"] <= 2.1 * weights
    assert phases["backward"]["activations"] > phases["optimizer"].get("activations", 0)
    assert {mark.step for mark in recording.marks} == {0, 1, 2}
    assert recorded.phases.listeners == listeners
    assert listeners


def test_a_picture_of_few_spans_has_every_peak_and_holds_every_level():
    seconds = np.array([0.0, 1.0, 1.1, 1.2, 7.0])
    bytes = np.zeros((5, len(CATEGORIES)), dtype=np.int64)
    bytes[:, 0] = [10, 20, 90, 30, 5]
    levels = Levels(seconds, bytes, np.zeros(5, dtype=np.int64))
    starts, events = levels.held(7)
    assert starts.tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert levels.total[events].tolist() == [20, 90, 30, 30, 30, 30, 30]
    assert levels.peak == 2


@pytest.mark.parametrize("shuffled", [False, True])
def test_the_history_of_cudas_allocator(shuffled: bool):
    frames = [
        {"filename": "/x/site-packages/torch/nn/functional.py", "line": 1, "name": "linear"},
        {"filename": "/home/me/model.py", "line": 7, "name": "forward"},
    ]
    history = [
        {"action": "segment_alloc", "addr": 0, "size": 9_999, "time_us": 10},
        {"action": "alloc", "addr": 512, "size": 1_024, "time_us": 20, "frames": frames},
        {"action": "alloc", "addr": 2_048, "size": 512, "time_us": 31, "frames": []},
        {"action": "free_requested", "addr": 512, "size": 1_024, "time_us": 40, "frames": []},
        {"action": "free_completed", "addr": 512, "size": 1_024, "time_us": 41, "frames": []},
        {"action": "alloc", "addr": 65_536, "size": 2_048, "time_us": 42, "frames": []},
        {"action": "free_completed", "addr": 65_536, "size": 2_048, "time_us": 43, "frames": []},
        {"action": "alloc", "addr": 512, "size": 512, "time_us": 45, "frames": []},
        {"action": "alloc", "addr": 65_536, "size": 2_048, "time_us": 48, "frames": []},
    ]
    notes = [Note(15, 1, "forward", None), Note(30, 1, "backward", None), Note(44, 1, "forward", "reference")]
    named = [Named(9, 8_192, 4_096, "weights", "w", (32, 32), "float32"),
             Named(35, 2_048, 512, "gradients", "w", (32, 32), "bfloat16")]  # fmt: skip
    found = recording_of(history[::-1] if shuffled else history, notes, named, workspaces=[2_048, 4_096])
    assert totals(found) == [4_096, 5_120, 5_632, 4_608, 6_656, 4_608, 5_120]  # the workspace is what stays
    categories = ["weights", "activations", "gradients", "activations", "reference"]
    assert [block.category for block in found.blocks] == categories
    assert found.blocks[1].line == "/home/me/model.py:7 in forward"
    assert found.phases(found.levels())["forward"]["activations"] == 1_024
