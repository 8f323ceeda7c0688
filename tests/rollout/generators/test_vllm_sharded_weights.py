"""Weights that lie in shards on two ranks reach a server layer by layer, by the first."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from lowtide.engine.weights.sharded.fully_shard import shard_model
from lowtide.engine.weights.sharded.zero import partition_model
from lowtide.ranks import shards
from lowtide.ranks.sharding import Sharding
from lowtide.rollout.generators.vllm.remote import VLLMServerGenerator
from lowtide.rollout.generators.vllm.server import Service
from tests.support.models.tiny_llama import tiny_llama
from tests.support.ranks.processes import run_ranks
from tests.support.ranks.sharded_training import meeting_place, rank_of
from tests.support.vllm.remembering_server import INFO, Remembers, serving

ZERO = pytest.param("zero3", marks=pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is missing"))


def policy(adapters: bool) -> nn.Module:
    torch.manual_seed(0)
    model = tiny_llama()
    if not adapters:
        return model
    return get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False))


def changed(model: nn.Module) -> nn.Module:
    """Number by number, so that it may be done on shards."""
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                shards.local_of(getattr(p, "ds_tensor", p)).mul_(2)
    return model


def rank_main(rank: int, folder: str, engine: str, adapters: bool) -> None:
    with rank_of(Path(folder), rank, 2):
        torch.distributed.init_process_group("gloo")
        model, device = policy(adapters), torch.device("cpu")
        if engine == "zero3":
            partition_model(model, {"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 1}, device)
        elif engine == "layers":
            shard_model(model, Sharding(kind="none", devices=2, tensor_parallel=2), device)
        else:
            shard_model(model, Sharding(kind="fsdp2", devices=2), device, split_vocabulary=engine == "rows")
        generator = VLLMServerGenerator(Path(folder, "url").read_text(), model, bucket_bytes=3000)
        generator.sync(model, 0)
        generator.sync(changed(model), 1)
        held = sum(shards.local_of(getattr(p, "ds_tensor", p)).numel() for p in model.parameters())
        Path(folder, f"{rank}.json").write_text(json.dumps(held))


@pytest.mark.slow
@pytest.mark.parametrize("adapters", [False, True], ids=["full", "adapters"])
@pytest.mark.parametrize("engine", ["fsdp2", "rows", "layers", ZERO])
def test_a_server_gets_the_weights_of_all_shards(tmp_path: Path, engine: str, adapters: bool):
    remembers = Remembers()
    with serving(Service(remembers, dict(INFO))) as server:
        (meeting_place(tmp_path) / "url").write_text(server.url)
        run_ranks(rank_main, str(tmp_path), engine, adapters, ranks=2)

    expected: Any = changed(policy(adapters))
    whole = sum(p.numel() for p in expected.parameters())
    merged = expected.merge_and_unload() if adapters else expected
    assert remembers.weights.keys() == merged.state_dict().keys()
    for name, weight in merged.state_dict().items():
        torch.testing.assert_close(remembers.weights[name], weight)
    again = {name for name in remembers.weights if "self_attn" in name or "mlp" in name}
    assert remembers.coming.keys() == (again if adapters else remembers.weights.keys())
    held = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert max(held) < 0.6 * whole  # shards again
