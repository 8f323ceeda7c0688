"""A model given by its path is cut into shards without a whole copy on any rank, with the numbers of a whole load."""

from __future__ import annotations

import ctypes
import gc
import re
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

from lowtide.engine.forward import causal_model
from lowtide.engine.heads.language_model import LanguageModel
from lowtide.engine.weights.loading import load_model
from lowtide.engine.weights.sharded import fully_shard, widening
from lowtide.ranks.sharding import Sharding
from lowtide.ranks.shards import whole_of
from tests.support.matrix import matrix
from tests.support.ranks.processes import run_ranks
from tests.support.ranks.sharded_training import build, meeting_place, rank_of

MIB = 1 << 20
M_MMAP_THRESHOLD = -3
"""Of glibc's `mallopt`."""


def saved(folder: Path, name: str, dtype: torch.dtype) -> str:
    path = folder / f"{name} {dtype}"
    if not path.exists():
        model = build(name).to(dtype)
        model.save_pretrained(path)
        matrix.tokenizer().save_pretrained(path)
    return str(path)


def load_on_ranks(rank: int, folder: str) -> None:
    with rank_of(Path(folder), rank, 2):
        for kind, name, dtype in CASES:
            path = str(Path(folder, f"{name} {dtype}"))
            with mock.patch.object(widening, "load_model", wraps=load_model) as late:
                trainer = matrix.make(kind, model=path, fsdp=True, max_steps=1)
            assert late.called == (dtype == torch.bfloat16)
            models = [trainer.model, *([trainer.runner.reference.model] if kind == "DPO" else [])]
            whole = load_model(path)
            for model in models:
                check_equal(causal_model(model), whole)
            assert trainer.model.config.dtype == torch.float32
            trainer.train()


def check_equal(model: nn.Module, whole: nn.Module) -> None:
    for values in ("named_parameters", "named_buffers"):
        wanted: dict[str, Any] = dict(getattr(whole, values)())
        found = {name: whole_of(value) for name, value in getattr(model, values)()}
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            assert found[name].dtype == value.dtype, name
            assert torch.equal(found[name], value), name


CASES = [
    ("SFT", "tied", torch.bfloat16),
    ("DPO", "gemma3", torch.bfloat16),
    ("SFT", "mixtral", torch.bfloat16),
    ("SFT", "tied", torch.float32),
]


def test_ranks_hold_the_numbers_of_a_whole_load(tmp_path):
    for _, name, dtype in CASES:
        saved(tmp_path, name, dtype)
    run_ranks(load_on_ranks, str(meeting_place(tmp_path)))


# -- memory ------------------------------------------------------------------------------------------------------------


class OwnMemory:
    """The most memory of this process, without what it maps from files, in bytes beyond what it had; read every
    millisecond."""

    def __enter__(self) -> OwnMemory:
        gc.collect()
        self.before, self.peak, self.on = self._now(), 0, True
        self.reader = threading.Thread(target=self._read)
        self.reader.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self.on = False
        self.reader.join()

    def _read(self) -> None:
        while self.on:
            self.peak = max(self.peak, self._now() - self.before)
            time.sleep(0.001)

    @staticmethod
    def _now() -> int:
        found = re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())
        assert found is not None
        return int(found[1]) << 10


def cut_on_ranks(rank: int, folder: str) -> None:
    with rank_of(Path(folder), rank, 2):
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 16)  # so that what is freed is given back at once
        torch.distributed.init_process_group("gloo")
        device, sharding = torch.device("cpu"), Sharding(kind="fsdp2", devices=2)
        for dtype in ("float32", "bfloat16"):
            with OwnMemory() as own:
                if dtype == "float32":
                    model: Any = load_model(f"{folder}/{dtype}")
                else:
                    model = widening.load_waiting(f"{folder}/{dtype}", head=LanguageModel)
                fully_shard.shard_model(model, sharding, device)
            whole = sum(p.numel() * 4 for p in model.parameters())
            unit = model.get_input_embeddings().weight.numel() * 4
            assert own.peak <= whole / 2 + unit + 16 * MIB
            del model


@pytest.mark.slow
def test_no_rank_holds_a_whole_model_while_it_loads(tmp_path):
    """98 million parameters, 375 MiB in float32, half of which are a rank's own."""
    config = LlamaConfig(
        vocab_size=8000,
        hidden_size=768,
        intermediate_size=2304,
        num_hidden_layers=12,
        num_attention_heads=12,
        tie_word_embeddings=True,
    )
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path / "float32")
    model.bfloat16().save_pretrained(tmp_path / "bfloat16")
    run_ranks(cut_on_ranks, str(meeting_place(tmp_path)))
