"""Trainings over ranks of gloo, in one start for many cases, beside the same training on one rank."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from torch import Tensor

from lowtide.ranks.shards import whole_of
from tests.support import matrix
from tests.support.processes import run_ranks

LORA = {"r": 4, "target_modules": ["q_proj", "down_proj"], "lora_dropout": 0.0}


def trained(kind: str, ranks: int, folder: Path, *, lora: bool = False, ref_model: bool = False, **options: Any) -> Any:
    """(losses, weights by name, evaluation) of a training of the tiny Llama of `matrix`.

    Args:
        ranks: that train, each on its share of the rows of a step.
    """
    base = matrix.COMMON["per_device_train_batch_size"] if kind not in matrix.ONLINE else matrix.ROWS
    evaluated = options.pop("evaluated", False)
    rows = options.pop("rows", options.get("per_device_train_batch_size", base))
    options = {"output_dir": str(folder), "max_steps": 3, **options, "per_device_train_batch_size": rows // ranks}
    adapters = LoraConfig(**LORA, task_type="SEQ_CLS" if kind == "Reward" else "CAUSAL_LM") if lora else None
    more = {"ref_model": matrix.build(kind, 64)} if ref_model else {}
    trainer = matrix.make(kind, peft_config=adapters, **more, **options)
    trainer.train()
    evaluation = trainer.evaluate(matrix.rows(kind).select(range(7))) if evaluated else {}
    weights = {name: whole_of(p).clone() for name, p in trainer.model.named_parameters() if p.requires_grad}
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, weights, {name: value for name, value in evaluation.items() if name == "eval_loss"}


def rank_main(rank: int, folder: str, ranks: int) -> None:
    place = Path(folder)
    torch.set_num_threads(1)
    port = (place / "port").read_text()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks))
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=port, ACCELERATE_USE_CPU="true")
    for name, case in json.loads((place / "cases.json").read_text()).items():
        found = trained(folder=place / f"run-{name}", ranks=ranks, **case)
        if rank == 0:
            torch.save(found, place / f"{name}.pt")
    torch.distributed.barrier()  # leave together: gloo's teardown can hang on a rank that is gone
    torch.distributed.destroy_process_group()


def on_ranks(folder: Path, cases: Mapping[str, Mapping[str, Any]], ranks: int = 2) -> None:
    """Trains all cases on so many ranks; what came of each lies in a file of its name."""
    from torch.distributed import TCPStore

    store = TCPStore("localhost", 0, 1, is_master=True, wait_for_workers=False)
    port, store = store.port, None
    (folder / "port").write_text(str(port))
    (folder / "cases.json").write_text(json.dumps(cases))
    run_ranks(rank_main, str(folder), ranks, ranks=ranks)


def assert_near(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], relative: float) -> None:
    """Weights are equal to rounding: by their norms."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        distance = (found[name] - value).norm() / value.norm()
        assert distance <= relative, f"{name}: {distance:.2e}"
