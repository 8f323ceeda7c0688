"""What is read of a model's files as it is loaded may be let go, and the weights are those of the files."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from lowtide.compat.transformers_loading import telling_what_was_read
from lowtide.engine.weights.loading import load_model
from lowtide.ops.mapped import FilePages, can_let_go

SIZES: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    found = tmp_path_factory.mktemp("float32")
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(found)
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_each_weight_that_was_read_is_passed_on(folder, dtype):
    """Cast ones when they are copied, the others when the next is made; transformers has moved what reads them if
    there are fewer."""
    read: list[tuple] = []
    with telling_what_was_read(lambda tensor: read.append((tuple(tensor.shape), tensor.dtype))):
        model = LlamaForCausalLM.from_pretrained(folder, dtype=dtype)
    assert Counter(read) == Counter((tuple(p.shape), torch.float32) for p in model.parameters())


@pytest.mark.skipif(not can_let_go(), reason="this system does not let pages of a file go")
def test_pages_of_a_file_are_let_go_and_read_again(tmp_path):
    values = torch.randn(1024, 1024)
    save_file({"weight": values}, tmp_path / "model.safetensors")
    mapped, own = load_file(tmp_path / "model.safetensors")["weight"], values.clone()
    assert mapped.sum().isfinite()
    before, pages = resident_file_bytes(), FilePages()
    pages.let_go(mapped)
    assert before - resident_file_bytes() > 0.9 * mapped.nbytes
    pages.let_go(own)
    assert torch.equal(mapped, values), "what was let go is read again"
    assert torch.equal(own, values), "what lies in no file stays"


@pytest.mark.skipif(not can_let_go(), reason="this system does not let pages of a file go")
def test_a_model_that_is_cast_as_it_is_loaded_leaves_its_files(folder, monkeypatch):
    """Of all weights that were read no more than a few are resident at a time."""
    load_model(str(folder), dtype="bfloat16")  # with which libraries come
    most, first = [], resident_file_bytes()
    let_go = FilePages.let_go

    def noted(pages: FilePages, tensor: torch.Tensor) -> None:
        let_go(pages, tensor)
        most.append(resident_file_bytes() - first)

    monkeypatch.setattr(FilePages, "let_go", noted)
    model = load_model(str(folder), dtype="bfloat16")
    whole = sum(4 * p.numel() for p in model.parameters())
    largest = max(4 * p.numel() for p in model.parameters())
    assert whole > 8 * largest
    assert max(most) < 5 * largest
    for name, stored in load_file(folder / "model.safetensors").items():
        assert torch.equal(model.get_parameter(name), stored.to(torch.bfloat16))


def resident_file_bytes() -> int:
    """Of files that this process has mapped."""
    line = next(each for each in Path("/proc/self/status").read_text().splitlines() if each.startswith("RssFile"))
    return int(line.split()[1]) * 1024
