"""Streamed weights are not resident: peaks of processes of their own."""

from pathlib import Path

import pytest

from tests.memory.weights.resident_child import make, train
from tests.support.ranks.processes import run_ranks

WEIGHTS = 54_765_312 * 4
"""Bytes of the model of `resident_child`, in float32."""
LAYER = 7_079_424 * 4
HEAD = 8_000 * 768 * 4
IN_BACKWARD = {"optimizer_in_backward": True, "max_grad_norm": 0.0}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak can be reset on Linux alone"),
]


def peak(folder: Path, **options) -> int:
    run_ranks(train, str(folder), options, ranks=1)
    return int((folder / "peak").read_text())


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """With the model."""
    made = tmp_path_factory.mktemp("resident")
    make(made / "model")
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
