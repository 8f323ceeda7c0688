"""The training commands ask allocators for fewer holes before they are set up, unless the user says otherwise."""

import os
import subprocess
import sys

import pytest

from lowtide.memory.allocators.settings import CACHE, MALLOC, NAME, OLDER_NAMES, expand_segments, starts_over

SCRIPT = f"""
import os, sys
names = {(NAME, *OLDER_NAMES[:1], MALLOC)!r}

class Torch:
    def find_spec(name, path, target=None):
        if name == "torch":
            print([os.environ.get(each) for each in names], flush=True)
            os._exit(0)

sys.meta_path.insert(0, Torch)
from lowtide.cli.main import main
main()
import torch
"""
"""Prints what the environment says as torch is first imported, and ends there: before the seconds that this takes."""


def environment_of(*words: str, **more: str) -> list[str | None]:
    """PYTORCH_ALLOC_CONF, PYTORCH_CUDA_ALLOC_CONF and GLIBC_TUNABLES as torch reads them in a command."""
    env = {name: value for name, value in os.environ.items() if name not in (NAME, *OLDER_NAMES, MALLOC)}
    words = (sys.executable, "-c", SCRIPT, *words, "--help")
    run = subprocess.run(words, capture_output=True, text=True, env=env | more)
    assert run.returncode == 0, run.stderr
    (said,) = [line for line in run.stdout.splitlines() if line.startswith("[")]
    return eval(said)


@pytest.mark.skipif(sys.platform != "linux", reason="segments grow on Linux alone")
def test_training_commands_ask_for_it():
    assert environment_of("sft")[:2] == ["expandable_segments:True", None]


@pytest.mark.slow
def test_other_commands_and_the_users_own_word_stay():
    assert environment_of("lengths")[:2] == [None, None]
    assert environment_of("sft", PYTORCH_ALLOC_CONF="backend:native")[:2] == ["backend:native", None]
    older = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}
    assert environment_of("sft", **older)[:2] == [None, "max_split_size_mb:64"]


def test_nothing_is_said_once_torch_is_there(monkeypatch):
    for name in (NAME, *OLDER_NAMES):
        monkeypatch.delenv(name, raising=False)
    assert not expand_segments()
    assert NAME not in os.environ


def heap_of(command: str, **tunables: str) -> str | None:
    return environment_of(command, **tunables)[-1]


@pytest.mark.skipif(not starts_over(), reason="there is no glibc, or a GPU")
def test_training_commands_start_over_with_a_heap_without_the_threads_cache():
    assert heap_of("sft") == f"{CACHE}=0"
    assert heap_of("sft", GLIBC_TUNABLES="glibc.malloc.perturb=1") == f"glibc.malloc.perturb=1:{CACHE}=0"


def test_the_users_own_word_on_the_heap_stays():
    assert heap_of("sft", GLIBC_TUNABLES=f"{CACHE}=7") == f"{CACHE}=7"
    assert heap_of("lengths") is None
