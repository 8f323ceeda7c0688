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

from lowtide.engine.forward import install
from lowtide.engine.weights.sharded.fully_shard import shard_model
from lowtide.engine.weights.sharded.zero import partition_model
from lowtide.ranks import shards
from lowtide.ranks.sharding import Sharding
from lowtide.rollout.generators.vllm.limits import Limits
from lowtide.rollout.generators.vllm.remote import VLLMServerGenerator
from tests.support.models.tiny_llama import tiny_llama
from tests.support.ranks.processes import run_ranks
from tests.support.ranks.sharded_training import meeting_place, rank_of
from tests.support.vllm.writing_server import Writes, writing_server

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
        install(model)
        if engine == "zero3":
            partition_model(model, {"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 1}, device)
        elif engine == "layers":
            shard_model(model, Sharding(kind="none", devices=2, tensor_parallel=2), device)
        else:
            shard_model(model, Sharding(kind="fsdp2", devices=2), device, split_vocabulary=engine == "rows")
        limits = Limits(checked_every=1)  # by all ranks together
        generator = VLLMServerGenerator(Path(folder, "url").read_text(), model, bucket_bytes=3000, limits=limits)
        generator.sync(model, 0)
        generator.sync(changed(model), 1)
        held = sum(shards.local_of(getattr(p, "ds_tensor", p)).numel() for p in model.parameters())
        Path(folder, f"{rank}.json").write_text(json.dumps(held))


class Remembering(Writes):
    """An engine that writes, and remembers what it was sent last."""

    def __init__(self) -> None:
        super().__init__(tiny_llama())
        self.coming: dict[str, torch.Tensor] = {}

    def begin(self) -> None:
        super().begin()
        self.coming = {}

    def load(self, weights: dict[str, torch.Tensor]) -> None:
        super().load(weights)
        self.coming |= weights


@pytest.mark.slow
@pytest.mark.parametrize("adapters", [False, True], ids=["full", "adapters"])
@pytest.mark.parametrize("engine", ["fsdp2", "rows", "layers", ZERO])
def test_a_server_gets_the_weights_of_all_shards(tmp_path: Path, engine: str, adapters: bool):
    served = Remembering()
    with writing_server(served) as server:
        (meeting_place(tmp_path) / "url").write_text(server.url)
        run_ranks(rank_main, str(tmp_path), engine, adapters, ranks=2)

    expected: Any = changed(policy(adapters))
    whole = sum(p.numel() for p in expected.parameters())
    merged = expected.merge_and_unload() if adapters else expected
    weights = served.model.state_dict()
    assert weights.keys() == merged.state_dict().keys()
    for name, weight in merged.state_dict().items():
        torch.testing.assert_close(weights[name], weight)
    again = {name for name in weights if "self_attn" in name or "mlp" in name}
    assert served.coming.keys() == (again if adapters else weights.keys())
    assert served.asked == 4, "two prompts at each copy, which the policy agrees with"
    held = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert max(held) < 0.6 * whole  # shards again
