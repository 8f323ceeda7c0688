"""A full disk is said as such, with the folder and the bytes, and leaves what was there."""

from __future__ import annotations

import errno
import re
import subprocess
import tempfile
from pathlib import Path

import pytest
import torch

from lowtide.cli.training.run_file import write_run_file
from lowtide.trainers.checkpoints import durable
from lowtide.trainers.checkpoints.soundness import damage
from lowtide.trainers.checkpoints.write_errors import write_reason
from tests.support.runs.small_runs import small, trained


@pytest.fixture
def disk(tmp_path):
    """Mounts a disk of some kilobytes; gives its folder."""
    mounted = []

    def mount(kilobytes: int) -> Path:
        folder = tmp_path / "disk"
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"a small disk cannot be mounted here: {done.stderr.strip()}")
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.parametrize("kilobytes", [100, 300, 900], ids=["model", "optimizer", "second checkpoint"])
def test_a_full_disk_is_said_with_the_bytes(kilobytes, disk):
    folder = disk(kilobytes) / "run"
    step = 4 if kilobytes == 900 else 2
    with pytest.raises(
        ValueError, match=rf"step {step}: the checkpoint could not be written to .*/run: the disk is full"
    ) as error:
        small(folder).train()
    assert "inline_container" not in str(error.value)
    assert re.search(r"The checkpoint needs \d+\.\d KiB, and \d+\.\d KiB are free", str(error.value))
    kept = [path.name for path in folder.iterdir() if path.is_dir()]
    assert kept == (["checkpoint-2"] if step == 4 else [])
    assert all(damage(folder / name) == {} for name in kept)


def test_a_failure_of_torch_asks_the_disk_for_the_reason(tmp_path, monkeypatch):
    error = RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 64 vs 0")
    assert write_reason(error, tmp_path) == str(error)

    def full(dir: Path) -> None:
        assert dir == tmp_path
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    assert write_reason(error, tmp_path) == "the disk is full"


def test_a_run_file_that_cannot_be_written_leaves_the_one_before(tmp_path, monkeypatch):
    path = tmp_path / "run.yaml"
    write_run_file(path, {"seed": 1}, {}, method="sft")
    before = path.read_bytes()

    def full(path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(durable, "flush", full)
    with pytest.raises(OSError, match="No space left"):
        write_run_file(path, {"seed": 2}, {}, method="sft")
    assert path.read_bytes() == before
    assert [each.name for each in tmp_path.iterdir()] == ["run.yaml"]


def test_a_checkpoint_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    seen = []
    flush = durable.flush

    def flushing(path: Path) -> None:
        seen.append((path.name, (tmp_path / "checkpoint-2").exists()))
        flush(path)

    for module in ("manifest", "whole"):
        monkeypatch.setattr(f"lowtide.trainers.checkpoints.{module}.flush", flushing)
    trained(tmp_path, max_steps=2)
    before = {name for name, named in seen if not named}
    assert {"model.safetensors", "optimizer.pt", "rng_state.pth", "manifest.json", "checkpoint-2"} <= before
    assert (tmp_path.name, True) in seen
    assert torch.load(tmp_path / "checkpoint-2" / "optimizer.pt", weights_only=True)["state"]
