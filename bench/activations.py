"""`python -m bench.activations`: what a layer keeps for backward, by checkpointing policy.

Storages are counted, not estimated: those that a forward has made and that are still there when it is over. Half of
the difference between models of four and of two layers is a layer's; from 256 tokens and 128, what of that grows with
the tokens and what does not (under autocast, the weights cast to bfloat16). The vocabulary is small, as the head is
not what is measured. Half a minute on a CPU; recorded nowhere.
"""

import argparse
import contextlib
import sys

import torch
from rich.console import Console
from torch.multiprocessing.reductions import StorageWeakRef

from bench.shapes import SHAPES
from lowtide.compat.torch import TorchDispatchMode, tree_leaves

LAYERS = (2, 4)
TOKENS = (128, 256)
TILE, VOCABULARY = 64, 64
CASES = [("none", None), ("none", TILE), ("matmul", None), ("matmul", TILE), ("attention", None), ("full", None)]
"""Policies, "none" being without checkpointing, and the tokens of a tile of the MLP."""


def main(argv: list[str] | None = None) -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(prog="python -m bench.activations", description="What a layer keeps.")
    parser.add_argument("--shape", choices=[*SHAPES], default="qwen2.5-0.5b")
    parser.add_argument("--bf16", action="store_true", help="under bfloat16 autocast")
    options, console = parser.parse_args(argv), Console()
    hidden = SHAPES[options.shape].config["hidden_size"]
    for policy, tile in CASES:
        fewer, more = (layer_bytes(options.shape, tokens, policy, tile, options.bf16) for tokens in TOKENS)
        slope = (more - fewer) / (TOKENS[1] - TOKENS[0])
        beside = more - slope * TOKENS[1]
        name = policy if tile is None else f"{policy}, MLP in tiles of {tile}"
        console.print(
            f"{name}: {slope:,.0f} bytes a token and layer, {slope / hidden / 4:.1f} hidden in float32; "
            f"beside them {beside / 1e6:,.1f} MB a layer",
            soft_wrap=True,
        )
    return 0


def layer_bytes(shape: str, tokens: int, policy: str, tile: int | None, bf16: bool) -> float:
    """Bytes that one layer keeps."""
    fewer, more = (kept(shape, layers, tokens, policy, tile, bf16) for layers in LAYERS)
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


def kept(shape: str, layers: int, tokens: int, policy: str, tile: int | None, bf16: bool) -> int:
    """Bytes that one forward leaves for its backward."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from lowtide.engine.forward import install, score
    from lowtide.engine.heads.head import Scores
    from lowtide.memory.activations.checkpointing import set_checkpointing
    from lowtide.memory.activations.tiled_mlp import install_tiled_mlp
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
    batch = RaggedBatch.from_rows([{"input_ids": [number % VOCABULARY for number in range(tokens)]}])
    with torch.autocast("cpu", torch.bfloat16) if bf16 else contextlib.nullcontext():
        with Storages() as storages:
            output = score(model, batch, Scores(batch.score_index, batch.score_target))
        assert output.logprobs.requires_grad  # and so the graph is still there
        return storages.live(model)


if __name__ == "__main__":
    sys.exit(main())
