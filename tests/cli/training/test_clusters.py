"""torchrun on two nodes, which are two launches on this machine, and a run that goes on after a rank has died."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

DYING = """
import os, signal, sys
from lowtide.cli.main import main
from lowtide.trainers.hooks import LowtideTrainer

step = LowtideTrainer.training_step

def dying(self, *args, **kwargs):
    first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    if first and os.environ["RANK"] == "1" and self.state.global_step == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return step(self, *args, **kwargs)

LowtideTrainer.training_step = dying
sys.exit(main())
"""


def torchrun(*words: Any) -> subprocess.Popen:
    paths = os.pathsep.join([str(Path(__file__).parents[3] / "src")])
    # or a second attempt finds the addresses of the first one in the agent's store
    own_store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    environment = {**os.environ, **own_store, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    command = [sys.executable, "-m", "torch.distributed.run", *map(str, words)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)


def run_of(model: Any, data: Any, output: Path) -> list[Any]:
    words = ["sft", "--model", model, "--dataset", data, "--output_dir", output, "--fsdp", "true", "--use_cpu"]
    words += ["--max_steps", 4, "--save_steps", 1, "--per_device_train_batch_size", 2, "--report_to", "none"]
    return [*words, "--disable_tqdm", "--resume_from_checkpoint", "latest"]


def test_two_nodes_train_together(model, data, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = f"127.0.0.1:{free.getsockname()[1]}"
    run = run_of(model, data, tmp_path / "run")
    nodes = [
        torchrun(
            *("--nnodes", 2, "--node_rank", node, "--nproc_per_node", 1, "--rdzv_backend", "c10d", "--rdzv_id", "a"),
            *("--rdzv_endpoint", place, "-m", "lowtide", *run),
        )
        for node in range(2)
    ]
    outputs = [node.communicate(timeout=200)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], outputs
    assert sum(text.count("The model is in") for text in outputs) == 1
    assert len([*(tmp_path / "run" / "checkpoint-4").glob("optimizer-*-of-00002.pt")]) == 2


def test_a_run_goes_on_from_its_last_checkpoint_after_a_rank_has_died(model, data, tmp_path):
    script = tmp_path / "dying.py"
    script.write_text(DYING)
    run = run_of(model, data, tmp_path / "run")
    done = torchrun("--standalone", "--nproc_per_node", 2, "--max_restarts", 1, script, *run)
    text = done.communicate(timeout=200)[0]
    assert done.returncode == 0, text
    assert text.count("No checkpoint in") <= 2  # of the first attempt
    state = json.loads((tmp_path / "run" / "checkpoint-4" / "trainer_state.json").read_text())
    assert state["global_step"] == 4
