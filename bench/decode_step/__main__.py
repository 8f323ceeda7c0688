"""`python -m bench.decode_step CASE`: what writing one token of each completion asks of a GPU, without one.

lowtide's own generator writes with a model on the meta device, which has shapes and no values, and chooses its
kernels as on an H100: 8 prompts of 200 tokens, 8 completions of each, bfloat16, at temperature 1. Three layers are
run, and the one in the middle stands for all others. Counted are the kernels of a token of all completions
(operations that are neither views nor only take memory), those of a layer, and how often the host reads the device or
copies memory to it: medians of the tokens 2 to 12. `capturable` says whether a CUDA graph could replay a step, as two
neighbouring ones are alike; if not, `reason` says why.
"""

import argparse
import json
import statistics
import sys
from collections import Counter
from typing import Any, NamedTuple
from unittest.mock import patch

from bench.inputs.hybrid import ATTENTION, HYBRID, RECURRENT

SUMMARY = "Count what a decode step asks of a GPU: kernels, and how often the host waits for it."
PROMPTS, COUNT, PROMPT_TOKENS, TOKENS = 8, 8, 200, 12
TRACED_LAYERS = 3
PAIR = 4
"""The first of the steps that are compared."""
RANK = 16


class Case(NamedTuple):
    """A model, and what is beside its weights."""

    model: str | dict[str, Any]
    """A name that lowtide has the shape of, or what `AutoConfig.for_model` takes."""
    adapters: bool = False


QWEN, LLAMA = "Qwen/Qwen2.5-1.5B", "meta-llama/Llama-3.1-8B"
CASES = {
    "qwen-1.5b": Case(QWEN),
    "qwen-1.5b-lora": Case(QWEN, adapters=True),
    "llama-8b": Case(LLAMA),
    "llama-8b-lora": Case(LLAMA, adapters=True),
    "hybrid-attention-lora": Case(HYBRID | ATTENTION, adapters=True),
    "hybrid-recurrent-lora": Case(HYBRID | RECURRENT, adapters=True),
}
"""The last two have the attention layers of a hybrid alone, and its recurrent layers."""


def decode_step(name: str, *, fused: bool = True, merged: bool = False, **sampling: Any) -> dict[str, Any]:
    """Counts a case.

    Args:
        name: of `CASES`.
        fused: layers run as one function each, as they do on a GPU; else as transformers and PEFT have them.
        merged: adapters are merged into a copy of the weights, by which is written (`generation_weights="merged"`).
        sampling: how tokens are drawn, as `Sampling` takes it.

    Returns:
        `kernels_per_layer`, `kernels` (of all layers and the rest), `host_reads`, `host_copies`, `capturable` and,
        where it is not, `reason`.
    """
    import torch

    from lowtide.engine.weights.generation_copy import GenerationCopy
    from lowtide.ops.capture import Watch, difference
    from lowtide.ops.layers import layer_kernels
    from lowtide.ops.target import planning_for
    from lowtide.planner.tracing.substitutes.stand_ins import pass_over_layer
    from lowtide.rollout.generators.decoding import Decoder
    from lowtide.rollout.generators.generator import Request, Sampling
    from lowtide.rollout.generators.ragged import RaggedGenerator

    model, layers = _model(CASES[name], fused)
    kernels = Kernels(model.model.layers[1])
    requests = [Request([5 + number] * PROMPT_TOKENS, COUNT) for number in range(PROMPTS)]
    make = Decoder.step
    with planning_for("cuda", (9, 0)), Watch(torch.device("meta"), kernels.see) as watch:

        def step(decoder: Decoder, whole: bool = False) -> None:
            watch.begin()
            kernels.begin()
            make(decoder, whole)

        with patch.object(Decoder, "step", step), patch.object(layer_kernels, "launch", pass_over_layer):
            copy = GenerationCopy(merges=True) if merged else None
            RaggedGenerator(copy=copy).generate(model, requests, Sampling(TOKENS, **sampling))
    steps = watch.steps[1 - TOKENS :]
    per_layer, rest = (
        statistics.median_low(each[part] for each in kernels.steps[1 - TOKENS :]) for part in (True, False)
    )
    reason = difference(*steps[PAIR : PAIR + 2])
    return {
        "kernels_per_layer": per_layer,
        "kernels": rest - (TRACED_LAYERS - 1) * per_layer + layers * per_layer,
        "host_reads": statistics.median_low(len(each.host_reads) for each in steps),
        "host_copies": statistics.median_low(len(each.host_copies) for each in steps),
        "capturable": reason is None,
    } | ({} if reason is None else {"reason": reason})


class Kernels:
    """Counts the kernels of each step: those of a layer, and all others.

    Args:
        layer: of which the first are.
    """

    def __init__(self, layer: Any):
        self.steps: list[Counter[bool]] = []
        self.inside = False
        layer.register_forward_pre_hook(lambda *_: self._enter(True))
        layer.register_forward_hook(lambda *_: self._enter(False))
        self.begin()

    def begin(self) -> None:
        """What comes is of a further step."""
        self.steps.append(Counter())

    def see(self, func: Any, args: Any, out: Any, kwargs: Any) -> None:
        """Takes an operation, which is no kernel where nothing is computed or moved."""
        from lowtide.planner.speed import computes

        if computes(func, args, out, kwargs):
            self.steps[-1][self.inside] += 1

    def _enter(self, inside: bool) -> None:
        self.inside = inside


def _model(case: Case, fused: bool) -> tuple[Any, int]:
    """On the meta device, prepared to write, with `TRACED_LAYERS` of its layers; and how many it has."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    from lowtide.engine.forward import install
    from lowtide.memory.kernels.fused_layers import fuse_layers
    from lowtide.ops.capture import Watch
    from lowtide.planner.answers.known_models import known_config

    named = case.model
    described = known_config(named) if isinstance(named, str) else AutoConfig.for_model(**named)
    assert described is not None
    layers, described.num_hidden_layers = described.num_hidden_layers, TRACED_LAYERS
    if (kinds := getattr(described, "layer_types", None)) is not None:
        described.layer_types = kinds[:TRACED_LAYERS]
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(described, dtype=torch.bfloat16)
        if case.adapters:
            adapters = LoraConfig(task_type="CAUSAL_LM", r=RANK, target_modules="all-linear")
            get_peft_model(model, adapters, autocast_adapter_dtype=False).to(torch.bfloat16)
    with Watch(torch.device("meta")):  # which answers what is asked of weights
        install(model)
        if fused:
            fuse_layers(model)
    return model, layers


def main(argv: list[str] | None = None) -> int:
    """Counts and prints."""
    parser = argparse.ArgumentParser(prog="python -m bench.decode_step", description=SUMMARY)
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--stock", action="store_true", help="layers as transformers and PEFT have them, not fused")
    parser.add_argument("--merged", action="store_true", help="write by a copy of the weights with adapters merged")
    parser.add_argument("--json", action="store_true", help="print one object")
    options = parser.parse_args(argv)
    found = decode_step(options.case, fused=not options.stock, merged=options.merged)
    if options.json:
        print(json.dumps(found))
    else:
        for figure, value in found.items():
            print(f"{figure} {value}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
