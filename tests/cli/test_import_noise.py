"""What packages log as they are imported reaches nobody: commands say what is theirs to say, and no more."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

from lowtide.process.import_noise import NOISE


def said(*words: str) -> str:
    """What a command writes to its standard error."""
    done = subprocess.run(
        [sys.executable, "-m", "lowtide", *words], capture_output=True, text=True, timeout=300, env=os.environ.copy()
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.mark.slow
def test_help_is_all_that_help_says():
    assert said("sft", "--help") == ""


@pytest.mark.slow
def test_an_estimate_says_nothing_beside_its_table(model, data, tmp_path):
    words = ["--model", str(model), "--dataset", str(data), "--output_dir", str(tmp_path), "--disable_tqdm"]
    optim = "adamw_8bit" if find_spec("bitsandbytes") else "adamw_torch"
    lines = said("estimate", "sft", *words, "--device", "A100-80GB", "--optim", optim).splitlines()
    assert [line for line in lines if line.strip() and "examples/s" not in line] == []  # but for bars of progress


@pytest.mark.slow
def test_a_run_has_no_warnings_of_imports(model, data, tmp_path):
    words = ["--model", str(model), "--dataset", str(data), "--output_dir", str(tmp_path), "--use_cpu"]
    found = said("sft", *words, "--max_steps", "1", "--save_strategy", "no", "--disable_tqdm")
    assert "Failed to load" not in found
    assert "deprecated" not in found.lower()
    assert "Warning" not in found


@pytest.mark.parametrize("name", NOISE)
def test_other_messages_of_the_same_loggers_are_kept(name, caplog):
    logger = logging.getLogger(name)
    logger.warning(NOISE[name], *["x"] * NOISE[name].count("%s"))
    logger.warning("something else")
    assert caplog.messages == ["something else"]
