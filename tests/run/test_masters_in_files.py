"""A float32 checkpoint that is trained in bfloat16 takes no more memory at the start than in training."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from lowtide.memory.optimizers.compressed_adamw import CompressedAdamW
from lowtide.ops.mapped import can_let_go, lying_in_files
from lowtide.run.optimizers import settle_optimizer


@pytest.mark.skipif(not can_let_go(), reason="this system does not let pages of a file go")
def test_masters_in_a_file_are_let_go_as_they_are_split(tmp_path):
    """Of a float32 checkpoint that is mapped, no more than a weight is resident beside what training keeps."""
    sizes = {f"weight{n}": torch.randn(1024, 2048) for n in range(8)}
    save_file(sizes, tmp_path / "model.safetensors")
    loaded = load_file(tmp_path / "model.safetensors")
    model = nn.ParameterDict({name: nn.Parameter(each) for name, each in loaded.items()})
    assert lying_in_files(p.data for p in model.values()), "safetensors maps its file"
    assert all(p.detach().sum().isfinite() for p in model.values())
    del loaded
    before = resident_file_bytes()
    optimizer = CompressedAdamW(model.parameters(), remainder="8bit", moment_bits=8)
    args: Any = SimpleNamespace(device=torch.device("cpu"), optimizer_states_on_host=False, trained_weights="resident")
    settle_optimizer(optimizer, args, model)
    one = next(iter(sizes.values())).nbytes
    assert before - resident_file_bytes() > 6 * one
    for name, p in model.items():
        assert p.dtype == torch.bfloat16
        torch.testing.assert_close(optimizer.master(p), sizes[name], rtol=2**-16, atol=0)


def test_masters_in_memory_go_as_they_are_split(monkeypatch):
    """None of the float32 weights is held once it is split."""
    model = nn.ParameterDict({f"weight{n}": nn.Parameter(torch.randn(8, 8)) for n in range(4)})
    masters = [StorageWeakRef(p.data.untyped_storage()) for p in model.values()]
    compress, gone = CompressedAdamW.compress_, []

    def counted(self: CompressedAdamW, parameters: list[nn.Parameter]) -> None:
        compress(self, parameters)
        gone.append(sum(each.expired() for each in masters))

    monkeypatch.setattr(CompressedAdamW, "compress_", counted)
    optimizer = CompressedAdamW(model.parameters(), remainder="8bit", moment_bits=8)
    args: Any = SimpleNamespace(device=torch.device("cpu"), optimizer_states_on_host=False, trained_weights="resident")
    settle_optimizer(optimizer, args, model)
    assert gone == [1, 2, 3, 4]


def resident_file_bytes() -> int:
    """Of files that this process has mapped."""
    line = next(each for each in Path("/proc/self/status").read_text().splitlines() if each.startswith("RssFile"))
    return int(line.split()[1]) * 1024
