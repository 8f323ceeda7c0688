"""Ranks with sharded weights, one of which fails: some of the cases of `make test-faults`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        "killed in forward",
        "starved in backward",
        "raises in generation, layer by layer",
        "first rank raises in gathering a checkpoint",
        "stopped in a stage's forward",
        "starved in a stage's backward",
    ],
)
def test_no_rank_waits_for_ever_and_each_says_which_failed(case):
    command = [sys.executable, "-m", "tests.faults", "sharded_ranks", "--only", case, "--jobs", "1"]
    paths = {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    done = subprocess.run(command, cwd=ROOT, env=os.environ | paths, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout
    assert "sharded_ranks: " in done.stdout
