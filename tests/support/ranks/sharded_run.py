"""Two steps of a small model in a plain loop, on one device or sharded over ranks of gloo, with their bytes counted."""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

from lowtide.compat.deepspeed import deepspeed, engine_of
from lowtide.planner.sharding.moment import OneDevice
from lowtide.planner.sharding.tensor_parallel import one_rank
from tests.support.memory.live_bytes import LivingBytes
from tests.support.ranks.processes import server_context

RANKS, LAYERS = 2, 3
REPEATS = 3
"""Of each run: gloo's threads let go of a buffer late now and then, so the least of the peaks is what a step needs."""
ZERO = {
    "reduce_bucket_size": 100_000,
    "stage3_prefetch_bucket_size": 50_000,
    "stage3_param_persistence_threshold": 1_000,
}


def described(layers: int = LAYERS, tied: bool = False) -> LlamaConfig:
    """A model whose vocabulary is no multiple of the ranks."""
    return LlamaConfig(
        vocab_size=1003,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
        use_cache=False,
    )


def steps(model: Any, counted: LivingBytes, backward: Callable, step: Callable, rounds: int = 1) -> None:
    """Two optimizer steps, of so many micro-batches each."""
    ids = torch.arange(64).view(2, 32)
    for _ in range(2):
        for number in range(rounds):
            with counted.during("forward"):
                logits = model(input_ids=ids, use_cache=False).logits
            with counted.during("head"):
                loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())
                del logits
            with counted.during("backward"):
                backward(loss)
                del loss
            gc.collect()  # hooks hold graphs in cycles, with the embedding's gradient in them
            with counted.during("optimizer" if number == rounds - 1 else ""):
                step(number == rounds - 1)


def plain(model: nn.Module, counted: LivingBytes, rounds: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    counted.model, counted.optimizer = model, optimizer

    def step(last: bool) -> None:
        if last:
            optimizer.step()
            counted.phase = ""
            optimizer.zero_grad()

    steps(model, counted, torch.Tensor.backward, step, rounds)


def one_device(config: LlamaConfig, dtype: str = "float32", rounds: int = 1) -> OneDevice:
    """The same as a trace has it, of this model."""
    seen: dict[str, int] = {}
    with LivingBytes() as counted:
        with counted.during("loading"):
            model = AutoModelForCausalLM.from_config(config).to(getattr(torch, dtype))
            counted.model = model
            counted._count()

        def in_layers(_gradient: Any) -> None:
            counted.phase = "layers"

        def after_layers(_module: nn.Module, _inputs: Any, output: Any) -> None:
            seen["saved"] = counted.rest()
            output[0].register_hook(in_layers)

        model.model.register_forward_hook(after_layers)
        plain(model, counted, rounds)
    phases = counted.by_category()
    phases["backward"] = max(phases["backward"], phases.pop("layers"), key=lambda held: sum(held.values()))
    # the head's gradient of a tied embedding waits for the other to be added
    waiting = sum(p.numel() * p.element_size() for p in model.lm_head.parameters() if config.tie_word_embeddings)
    return OneDevice(
        phases=phases,
        saved={"activations": seen["saved"]},
        in_layers={"activations": counted.most_in_layers - waiting},
        micro_batches=rounds,
    )


@functools.cache
def traced(shares: int = 1, tied: bool = False, **more: Any) -> OneDevice:
    """With what each layer saves, from a model with one less; of one rank, where its matrices are split."""
    configs = [described(count, tied) for count in (LAYERS - 1, LAYERS)]
    small, large = (one_device(one_rank(c, shares) if shares > 1 else c, **more) for c in configs)
    return replace(large, saved_per_layer=large.saved["activations"] - small.saved["activations"])


def ranks(folder: Path, cases: dict[str, dict[str, Any]]) -> dict[str, dict[str, int]]:
    """For each case the bytes by phase of the rank that holds most; all in one start of two processes.

    Args:
        folder: for their files.
        cases: `kind`, of `RUNS`, and its options.
    """
    from torch.distributed import TCPStore

    store = TCPStore("localhost", 0, 1, is_master=True, wait_for_workers=False)
    port, store = store.port, None
    (folder / "cases.json").write_text(json.dumps(cases))
    server_context()
    context = mp.start_processes(_rank, (str(folder), port), nprocs=RANKS, join=False, start_method="forkserver")
    until = time.monotonic() + 240
    while not context.join(timeout=5, grace_period=1):
        if time.monotonic() > until:
            for process in context.processes:
                process.kill()
            raise TimeoutError(f"two ranks came to no end in four minutes, of {', '.join(cases)}")
    found = [json.loads((folder / f"peaks-{rank}.json").read_text()) for rank in range(RANKS)]
    return {name: {phase: max(each[name][phase] for each in found) for phase in found[0][name]} for name in found[0]}


def _rank(rank: int, folder: str, port: int) -> None:
    torch.set_num_threads(1)
    cases = json.loads(Path(folder, "cases.json").read_text())
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_SIZE=str(RANKS))
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port), DS_ACCELERATOR="cpu")
    dist.init_process_group("gloo")
    if any(case["kind"].startswith("zero") for case in cases.values()):
        deepspeed(torch.device("cpu"))  # without what it would compile
    peaks = {}
    for name, given in cases.items():
        found = [_peaks({"rounds": 1, "folder": folder, **given}) for _ in range(REPEATS)]
        peaks[name] = {phase: min(each[phase] for each in found) for phase in found[0]}
    Path(folder, f"peaks-{rank}.json").write_text(json.dumps(peaks))
    dist.barrier()
    os._exit(0)  # deepspeed's threads and gloo's teardown can abort or hang


