"""A float32 checkpoint that is trained in bfloat16 takes no more memory at the start than in training."""

from __future__ import annotations

import mmap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from lowtide.memory.optimizers.compressed_adamw import CompressedAdamW
from lowtide.ops.mapped import can_let_go, is_mapped, lying_in_files
from lowtide.run.optimizers import settle_optimizer
from lowtide.run.references import ReferenceMaker
from tests.support.runs.streamed_runs import dpo, saved


@pytest.mark.slow
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


def test_bfloat16_weights_in_a_file_are_stepped_as_any_are(tmp_path):
    """They are written to in place: no page of them may be let go, and none is read by bands."""
    save_file({"weight": torch.randn(1024, 64).bfloat16()}, tmp_path / "model.safetensors")
    model = nn.ParameterDict({"weight": nn.Parameter(load_file(tmp_path / "model.safetensors")["weight"])})
    assert lying_in_files([model["weight"].data])
    optimizer = CompressedAdamW(model.parameters(), remainder="8bit", moment_bits=8)
    args: Any = SimpleNamespace(device=torch.device("cpu"), optimizer_states_on_host=False, trained_weights="resident")
    settle_optimizer(optimizer, args, model)
    assert not is_mapped(model["weight"].data)


@pytest.mark.skipif(not can_let_go(), reason="this system does not let pages of a file go")
def test_a_reference_by_name_leaves_its_file_as_it_is_narrowed(tmp_path, monkeypatch):
    """The pages of its float32 weights are let go, and the bfloat16 ones are these rounded."""
    name = saved(tmp_path / "model", hidden_size=128, intermediate_size=512)
    to, make, held = Tensor.to, ReferenceMaker.make, list[Tensor]()

    def narrowed(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        found = to(tensor, *args, **kwargs)
        if (tensor.dtype, found.dtype) == (torch.float32, torch.bfloat16) and lying_in_files([tensor.detach()]):
            held.append(tensor.detach())  # so that the file stays mapped
        return found

    def made(*args: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(Tensor, "to", narrowed)
            return make(*args)

    monkeypatch.setattr(ReferenceMaker, "make", made)
    trainer = dpo(name, tmp_path / "out", peft=None, ref_model=name, optim="adamw_flash")
    reference = [*trainer.reference.model.parameters()]
    assert len(held) == len(reference)
    # the system brings in some pages around those that the next weight is read from
    assert resident_bytes(held) < 0.25 * sum(each.nbytes for each in held)
    assert all(torch.equal(each.bfloat16(), p) for each, p in zip(held, reference, strict=True))


def resident_bytes(tensors: list[Tensor]) -> int:
    """Of the pages that are a tensor's alone."""
    total = 0
    with open("/proc/self/pagemap", "rb", buffering=0) as file:
        for tensor in tensors:
            first, stop = -(-tensor.data_ptr() // mmap.PAGESIZE), (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE
            file.seek(8 * first)
            flags = np.frombuffer(file.read(8 * max(stop - first, 0)), dtype=np.uint64)
            total += int((flags >> np.uint64(63)).sum()) * mmap.PAGESIZE
    return total


def resident_file_bytes() -> int:
    """Of files that this process has mapped."""
    line = next(each for each in Path("/proc/self/status").read_text().splitlines() if each.startswith("RssFile"))
    return int(line.split()[1]) * 1024
