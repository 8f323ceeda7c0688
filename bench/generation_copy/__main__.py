"""`python -m bench.generation_copy`: writing by a copy of the weights, beside writing by the weights themselves.

The model, prompts and completions of `bench.generation`: a llama of 22 million parameters, 8 prompts of 40 to 300
tokens, 4 completions of each, of 8 to 128 tokens, drawn at temperature 1.

- masters: weights in float32, products in bfloat16;
- lora: weights in float32, adapters of rank 16 on all linear layers, merged in the copy;
- qlora: weights in 4 bits, products in float32, adapters likewise.

Each way writes in turn, in one process with one thread; the copy is made and freed in each turn. What counts is the
least processor time of the turns, which depends little on what else the machine does. Exits with 1 where tokens differ,
or their log-probabilities by more than 1e-6, as a relative distance of all of them.
"""

import argparse
import math
import sys
import time
from typing import Any

from rich.console import Console

from bench.generation.contestants import COUNT, MOST, SHAPE, asked
from bench.inputs.shapes import build_model

SUMMARY = "Measure writing by a copy of the weights, beside writing by the weights themselves."
CASES = ("masters", "lora", "qlora")
RANK = 16
NEAR = 1e-6
"""Relative distance of log-probabilities."""


def main(argv: list[str] | None = None) -> int:
    """Measures and prints; returns 1 where the two ways write other tokens."""
    parser = argparse.ArgumentParser(prog="python -m bench.generation_copy", description=SUMMARY)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)} (default: all)")
    parser.add_argument("--turns", type=int, default=3, help="calls of each way (default: 3)")
    options, console = parser.parse_args(argv), Console()
    if unknown := set(options.cases) - set(CASES):
        parser.error(f"{sorted(unknown)[0]!r} is none of {', '.join(CASES)}")
    same = [report(case, options.turns, console) for case in options.cases or CASES]
    return 0 if all(same) else 1


def report(case: str, turns: int, console: Console) -> bool:
    """Measures and prints a case; returns whether both ways wrote the same."""
    own, copied, distance, size = measured(case, turns)
    said = "OTHER TOKENS" if math.isnan(distance) else f"the same tokens, log-probabilities {distance:.1g} apart"
    console.print(
        f"{case}: {own:.2f} s of processor time by the weights, {copied:.2f} s by a copy of {size / 1e6:.0f} MB: "
        f"{own / copied:.2f}x; {said}"
    )
    return distance <= NEAR


def measured(case: str, turns: int) -> tuple[float, float, float, int]:
    """Returns seconds by the weights and by the copy, the relative distance of log-probabilities (NaN where tokens are
    others), and the bytes of the copy."""
    import torch

    from lowtide.engine.weights.generation_copy import GenerationCopy
    from lowtide.rollout.generators.generator import Request, Sampling
    from lowtide.rollout.generators.ragged import RaggedGenerator

    torch.set_num_threads(1)
    model, (prompts, lengths) = prepared(case), asked()
    requests, copy = [Request(prompt, COUNT) for prompt in prompts], GenerationCopy()
    seconds: dict[GenerationCopy | None, list[float]] = {None: [], copy: []}
    written = {}
    for _ in range(turns):
        for way, of_way in seconds.items():
            generator = RaggedGenerator(lengths=lambda request, number: lengths[request * COUNT + number], copy=way)
            began = time.process_time()
            found = generator.generate(model, requests, Sampling(MOST))
            of_way.append(time.process_time() - began)
            tokens = [token for group in found for each in group for token in each.token_ids]
            logprobs = [number for group in found for each in group for number in each.logprobs]
            written[way] = tokens, torch.tensor(logprobs, dtype=torch.float64)
    (own, expected), (copied, close) = written[None], written[copy]
    distance = ((close - expected).norm() / expected.norm()).item() if own == copied else math.nan
    return min(seconds[None]), min(seconds[copy]), distance, copy.bytes_of(model)


def prepared(case: str) -> Any:
    """Returns a model that is ready to write."""
    import torch
    from peft import LoraConfig, get_peft_model

    from lowtide.engine.forward import compute_in, install
    from lowtide.engine.weights.reference_storage import in_4_bits

    torch.manual_seed(0)
    model: Any = build_model(SHAPE)
    if case == "qlora":
        in_4_bits(model, torch.device("cpu"))
    if case != "masters":
        model = get_peft_model(model, LoraConfig(r=RANK, target_modules="all-linear", init_lora_weights=False))
    install(model)
    compute_in(model, torch.bfloat16 if case == "masters" else None)
    return model


if __name__ == "__main__":
    sys.exit(main())
