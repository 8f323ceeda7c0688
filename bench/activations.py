"""`python -m bench.activations`: what a layer keeps for backward, by checkpointing policy.

Storages are counted, not estimated: those that a forward has made and that are still there when it is over. Half of
the difference between models of four and of two layers is a layer's; from 256 tokens and 128, what of that grows with
the tokens and what does not (under autocast, the weights cast to bfloat16). The vocabulary is small, as the head is
not what is measured. Half a minute on a CPU; recorded nowhere. `--lora` measures adapters of rank 16 on all linear
layers of a bfloat16 base, trained whole and as LoRA-FA. `--budgets` measures compiled layers without checkpointing by
the share that they may keep, which takes a compiler and minutes.
"""

import argparse
import contextlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from torch.multiprocessing.reductions import StorageWeakRef

from bench.inputs.shapes import SHAPES
from lowtide.compat.torch import TorchDispatchMode, tree_leaves

LAYERS = (2, 4)
TOKENS = (128, 256)
TILE, VOCABULARY = 64, 64
CASES = [("none", None), ("none", TILE), ("matmul", None), ("matmul", TILE), ("attention", None), ("full", None)]
"""Policies, "none" being without checkpointing, and the tokens of a tile of the MLP."""
PLAIN, LORA, LORA_FA = "all weights", "LoRA", "LoRA-FA"
RANK = 16


@dataclass(frozen=True)
class Setting:
    """What one forward runs under."""

    shape: str
    policy: str = "none"
    tile: int | None = None
    bf16: bool = False
    trained: str = PLAIN
    budget: float | None = None
    """Of compiled layers; None where they are not compiled."""

    @property
    def name(self) -> str:
        if self.budget is not None:
            return f"compiled, budget {self.budget:g}"
        tiles = "" if self.tile is None else f", MLP in tiles of {self.tile}"
        return self.policy + tiles + ("" if self.trained == PLAIN else f", {self.trained}")


def main(argv: list[str] | None = None) -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(prog="python -m bench.activations", description="What a layer keeps.")
    parser.add_argument("--shape", choices=[*SHAPES], default="qwen2.5-0.5b")
    parser.add_argument("--bf16", action="store_true", help="under bfloat16 autocast")
    parser.add_argument("--lora", action="store_true", help="adapters over a bfloat16 base")
    parser.add_argument("--budgets", type=float, nargs="+", help="compiled layers, by the share that they may keep")
    options, console = parser.parse_args(argv), Console()
    hidden = SHAPES[options.shape].config["hidden_size"]
    for setting in settings(options):
        fewer, more = (layer_bytes(setting, tokens) for tokens in TOKENS)
        slope = (more - fewer) / (TOKENS[1] - TOKENS[0])
        beside = more - slope * TOKENS[1]
        console.print(
            f"{setting.name}: {slope:,.0f} bytes a token and layer, {slope / hidden / 4:.1f} hidden in float32; "
            f"beside them {beside / 1e6:,.1f} MB a layer",
            soft_wrap=True,
        )
    return 0


def settings(options: argparse.Namespace) -> list[Setting]:
    """What is measured."""
    if options.budgets:
        return [Setting(options.shape, bf16=options.bf16, budget=budget) for budget in options.budgets]
    if options.lora:
        ways = [(policy, trained) for policy in ("none", "full") for trained in (LORA, LORA_FA)]
        return [Setting(options.shape, policy, bf16=options.bf16, trained=trained) for policy, trained in ways]
    return [Setting(options.shape, policy, tile, options.bf16) for policy, tile in CASES]


def layer_bytes(setting: Setting, tokens: int) -> float:
    """Bytes that one layer keeps."""
    fewer, more = (kept(setting, layers, tokens) for layers in LAYERS)
    return (more - fewer) / (LAYERS[1] - LAYERS[0])


class Storages(TorchDispatchMode):
    """The storages that operations make."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for each in tree_leaves(out):
            if isinstance(each, torch.Tensor) and each.device.type == "cpu":
                storage = each.untyped_storage()
                self.sizes[StorageWeakRef(storage)] = storage.nbytes()
        return out

    def live(self, model: torch.nn.Module) -> int:
        """Bytes of those that are still there and are not the model's (transposed weights are views of them)."""
        own = {StorageWeakRef(tensor.untyped_storage()) for tensor in (*model.parameters(), *model.buffers())}
        return sum(size for storage, size in self.sizes.items() if storage not in own and not storage.expired())


def kept(setting: Setting, layers: int, tokens: int) -> int:
    """Bytes that one forward leaves for its backward."""
    from lowtide.engine.forward import score
    from lowtide.engine.heads.head import Scores
    from lowtide.ragged import RaggedBatch

    model = made(setting, layers)
    batch = RaggedBatch.from_rows([{"input_ids": [number % VOCABULARY for number in range(tokens)]}])
    scores = Scores(batch.score_index, batch.score_target)
    with torch.autocast("cpu", torch.bfloat16) if setting.bf16 else contextlib.nullcontext():
        if setting.budget is not None:  # no mode may be there where something is compiled
            return saved_bytes(model, lambda: loss_of(score(model, batch, scores)))
        with Storages() as storages:
            output = score(model, batch, scores)
        assert loss_of(output).requires_grad  # and so the graph is still there
        return storages.live(model)


def loss_of(output: Any) -> torch.Tensor:
    return output.scored.sum()


def made(setting: Setting, layers: int) -> Any:
    """The model, ready to be trained."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from lowtide.engine.forward import install
    from lowtide.memory.activations.checkpointing import set_checkpointing
    from lowtide.memory.activations.tiled_mlp import install_tiled_mlp
    from lowtide.memory.kernels.compiling import compile_layers

    sizes = {**SHAPES[setting.shape].config, "vocab_size": VOCABULARY, "num_hidden_layers": layers}
    config = AutoConfig.for_model(**sizes)
    config.layer_types = None if getattr(config, "layer_types", None) is None else config.layer_types[:layers]
    torch.manual_seed(0)
    dtype = torch.float32 if setting.trained == PLAIN else torch.bfloat16
    model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype).train()
    if setting.trained != PLAIN:
        model = adapted(model, setting.trained)
    install(model)
    if setting.policy != "none":
        model.activation_checkpointing_enable({"use_reentrant": False})
        set_checkpointing(model, setting.policy)
    if setting.tile is not None:
        install_tiled_mlp(model, setting.tile)
    if setting.budget is not None:
        compile_layers(model, budget=setting.budget)
    return model


def adapted(model: Any, trained: str) -> Any:
    from peft import LoraConfig, get_peft_model

    from lowtide.memory.optimizers.lora_fa import freeze_down_projections

    model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=RANK, target_modules="all-linear"))
    if trained == LORA_FA:
        freeze_down_projections(model)
    return model


def saved_bytes(model: Any, forward: Callable[[], torch.Tensor]) -> int:
    """Bytes of the storages that a forward saves for backward, without the model's."""
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    held: dict[int, torch.UntypedStorage] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        assert forward().requires_grad
    return sum(storage.nbytes() for storage in held.values())


if __name__ == "__main__":
    sys.exit(main())