def _peaks(given: dict[str, Any]) -> dict[str, int]:
    torch.manual_seed(0)
    with LivingBytes() as counted:
        RUNS[given["kind"]](counted, **given)
    gc.collect()
    return counted.peaks


def _fully_shard(counted: LivingBytes, *, rounds: int, tied: bool = False, reshard: bool = True, **_: Any) -> None:
    """As lowtide's trainers cut a model."""
    from lowtide.engine.weights.sharded.fully_shard import shard_model
    from lowtide.ranks.sharding import Sharding

    with counted.during("loading"):
        model: Any = AutoModelForCausalLM.from_config(described(tied=tied))
        shard_model(model, Sharding(kind="fsdp2", devices=RANKS, reshard=reshard), torch.device("cpu"))
    gc.collect()
    plain(model, counted, rounds)


def _tensor_parallel(counted: LivingBytes, *, rounds: int, folder: str, **_: Any) -> None:
    from transformers.distributed import DistributedConfig

    path = Path(folder, "model")
    if dist.get_rank() == 0:
        AutoModelForCausalLM.from_config(described()).save_pretrained(path)
    dist.barrier()
    gc.collect()
    size = {"tp_size": RANKS, "tp_plan": "auto"}
    model: Any = AutoModelForCausalLM.from_pretrained(path, distributed_config=DistributedConfig(**size))
    model.config.use_cache = False
    for parameter in model.parameters():  # on a CPU they are views of the whole file
        if hasattr(parameter, "_local_tensor"):
            parameter._local_tensor = parameter._local_tensor.clone()
        else:
            parameter.data = parameter.data.clone()
    gc.collect()
    plain(model, counted, rounds)


def _zero(
    counted: LivingBytes, *, kind: str, rounds: int, zero: dict | None = None, dtype: str = "float32", **_: Any
) -> None:
    library = deepspeed(torch.device("cpu"))
    stage = int(kind[-1])
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": rounds,
        "zero_optimization": {"stage": stage, **ZERO, **(zero or {})},
        "bf16": {"enabled": dtype == "bfloat16"},
    }
    made = library.zero.Init(config_dict_or_path=config) if stage == 3 else contextlib.nullcontext()
    with counted.during("loading"):
        with made:
            model = AutoModelForCausalLM.from_config(described()).to(getattr(torch, dtype))
        engine = engine_of(model, torch.optim.AdamW(model.parameters(), lr=1e-3), config, torch.device("cpu"))
    gc.collect()
    steps(engine, counted, engine.backward, lambda last: engine.step(), rounds)


RUNS: dict[str, Callable[..., None]] = {
    "fsdp2": _fully_shard,
    "tp2": _tensor_parallel,
    **dict.fromkeys(("zero1", "zero2", "zero3"), _zero),
}
