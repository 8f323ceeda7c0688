"""The small run that shows what a training process holds beside tensors; `lowtide.planner.process` runs it.

Given an engine, it is one of two ranks, which meet on this machine: an engine brings libraries, threads and buffers.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import tempfile
from typing import Any

from lowtide.python_process import python_calling

RANKS = 2
ENGINES: dict[str, dict[str, Any]] = {
    "ddp": {},
    "fsdp2": {"fsdp": True},
    "deepspeed": {"deepspeed": {"zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"}}},
}
"""The options of each."""

SIZES: dict[str, Any] = {
    "vocab_size": 4_000,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}
ROWS, TOKENS = 4, 256


def small_run(folder: str, adapters: bool, engine: str = "") -> dict[str, Any]:
    """Config, model description, rows and adapters of the run that is measured."""
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import LlamaConfig

    from lowtide import SFTConfig

    config = SFTConfig(
        output_dir=folder,
        max_steps=2,
        per_device_train_batch_size=ROWS,
        max_length=TOKENS,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        **ENGINES.get(engine, {}),
    )
    rows = [{"input_ids": list(range(1, TOKENS + 1))} for _ in range(4 * ROWS)]
    peft_config = LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM") if adapters else None
    return {
        "config": config,
        "described": LlamaConfig(**SIZES),
        "dataset": Dataset.from_list(rows),
        "peft_config": peft_config,
    }


def peak_of_training(adapters: bool, engine: str) -> int:
    """Trains the small model in this process; returns its peak in bytes."""
    import torch
    from transformers import AutoModelForCausalLM

    from lowtide import SFTTrainer
    from lowtide.demo.model import make_tokenizer
    from lowtide.memory.allocators import host_heap
    from lowtide.memory.allocators.measure import peak_resident_bytes

    # without holes, what is beside tensors is the process
    host_heap.LARGE, host_heap.TRIM_ABOVE, host_heap.NEAR = 0, 1 << 20, 1.0
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        run = small_run(folder, adapters, engine)
        SFTTrainer(
            AutoModelForCausalLM.from_config(run["described"]),
            args=run["config"],
            train_dataset=run["dataset"],
            processing_class=make_tokenizer(),
            peft_config=run["peft_config"],
        ).train()
        return peak_resident_bytes()


def predicted_bytes(adapters: bool, engine: str) -> int:
    """What is predicted of its tensors."""
    from lowtide.demo.model import make_tokenizer
    from lowtide.memory.allocators import host_heap
    from lowtide.planner.devices import device_named
    from lowtide.planner.estimate import estimate_run
    from lowtide.planner.tracing.fake_run import FakeRun
    from lowtide.run.options.configs import method_of
    from lowtide.run.options.sharding import sharding_of

    host_heap.LARGE, host_heap.TRIM_ABOVE, host_heap.NEAR = 0, 1 << 20, 1.0
    with tempfile.TemporaryDirectory() as folder:
        run = small_run(folder, adapters, engine)
        traced = FakeRun(method_of(run["config"]), **run, processing_class=make_tokenizer())
        sharding = sharding_of(run["config"], RANKS) if engine else None
        return estimate_run(traced, device_named("cpu"), sharding=sharding, beside=0).peak_bytes


def peak_of_ranks(adapters: bool, engine: str) -> int:
    """The peak of the rank that holds most, of two that train the small model together."""
    from lowtide.compat.launching import LOOPBACK, store_of_this_machine

    store = store_of_this_machine()
    command = python_calling(__name__, "tell", "--engine", engine, *(["--adapters"] if adapters else []))
    shared = {"WORLD_SIZE": str(RANKS), "LOCAL_SIZE": str(RANKS), "MASTER_ADDR": LOOPBACK}
    shared |= {"MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    shared |= {"DS_ACCELERATOR": "cpu", "ACCELERATE_USE_CPU": "true"}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "text": True}
    ranks = [
        subprocess.Popen(command, env=os.environ | shared | {"RANK": str(n), "LOCAL_RANK": str(n)}, **pipes)
        for n in range(RANKS)
    ]
    try:
        return max(int(rank.communicate()[0].split()[-1]) for rank in ranks)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def main() -> int:
    """What the process held beside tensors, in bytes; a rank says its peak."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--adapters", action="store_true")
    parser.add_argument("--engine", choices=ENGINES, default="")
    options = parser.parse_args()
    given = options.adapters, options.engine
    if "RANK" in os.environ:
        return peak_of_training(*given)
    peak = peak_of_ranks(*given) if options.engine else peak_of_training(*given)
    return peak - predicted_bytes(*given)


def tell() -> None:
    """Prints it: how a process that runs this is asked."""
    print(main(), flush=True)
