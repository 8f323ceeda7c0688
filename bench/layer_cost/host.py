"""What the host does for a layer: seconds of one thread, of a layer so small that computing takes next to nothing."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch

LAYERS, RANK = 24, 4
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
ROWS = [8] * 4
WARM, TURNS = 4, 24


def host_cost(adapters: bool) -> dict[str, float]:
    """Times checkpointed steps of a small Qwen2 as transformers and PEFT have it and with fused layers, in turns.

    Args:
        adapters: low-rank adapters on all linear layers; else all weights are trained.

    Returns:
        `milliseconds_stock` and `milliseconds_fused`, CPU time a layer, forward, recomputation and backward, the least
        of some turns; `ratio`. Triton's launches are left out: on a GPU each takes the host some 20 microseconds more.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with _without_launches():
            steps = {"stock": _step(adapters, False), "fused": _step(adapters, True)}
            least = dict.fromkeys(steps, float("inf"))
            for turn in range(WARM + TURNS):
                for name, step in steps.items():
                    start = time.process_time()
                    step()
                    if turn >= WARM:
                        least[name] = min(least[name], time.process_time() - start)
    finally:
        torch.set_num_threads(threads)
    found = {f"milliseconds_{name}": 1e3 * seconds / LAYERS for name, seconds in least.items()}
    return found | {"ratio": least["fused"] / least["stock"]}


@contextlib.contextmanager
def _without_launches() -> Iterator[None]:
    """Fused layers as on a GPU, whose kernels are not launched."""
    from lowtide.ops.layers import layer_kernels

    with (
        patch.object(layer_kernels, "uses_kernels", lambda x: True),
        patch.object(layer_kernels, "launch", lambda *args, **values: None),
    ):
        yield


def _step(adapters: bool, fused: bool) -> Callable[[], None]:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    from lowtide.engine.forward import causal_model, install, score
    from lowtide.memory.activations.checkpointing import set_checkpointing
    from lowtide.memory.kernels import fused_layers
    from lowtide.ragged import RaggedBatch

    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen2", **SIZES)).train()
    if adapters:
        model = get_peft_model(model, LoraConfig(r=RANK, target_modules="all-linear"))
    install(model)
    causal_model(model).gradient_checkpointing_enable({"use_reentrant": False})
    set_checkpointing(model)
    if fused:
        with patch.object(fused_layers, "_why_unlike", lambda layer, dtype: None):  # its numbers are none here
            fused_layers.fuse_layers(model)
    batch = RaggedBatch.from_segments([[5] * length for length in ROWS])
    parameters = [*model.parameters()]

    def step() -> None:
        (-score(model, batch).scored.mean()).backward()
        for parameter in parameters:
            parameter.grad = None

    return step
