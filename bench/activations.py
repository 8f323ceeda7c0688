"""`python -m bench.activations`: what a layer keeps for backward, by checkpointing policy.

Storages are counted, not estimated: those that a forward has made and that are still there when it is over, for models
of two and of four layers of a shape. Half of the difference is a layer's. The vocabulary is small, as the head is not
what is measured. A few seconds on a CPU; recorded nowhere.
"""

import argparse
import sys

import torch
from rich.console import Console
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bench.shapes import SHAPES

TOKENS, TILE, VOCABULARY = 256, 64, 64
FEW, MORE = 2, 4
"""Layers."""


def main(argv: list[str] | None = None) -> int:
    """Measures and prints, in numbers a token."""
    parser = argparse.ArgumentParser(prog="python -m bench.activations", description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=[*SHAPES], default="qwen2.5-0.5b")
    options, console = parser.parse_args(argv), Console()
    hidden = SHAPES[options.shape].config["hidden_size"]
    for policy in ("none", "matmul", "attention", "full"):
        for tile in (None, TILE):
            layer = (kept(options.shape, MORE, policy, tile) - kept(options.shape, FEW, policy, tile)) / (MORE - FEW)
            numbers = layer / TOKENS / 4
            tiled = f", MLP in tiles of {tile}" if tile else ""
            console.print(f"{policy}{tiled}: {numbers:,.0f} numbers a token and layer, {numbers / hidden:.1f} hidden")
    return 0


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


def kept(shape: str, layers: int, policy: str, tile: int | None) -> int:
    """Bytes that one forward of `TOKENS` tokens leaves for its backward; "none" is without checkpointing."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from lowtide.engine.forward import install, score
    from lowtide.engine.head import Scores
    from lowtide.memory.checkpointing import set_checkpointing
    from lowtide.memory.tiled_mlp import install_tiled_mlp
    from lowtide.ragged import RaggedBatch

    sizes = {**SHAPES[shape].config, "vocab_size": VOCABULARY, "num_hidden_layers": layers}
    config = AutoConfig.for_model(**sizes)
    config.layer_types = None if getattr(config, "layer_types", None) is None else config.layer_types[:layers]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).train()
    install(model)
    if policy != "none":
        model.activation_checkpointing_enable({"use_reentrant": False})
        set_checkpointing(model, policy)
    if tile is not None:
        install_tiled_mlp(model, tile)
    batch = RaggedBatch.from_rows([{"input_ids": [number % VOCABULARY for number in range(TOKENS)]}])
    with Storages() as storages:
        output = score(model, batch, Scores(batch.score_index, batch.score_target))
    live = storages.live(model)
    assert output.logprobs is not None
    return live


if __name__ == "__main__":
    sys.exit(main())
