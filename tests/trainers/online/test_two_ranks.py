"""Two processes with gloo against one: pairs, and advantages that are whitened over the tokens of all ranks."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tests.support.online_runs import assert_near, trained, weights
from tests.support.processes import run_ranks

pytestmark = pytest.mark.slow
METHODS = {
    "OnlineDPO": {"num_generations": 2, "missing_eos_penalty": 0.5},
    "PPO": {"num_generations": 1, "num_ppo_epochs": 2, "whiten_rewards": True},
    "RLOO": {"num_generations": 2, "normalize_advantages": True},
}


def rank_main(rank: int, folder: str, method: str) -> None:
    torch.set_num_threads(1)
    port = Path(folder, "port").read_text()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT=port)
    os.environ["ACCELERATE_USE_CPU"] = "true"
    trainer = trained(Path(folder), method, per_device_train_batch_size=2, **METHODS[method])
    if rank == 0:
        torch.save(weights(trainer), f"{folder}/weights.pt")
    torch.distributed.barrier()  # leave together: gloo's teardown can hang on a rank that is gone
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("method", METHODS)
def test_two_ranks_learn_what_one_does(method, tmp_path):
    whole = trained(tmp_path / "one", method, per_device_train_batch_size=4, **METHODS[method])
    store = torch.distributed.TCPStore("localhost", 0, 1, is_master=True, wait_for_workers=False)
    port, store = store.port, None
    (tmp_path / "port").write_text(str(port))
    run_ranks(rank_main, str(tmp_path), method)
    assert_near(torch.load(tmp_path / "weights.pt"), weights(whole), 1e-5)
