"""An output folder that cannot be one, or that a run reads from, is refused before anything is written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lowtide import SFTConfig
from lowtide.trainers.checkpoints.output_folder import check_output, model_of_others
from tests.support.runs.small_runs import small


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_file_is_no_output_folder(tmp_path):
    (tmp_path / "out").write_text("mine")
    with pytest.raises(ValueError, match="out' is a file: name a folder"):
        small(tmp_path / "out")
    assert files(tmp_path) == {"out": b"mine"}


@pytest.mark.parametrize("name", ["checkpoint-2", ".saving"])
def test_a_file_in_the_place_of_a_folder_is_refused_at_the_start(name, tmp_path):
    (tmp_path / name).write_text("mine")
    with pytest.raises(ValueError, match=f"{name} is a file, and a run makes a folder of that name"):
        small(tmp_path)
    assert files(tmp_path) == {name: b"mine"}


def test_files_of_other_names_and_folders_are_not(tmp_path):
    (tmp_path / "checkpoint-last").write_text("mine")
    (tmp_path / "checkpoint-2").mkdir()
    check_output(tmp_path, {"model": None, "dataset": str(tmp_path / "rows.jsonl")})


@pytest.mark.parametrize("spelled", ["{}", "{}/", "{}/../model", "{}/link"])
def test_the_folder_of_a_model_is_refused_however_it_is_spelled(spelled, tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    (model / "link").symlink_to(model)
    with pytest.raises(ValueError, match="is the folder of ref_model too"):
        check_output(Path(spelled.format(model)), {"model": "hub/name", "ref_model": str(model)})
    with pytest.raises(ValueError, match="is the folder of model too"):
        check_output(model, {"model": os.path.relpath(model)})


@pytest.mark.parametrize("name", ["", "  "])
def test_an_empty_name_is_refused(name):
    with pytest.raises(ValueError, match=r"output_dir='.*' must be the path of a folder"):
        SFTConfig(name, use_cpu=True)


def test_a_variable_of_the_environment_is_not_put_in(tmp_path, monkeypatch):
    monkeypatch.setenv("PLACE", str(tmp_path))
    with pytest.raises(
        ValueError, match=f"names a variable of the environment, which is not put in: write '{tmp_path}/a'"
    ):
        check_output(Path("$PLACE/a"), {})
    monkeypatch.delenv("PLACE")
    check_output(tmp_path / "$PLACE", {})


@pytest.mark.parametrize("name", ["model.safetensors", "model-00001-of-00002.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("run", ["", "run.yaml", "training_args.bin", "checkpoint-3"])
def test_a_model_of_others_is_named(name, run, tmp_path):
    assert not model_of_others(tmp_path)
    assert not model_of_others(tmp_path / "new")
    (tmp_path / name).touch()
    if run:
        (tmp_path / run).touch()
    assert (f"holds {name}, and no run of lowtide has written there" in model_of_others(tmp_path)) == (not run)
