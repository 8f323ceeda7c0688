"""Streamed weights are not resident: peaks of processes of their own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

WEIGHTS = 134_105_856 * 4
"""Bytes of the model of `resident_child`, in float32."""
LAYER = 7_079_424 * 4
HEAD = 32_000 * 768 * 4
IN_BACKWARD = {"optimizer_in_backward": True, "max_grad_norm": 0.0}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak can be reset on Linux alone"),
]


def peak(folder: Path, **options) -> int:
    script = Path(__file__).with_name("resident_child.py")
    done = subprocess.run(
        [sys.executable, script, folder, json.dumps(options)], capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout.split()[-1])


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """With the model."""
    made = tmp_path_factory.mktemp("resident")
    peak(made)
    return made


def test_a_streamed_base_takes_a_layer(folder):
    plain, streamed = (peak(folder, base_weights=where) for where in ("resident", "stream"))
    assert plain > WEIGHTS
    assert plain - streamed > WEIGHTS - 2 * LAYER - HEAD


def test_trained_weights_and_states_in_a_file(folder):
    plain = peak(folder, **IN_BACKWARD)
    streamed = peak(folder, **IN_BACKWARD, trained_weights="stream")
    assert plain > 3 * WEIGHTS
    assert plain - streamed > 3 * WEIGHTS - 6 * LAYER - 3 * HEAD
