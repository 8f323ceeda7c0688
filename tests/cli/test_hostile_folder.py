"""What lies in the current folder is not executed by the processes that a command starts."""

import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest

from lowtide.cli.training.launch import prepare
from lowtide.compat.launching import meet_on_this_machine, static
from lowtide.planner import process, tracing_process
from lowtide.python_process import forget_safe_path, keep_current_folder_off_the_path

PACKAGES = ("torch", "peft", "lowtide", "accelerate", "transformers", "argparse", "rich")


@pytest.fixture
def hostile(tmp_path, monkeypatch):
    """A current folder whose files note that they were executed, under the names of packages."""
    for name in PACKAGES:
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'a').write({name!r})\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", str(Path.cwd()))])
    for name in ("PYTHONSAFEPATH", "LOCAL_RANK"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return tmp_path


class Stopped(Exception):
    pass


def stopped(*_):
    raise Stopped


@pytest.mark.parametrize("engine", ["", "ddp"])
def test_the_small_run_of_an_estimate_takes_no_module_from_the_current_folder(hostile, monkeypatch, engine):
    asked = []
    monkeypatch.setattr(process.subprocess, "run", lambda command, **_: asked.append(command) or stopped())
    with pytest.raises(Stopped):
        process._measured(True, engine)
    monkeypatch.undo()
    done = subprocess.run([*asked[0], "--help"], cwd=hostile, capture_output=True, text=True, timeout=60)
    assert "--adapters" in done.stdout, done.stderr
    assert not (hostile / "executed").exists()


@pytest.mark.slow
def test_a_tracing_process_takes_no_module_from_the_current_folder(hostile):
    assert tracing_process._asked(os.getpid, (), {}).found != os.getpid()
    assert not (hostile / "executed").exists()


def test_a_launcher_and_its_ranks_are_started_safely_and_what_they_start_is_not(hostile, monkeypatch):
    started = []
    monkeypatch.setattr(os, "execv", lambda *command: started.append((command[1], dict(os.environ))) or stopped())
    with pytest.raises(Stopped):
        prepare(["sft", "--num_processes", "2"])
    (command, environment) = started[0]
    monkeypatch.undo()
    shown = [*command[:2], "lowtide.python_process"]  # in place of the launcher, which takes some seconds to import
    done = subprocess.run(shown, cwd=hostile, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert not (hostile / "executed").exists()
    monkeypatch.setenv("PYTHONSAFEPATH", environment["PYTHONSAFEPATH"])
    forget_safe_path()
    assert "PYTHONSAFEPATH" not in os.environ


def test_what_a_user_has_set_stays(monkeypatch):
    monkeypatch.setenv("PYTHONSAFEPATH", "1")
    keep_current_folder_off_the_path()
    forget_safe_path()
    assert os.environ["PYTHONSAFEPATH"] == "1"


def test_python_m_lowtide_takes_no_module_from_the_current_folder(hostile):
    (hostile / "lowtide.py").unlink()  # which Python imports before lowtide is there
    (hostile / "argparse.py").unlink()
    done = subprocess.run([sys.executable, "-m", "lowtide", "nothing"], capture_output=True, text=True, timeout=90)
    assert "there is no command 'nothing'" in done.stderr
    assert not (hostile / "executed").exists()


def test_ranks_of_one_machine_meet_on_its_loopback_interface(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setattr(static, "TCPStore", static.TCPStore)
    meet_on_this_machine()
    handler = static.StaticTCPRendezvous("127.0.0.1", free_port(), rank=0, world_size=1, run_id="x", timeout=5)
    store = handler.next_rendezvous().store
    store.set("a", "1")
    assert listening_on(handler.master_port) == {"127.0.0.1"}
    other = static.TCPStore("127.0.0.1", handler.master_port, 2, False, timedelta(seconds=5))
    assert other.get("x/a") == b"1"


def free_port() -> int:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as made:
        return made.getsockname()[1]


def listening_on(port: int) -> set[str]:
    """The addresses of this machine at which something listens on a port."""
    found = set()
    for file in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(file).read_text().splitlines()[1:]:
            words = line.split()
            address, _, at = words[1].partition(":")
            if words[3] == "0A" and int(at, 16) == port:
                numbers = bytes.fromhex(address)[::-1] if len(address) == 8 else None
                found.add("every" if numbers is None else ".".join(map(str, numbers)))
    return found
