"""A run deletes and overwrites what a run wrote, and nothing else."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

import pytest

from lowtide import own_files
from lowtide.own_files import remove_files, separate_hard_links, usual_mode, write_output, writing
from lowtide.trainers.checkpoints.lock import LOCK, only_run_in
from lowtide.trainers.checkpoints.output_folder import STAGING
from lowtide.trainers.checkpoints.rotating import keep_best, rotate
from tests.support.runs.small_runs import small, trained


def of_a_user(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "thesis.txt").write_text("years of work")
    return folder


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_rotation_deletes_checkpoints_of_runs_alone(tmp_path):
    of_a_user(tmp_path / "checkpoint-0")
    (tmp_path / "checkpoint-2").mkdir()
    (tmp_path / "checkpoint-2" / "notes.txt").write_text("mine")
    trained(tmp_path, max_steps=4, save_steps=1, save_total_limit=1)
    assert sorted(path.name for path in tmp_path.glob("*checkpoint-*")) == [
        "checkpoint-0",
        "checkpoint-4",
        "earlier-checkpoint-2",
    ]
    assert (tmp_path / "checkpoint-0" / "thesis.txt").exists()
    assert (tmp_path / "earlier-checkpoint-2" / "notes.txt").exists()


def test_a_file_beside_those_of_a_checkpoint_stays(tmp_path):
    trained(tmp_path, max_steps=2, save_steps=1)
    (tmp_path / "checkpoint-1" / "notes.txt").write_text("mine")
    rotate(tmp_path, 1, None)
    assert [path.name for path in (tmp_path / "checkpoint-1").iterdir()] == ["notes.txt"]
    assert (tmp_path / "checkpoint-2" / "model.safetensors").exists()


def test_the_best_is_kept_and_folders_of_others_too(tmp_path):
    of_a_user(tmp_path / "checkpoint-0")
    trained(tmp_path, max_steps=3, save_steps=1)
    keep_best(tmp_path, tmp_path / "checkpoint-2")
    assert {path.name for path in tmp_path.glob("checkpoint-*")} == {"checkpoint-0", "checkpoint-2"}


def test_a_run_with_one_checkpoint_and_a_best_one_deletes_no_folder_of_a_user(tmp_path):
    of_a_user(tmp_path / "checkpoint-0")
    options = {"eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True, "save_total_limit": 1}
    trainer = small(tmp_path, max_steps=2, save_steps=1, **options)
    trainer.eval_dataset = trainer.train_dataset
    trainer.train()
    best = Path(trainer.state.best_model_checkpoint).name
    assert {path.name for path in tmp_path.glob("checkpoint-*")} == {"checkpoint-0", best}


@pytest.mark.parametrize("name", [STAGING, LOCK])
def test_what_lies_under_a_name_that_a_run_needs_is_refused_at_the_start(tmp_path, name):
    of_a_user(tmp_path / name)
    with pytest.raises((ValueError, OSError), match=f"{name} .*no.* run"):
        small(tmp_path, max_steps=1).train()
    assert (tmp_path / name / "thesis.txt").read_text() == "years of work"


def test_what_a_killed_run_left_is_deleted(tmp_path):
    (tmp_path / STAGING / "checkpoint-1").mkdir(parents=True)
    (tmp_path / STAGING / ".lowtide").touch()
    (tmp_path / STAGING / "checkpoint-1" / "model.safetensors").touch()
    trained(tmp_path, max_steps=1)
    assert not (tmp_path / STAGING).exists()


@pytest.mark.parametrize("how", ["symbolic", "hard", "text"])
def test_a_lock_that_is_another_file_is_not_written_to(tmp_path, how):
    mine = tmp_path / "thesis.txt"
    mine.write_text("years of work")
    run = tmp_path / "run"
    run.mkdir()
    if how == "symbolic":
        (run / LOCK).symlink_to(mine)
    elif how == "hard":
        os.link(mine, run / LOCK)
    else:
        mine.rename(run / LOCK)
        mine = run / LOCK
    with pytest.raises(ValueError, match="no file that a run made"), only_run_in(run):
        pass
    assert mine.read_text() == "years of work"


@pytest.mark.parametrize("name", ["training_args.bin", "config.json", "model.safetensors", "completions"])
def test_a_link_under_the_name_of_an_output_is_refused(tmp_path, name):
    mine, run = of_a_user(tmp_path / "mine"), tmp_path / "run"
    run.mkdir()
    (run / name).symlink_to(mine / "thesis.txt")
    with pytest.raises(ValueError, match=f"{name}, a link to"):
        small(run, max_steps=1).train()
    with pytest.raises(ValueError, match=f"{name}, a link to"):
        small(run, max_steps=1, save_strategy="no").save_model()
    assert (mine / "thesis.txt").read_text() == "years of work"


def test_weights_have_the_permissions_of_their_neighbours(tmp_path):
    earlier = os.umask(0o027)
    try:
        trainer = small(tmp_path, max_steps=1)
        trainer.train()
        trainer.save_model()
        assert usual_mode() == 0o640
    finally:
        os.umask(earlier)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"model.safetensors", "optimizer.pt", "config.json"} <= {path.name for path in files}
    assert {mode(path) for path in files} == {0o640}
    assert {mode(path) for path in tmp_path.rglob("*") if path.is_dir()} == {0o750}


def test_a_file_is_written_beside_and_replaces_a_link(tmp_path):
    mine, link = tmp_path / "mine", tmp_path / "link"
    mine.write_text("years of work")
    link.symlink_to(mine)
    with writing(link) as beside:
        beside.write_text("new")
    assert mine.read_text() == "years of work"
    assert link.read_text() == "new"
    assert not link.is_symlink()
    assert mode(link) == usual_mode()
    with contextlib.suppress(RuntimeError), writing(link) as beside:
        beside.write_text("half")
        raise RuntimeError
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"mine": "years of work", "link": "new"}


def test_names_that_lead_out_of_a_folder_delete_nothing(tmp_path):
    mine, folder = of_a_user(tmp_path / "mine"), tmp_path / "checkpoint-1"
    folder.mkdir()
    (folder / "out").symlink_to(mine)
    names = ["../mine/thesis.txt", str(mine / "thesis.txt"), "out/thesis.txt"]
    (folder / "manifest.json").write_text(json.dumps({"files": {n: {"bytes": 1, "crc32": "0"} for n in names}}))
    remove_files(folder, [*names, "manifest.json"])
    assert (mine / "thesis.txt").exists()
    assert not (folder / "manifest.json").exists()


def test_a_model_is_not_merged_over_another(tmp_path):
    from lowtide.cli.endings import UsageError
    from lowtide.cli.merge import _check_holds_no_model

    (tmp_path / "model.safetensors").touch()
    with pytest.raises(UsageError, match="holds a model already"):
        _check_holds_no_model(tmp_path)


OUTPUTS = ("config.json", "model.safetensors", "training_args.bin", "README.md", "trainer_state.json", "memory.json")


def test_what_another_name_of_an_output_stands_for_is_not_written_over(tmp_path):
    mine, run = of_a_user(tmp_path / "mine"), tmp_path / "run"
    run.mkdir()
    for name in OUTPUTS:
        (mine / name).write_text("years of work")
        os.link(mine / name, run / name)
    trainer = small(run, max_steps=1, save_strategy="no", memory_report=str(run / "memory.json"))
    trainer.train()
    for name in OUTPUTS:  # once more between the start and the end
        (run / name).unlink()
        os.link(mine / name, run / name)
    trainer.save_model()
    assert {(mine / name).read_text() for name in OUTPUTS} == {"years of work"}
    assert (run / "config.json").read_text() != "years of work"
    assert (run / "model.safetensors").stat().st_size > 1000


def test_a_memory_report_is_written_beside_and_replaces_its_file(tmp_path):
    mine = tmp_path / "mine"
    mine.write_text("years of work")
    (tmp_path / "reports").mkdir()
    os.link(mine, tmp_path / "reports" / "memory")
    small(tmp_path / "run", max_steps=1, save_strategy="no", memory_report=str(tmp_path / "reports" / "memory")).train()
    assert mine.read_text() == "years of work"
    assert json.loads((tmp_path / "reports" / "memory").read_text())


def test_a_file_that_is_separated_keeps_its_content_and_permissions(tmp_path):
    mine, run = tmp_path / "mine", tmp_path / "run"
    run.mkdir()
    mine.write_text("years of work")
    mine.chmod(0o600)
    for name in ("config.json", "thesis.doc"):
        os.link(mine, run / name)
    separate_hard_links(run)
    assert (run / "config.json").read_text() == "years of work"
    assert mode(run / "config.json") == 0o600
    assert (run / "config.json").stat().st_nlink == 1
    assert (run / "thesis.doc").samefile(mine)  # no run writes under that name


def test_a_pipe_is_not_replaced_by_a_file(tmp_path):
    os.mkfifo(tmp_path / "page.html")
    with (
        pytest.raises(FileExistsError, match=r"page\.html is neither a file nor a folder"),
        writing(tmp_path / "page.html"),
    ):
        pytest.fail("there is nothing to write into")
    assert [path.is_fifo() for path in tmp_path.iterdir()] == [True]


def test_what_a_command_writes_replaces_a_link_and_goes_into_a_pipe(tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    (tmp_path / "plan.yaml").symlink_to(tmp_path / "thesis.txt")
    write_output(tmp_path / "plan.yaml", "a plan")
    assert (tmp_path / "plan.yaml").read_text() == "a plan"
    assert (tmp_path / "thesis.txt").read_text() == "years of work"
    ends = os.pipe()
    (tmp_path / "out").symlink_to(f"/proc/self/fd/{ends[1]}")
    write_output(tmp_path / "out", "a plan")
    assert os.read(ends[0], 100) == b"a plan"
    assert (tmp_path / "out").is_symlink()


def test_the_systems_link_to_a_device_is_not_replaced(tmp_path, monkeypatch):
    (tmp_path / "stdout").symlink_to("/dev/null")
    with writing(tmp_path / "stdout") as beside:  # anybody's link is
        beside.write_text("a plan")
    (tmp_path / "stdout").unlink()
    (tmp_path / "stdout").symlink_to("/dev/null")
    monkeypatch.setattr(own_files, "DEVICES", tmp_path)
    with pytest.raises(FileExistsError, match="is neither a file nor a folder"), writing(tmp_path / "stdout"):
        pass
    assert (tmp_path / "stdout").is_symlink()
