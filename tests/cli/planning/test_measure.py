"""`lowtide measure`: real steps of a tiny model, both peaks, and the line that can be made public."""

from __future__ import annotations

import json

import pytest

from lowtide.cli.main import main
from lowtide.cli.planning import measure as command
from lowtide.planner.answers.shared_run import SharedRun
from lowtide.planner.estimate import Estimate
from lowtide.trainers import predictions

MIB = 1 << 20


@pytest.fixture
def measure(model, data, capsys):
    """Runs `lowtide measure sft` on the tiny model; gives status, standard output and error."""

    def run(*words: str) -> tuple[int, str, str]:
        always = ["--model", str(model), "--dataset", str(data), "--use_cpu", "--disable_tqdm", "--steps", "2"]
        status = main(["measure", "sft", *always, *words])
        return status, *capsys.readouterr()

    return run


@pytest.fixture
def predicted(monkeypatch):
    """A prediction without a trace, which takes seconds."""
    found = Estimate(700 * MIB, "backward", {"backward": {"weights": 700 * MIB}}, "cpu")
    monkeypatch.setattr(predictions, "predicted", lambda trainer, changes: [found])


@pytest.fixture
def untrained(monkeypatch):
    """No run begins."""

    def begun(*args, **kwargs):
        raise AssertionError("the run has begun")

    monkeypatch.setattr(command.train, "read_run", begun)


def test_both_peaks_are_said_and_nothing_is_written(measure, predicted, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, out, _ = measure()
    assert status == 0
    assert "predicted 700.0 MiB (" in out
    assert out.rstrip().endswith("in 2 steps.")
    assert [*tmp_path.iterdir()] == []


@pytest.mark.slow
def test_the_line_that_is_shared_is_one_that_is_read(measure, predicted, model, data, tmp_path):
    file = tmp_path / "folder" / "runs.jsonl"
    for number in (1, 2):
        status, out, _ = measure("--share", str(file), "--run_name", "secret", "--use_peft", "--lora_r", "4")
        lines = file.read_text(encoding="utf-8").splitlines()
        assert (status, len(lines)) == (0, number)
        assert lines[-1] in out
    run = SharedRun.read(lines[-1])
    assert (run.method, run.model, run.steps, run.predicted_bytes) == ("sft", None, 2, 700 * MIB)
    assert run.trained == {"adapters": True, "rank": 4, "stored": "float32", "bits": 0}
    assert run.device.startswith("cpu ")
    assert {"python", "torch", "lowtide"} <= run.versions.keys()
    assert run.options["optim"] == "adamw_torch_fused"
    for private in ("secret", str(model), str(data), str(tmp_path)):
        assert private not in json.dumps(lines)


@pytest.mark.parametrize("name", ["a folder", "beneath a file"])
def test_a_file_that_cannot_be_written_is_found_before_the_run(name, measure, untrained, tmp_path):
    (tmp_path / "file").write_text("")
    file = tmp_path if name == "a folder" else tmp_path / "file" / "runs.jsonl"
    status, _, err = measure("--share", str(file))
    assert status == 2
    assert "cannot be written" in err
    assert "Name another file" in err


def test_looking_whether_it_can_be_written_makes_no_file(tmp_path):
    command.check_can_be_added_to(tmp_path / "new" / "runs.jsonl")
    assert [*(tmp_path / "new").iterdir()] == []
    there = tmp_path / "runs.jsonl"
    there.write_text("{}\n")
    command.check_can_be_added_to(there)
    assert there.read_text() == "{}\n"


def test_one_step_is_too_few(measure):
    status, _, err = measure("--steps", "1")
    assert status == 2
    assert "must be a whole number from 2 on" in err
