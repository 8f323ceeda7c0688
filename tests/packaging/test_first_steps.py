"""The newcomer's script, from an empty folder."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.packaging import DEPENDENCIES, MISSING, ROOT, run

SCRIPT = ROOT / "examples" / "first_steps.sh"
OFFLINE = {"PIP_NO_DEPS": "1", "PIP_NO_BUILD_ISOLATION": "0", "PIP_NO_INDEX": "1", "PYTHONPATH": DEPENDENCIES}
"""pip takes the packages that are there; with its option for no isolation a 0 means that there is none."""


def test_it_has_at_most_six_commands():
    lines = SCRIPT.read_text(encoding="utf-8").split("shift\n")[1].splitlines()
    assert 0 < len([line for line in lines if line.strip()]) <= 6


@pytest.mark.slow
def test_it_goes_from_an_empty_folder_to_a_report(tmp_path):
    pytest.importorskip("setuptools", reason=MISSING)
    if (
        shutil.which("git") is None
        or subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True).returncode
    ):
        pytest.skip("needs git, and a checkout of it")
    shown = run("sh", SCRIPT, ROOT, "--max_steps", "4", folder=tmp_path, **OFFLINE)
    report = json.loads((tmp_path / "first" / "report.json").read_text(encoding="utf-8"))
    assert Path(tmp_path / report["model"] / "model.safetensors").is_file()
    assert "Peak" in shown
    assert '"peak_bytes"' in shown
