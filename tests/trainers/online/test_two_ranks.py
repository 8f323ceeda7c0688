"""Two processes with gloo against one: every loss, pairs, and advantages of the tokens of all ranks."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tests.support.online_runs import LOSSES, assert_near, loss_options, trained, weights
from tests.support.parity_world import lora
from tests.support.processes import run_ranks

pytestmark = pytest.mark.slow
METHODS = {
    **{f"GRPO {name}": {"num_generations": 2, "beta": 0.1, **loss_options(name)} for name in LOSSES},
    "GRPO scaled by the batch": {"num_generations": 2, "scale_rewards": "batch", "num_iterations": 2},
    "OnlineDPO": {"num_generations": 2, "missing_eos_penalty": 0.5},
    "PPO": {"num_generations": 1, "num_ppo_epochs": 2, "whiten_rewards": True},
    "PPO with an adapter of values": {
        "num_generations": 1,
        "num_ppo_epochs": 2,
        "value_adapter": True,
        "arguments": {"peft_config": lora()},
    },
    "RLOO": {"num_generations": 2, "normalize_advantages": True},
}


def learned(folder: Path, name: str, rows: int) -> dict[str, torch.Tensor]:
    """The weights after some steps, of so many rows on each rank."""
    return weights(trained(folder, name.split()[0], per_device_train_batch_size=rows, **METHODS[name]))


def rank_main(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    port = Path(folder, "port").read_text()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT=port)
    os.environ["ACCELERATE_USE_CPU"] = "true"
    for name in METHODS:
        found = learned(Path(folder, name), name, 2)
        if rank == 0:
            torch.save(found, Path(folder, f"{name}.pt"))
    torch.distributed.barrier()  # leave together: gloo's teardown can hang on a rank that is gone
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the weights of each method, learned by two ranks."""
    folder = tmp_path_factory.mktemp("ranks")
    store = torch.distributed.TCPStore("localhost", 0, 1, is_master=True, wait_for_workers=False)
    port, store = store.port, None
    (folder / "port").write_text(str(port))
    run_ranks(rank_main, str(folder))
    return folder


@pytest.mark.parametrize("name", METHODS)
def test_two_ranks_learn_what_one_does(name, two_ranks, tmp_path):
    assert_near(torch.load(two_ranks / f"{name}.pt"), learned(tmp_path, name, 4), 1e-5)
