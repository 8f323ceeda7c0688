"""Two processes with gloo against one, on rows with images, of which one rank has none."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from datasets import Dataset

from lowtide import SFTConfig, SFTTrainer
from tests.support.processes import run_ranks
from tests.support.vision_models import assistant, conversations, processor, user, vision_model


def run(folder: str, batch_size: int) -> tuple[dict[str, torch.Tensor], list[float]]:
    rows = []
    for row in conversations(4):
        rows += [row, {"images": [], "messages": [user("Hm?"), assistant("Yes.")]}]
    model = vision_model()
    args = SFTConfig(
        output_dir=folder,
        per_device_train_batch_size=batch_size,
        train_sampling_strategy="sequential",
        max_steps=3,
        max_length=None,
        logging_steps=1,
        learning_rate=1e-2,
        use_cpu=True,
        bf16=False,
        rehearsal=False,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = SFTTrainer(model, args, train_dataset=Dataset.from_list(rows), processing_class=processor())
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {n: p.detach() for n, p in model.named_parameters()}, losses


def rank_main(rank: int, folder: str) -> None:
    port = Path(folder, "port").read_text()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT=port)
    os.environ["ACCELERATE_USE_CPU"] = "true"
    found = run(folder, 1)
    if rank == 0:
        torch.save(found, Path(folder, "found.pt"))
    torch.distributed.barrier()  # leave together: gloo's teardown can hang on a rank that is gone
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_a_rank_without_images_trains_along(tmp_path: Path) -> None:
    from torch.distributed import TCPStore

    store = TCPStore("localhost", 0, 1, is_master=True, wait_for_workers=False)
    port, store = store.port, None
    (tmp_path / "port").write_text(str(port))
    run_ranks(rank_main, str(tmp_path))
    weights, losses = torch.load(tmp_path / "found.pt", weights_only=True)
    expected_weights, expected_losses = run(str(tmp_path / "one"), 2)
    assert losses == pytest.approx(expected_losses, rel=1e-5)
    for name, value in expected_weights.items():
        if not name.endswith("k_proj.bias") and "qkv.bias" not in name:  # whose gradients are rounding
            torch.testing.assert_close(weights[name], value, rtol=1e-3, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
