"""The comparison of rollouts beside training with those in turns."""

import pytest

from bench.rollouts_ahead.__main__ import run
from lowtide.demo.model import save


@pytest.mark.slow
def test_a_run_ahead_writes_each_window_once_and_says_how_long_it_waited(tmp_path):
    save(tmp_path, 0)
    found = run(tmp_path, 1, reward="length", max_steps=2, per_device_train_batch_size=8)
    assert [len(found[name]) for name in ("writing", "waiting", "rewards")] == [2, 2, 2]
    assert found["seconds"] > max(found["writing"]) > 0
