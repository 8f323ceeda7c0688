"""GRPO with vLLM in the process that trains."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.vllm.vllm_world import needs_vllm

pytestmark = needs_vllm
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("kind", ["named", "made"])
def test_grpo_trains_with_vllm_in_its_process(tmp_path: Path, kind: str):
    command = [sys.executable, "-m", "tests.support.vllm.colocated_vllm", str(tmp_path), kind]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    line = next((line for line in done.stdout.splitlines() if line.startswith("LOGGED ")), None)
    assert line is not None, done.stdout[-3000:] + done.stderr[-6000:]
    found = json.loads(line.removeprefix("LOGGED "))

    logs = [entry for entry in found["logs"] if "loss" in entry]
    assert len(logs) == 3
    assert max(entry["sampling/sampling_logp_difference/max"] for entry in logs) < 1e-4
    assert max(entry["grad_norm"] for entry in logs) > 0
    assert "stale weights" in found["stale"]
