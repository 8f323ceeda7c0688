"""Two runs in one output folder would destroy each other's checkpoints: the second is refused."""

from __future__ import annotations

import errno
import fcntl
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import threading
from pathlib import Path

import pytest

from lowtide.trainers.checkpoints.lock import LOCK, only_run_in
from lowtide.trainers.checkpoints.output_folder import STAGING
from tests.support.runs.small_runs import small, trained


def hold(folder: str, held) -> None:
    with only_run_in(Path(folder)):
        if os.fork() == 0:  # a worker of a data loader, which outlives a killed parent for a while
            threading.Event().wait(60)
            os._exit(0)
        held.set()
        threading.Event().wait(60)


@pytest.fixture
def holder(tmp_path):
    """Another process that trains into the folder, with a worker."""
    context = multiprocessing.get_context("fork")
    held = context.Event()
    process = context.Process(target=hold, args=(str(tmp_path), held))
    process.start()
    assert held.wait(30)
    yield process
    process.kill()
    process.join()


def test_a_second_run_is_refused_and_names_the_first(holder, tmp_path):
    with pytest.raises(ValueError, match=rf"is in use: process {holder.pid} trains into it since"):
        small(tmp_path).train()
    assert [path.name for path in tmp_path.iterdir()] == [LOCK]


def test_a_run_that_saves_nothing_needs_no_lock(holder, tmp_path):
    small(tmp_path, save_strategy="no", max_steps=1).train()


def test_the_lock_of_a_killed_run_is_taken_over(holder, tmp_path):
    os.kill(holder.pid, signal.SIGKILL)
    holder.join()
    with only_run_in(tmp_path):
        assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()
    assert not (tmp_path / LOCK).exists()


def test_a_thread_may_ask_again_and_another_may_not(tmp_path):
    refused = []

    def other() -> None:
        try:
            with only_run_in(tmp_path):
                pass
        except ValueError as error:
            refused.append(str(error))

    with only_run_in(tmp_path), only_run_in(tmp_path / ".." / tmp_path.name):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert len(refused) == 1
    with only_run_in(tmp_path):
        pass


@pytest.mark.parametrize("whose", ["gone", "alive", "another machine's"])
def test_where_the_file_system_has_no_locks_the_process_is_looked_up(whose, tmp_path, monkeypatch):
    def no_locks(descriptor, operation):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    child = subprocess.Popen(["true"])
    child.wait()
    pid = child.pid if whose == "gone" else os.getppid()
    host = "elsewhere" if whose == "another machine's" else socket.gethostname()
    (tmp_path / LOCK).write_text(json.dumps({"pid": pid, "host": host}))
    if whose == "gone":
        with only_run_in(tmp_path):
            pass
        return
    where = " on elsewhere" if host == "elsewhere" else ""
    with pytest.raises(ValueError, match=f"process {pid}{where} trains into it.*delete"), only_run_in(tmp_path):
        pass


def test_a_link_in_the_place_of_a_folder_is_not_followed(tmp_path):
    mine, run = tmp_path / "mine", tmp_path / "run"
    mine.mkdir()
    (mine / "thesis.txt").write_text("years of work")
    run.mkdir()
    (run / STAGING).symlink_to(mine)
    (run / "checkpoint-2").symlink_to(mine)
    trained(run, max_steps=2)
    assert [path.name for path in mine.iterdir()] == ["thesis.txt"]
    assert not (run / "checkpoint-2").is_symlink()
    assert (run / "checkpoint-2" / "model.safetensors").exists()
