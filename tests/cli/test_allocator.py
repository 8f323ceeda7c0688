"""The training commands ask for growing segments before torch reads the environment, unless the user says otherwise."""

import os
import subprocess
import sys

import pytest

from lowtide.memory.allocator import NAME, OLDER_NAMES, expand_segments

SCRIPT = """
import os, sys
from lowtide.cli.main import main
assert "torch" not in sys.modules
assert main(sys.argv[1:]) == 0
print(os.environ.get("PYTORCH_ALLOC_CONF"), os.environ.get("PYTORCH_CUDA_ALLOC_CONF"), file=sys.stderr)
"""


def environment_of(*words: str, **more: str) -> str:
    env = {name: value for name, value in os.environ.items() if name not in (NAME, *OLDER_NAMES)}
    run = subprocess.run([sys.executable, "-c", SCRIPT, *words], capture_output=True, text=True, env=env | more)
    assert run.returncode == 0, run.stderr
    return run.stderr.splitlines()[-1]


@pytest.mark.skipif(sys.platform != "linux", reason="segments grow on Linux alone")
def test_training_commands_ask_for_it():
    assert environment_of("sft", "--help") == "expandable_segments:True None"


def test_other_commands_and_the_users_own_word_stay():
    assert environment_of("demo", "--help") == "None None"
    assert environment_of("sft", "--help", PYTORCH_ALLOC_CONF="backend:native") == "backend:native None"
    older = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}
    assert environment_of("sft", "--help", **older) == "None max_split_size_mb:64"


def test_nothing_is_said_once_torch_is_there(monkeypatch):
    for name in (NAME, *OLDER_NAMES):
        monkeypatch.delenv(name, raising=False)
    assert not expand_segments()
    assert NAME not in os.environ
