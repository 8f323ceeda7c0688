"""The training commands ask allocators for fewer holes before they are set up, unless the user says otherwise."""

import os
import subprocess
import sys

import pytest

from lowtide.memory.allocators.settings import CACHE, MALLOC, NAME, OLDER_NAMES, expand_segments, starts_over

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


def heap_of(*words: str, tunables: str | None = None) -> list[str]:
    """What the environment says of the heap, in each process that the command becomes."""
    script = f"import os, sys; print(os.environ.get({MALLOC!r})); from lowtide.cli.main import main; main()"
    env = {name: value for name, value in os.environ.items() if name != MALLOC}
    env |= {"COLUMNS": "80"} | ({} if tunables is None else {MALLOC: tunables})
    run = subprocess.run([sys.executable, "-c", script, *words, "--help"], capture_output=True, text=True, env=env)
    assert run.returncode == 0, run.stderr
    return [line for line in run.stdout.splitlines() if line == "None" or line.startswith("glibc.")]


@pytest.mark.skipif(not starts_over(), reason="there is no glibc, or a GPU")
def test_training_commands_start_over_with_a_heap_without_the_threads_cache():
    assert heap_of("sft") == ["None", f"{CACHE}=0"]
    assert heap_of("sft", tunables="glibc.malloc.perturb=1")[-1] == f"glibc.malloc.perturb=1:{CACHE}=0"


def test_the_users_own_word_on_the_heap_stays():
    assert heap_of("sft", tunables=f"{CACHE}=7") == [f"{CACHE}=7"]
    assert heap_of("lengths") == ["None"]
