"""`python -m bench.generation`: how fast completions are written, beside transformers.

A llama of 22 million parameters in float32, 8 prompts of 40 to 300 tokens, 4 completions of each, of 8 to 128 tokens.
Each contestant writes completions of the same lengths, which a hook sets: a model with random weights never comes to an
end by itself.
Contestants take turns in one process, so that a machine that slows down slows all. Tokens/s are those of completions
over the time of the whole call, prompts included; medians of the turns. Continuous batching is compared on completions
of 8 tokens at most, in one turn. lowtide's own generator gives log-probabilities
with the tokens, transformers' gives tokens alone.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console

from bench.measure import hardware
from bench.results import GENERATION, versions, write
from bench.shapes import Shape, build_model

SUMMARY = "Measure how fast completions are written, beside transformers."
PROMPTS, COUNT, MOST, FEWEST = 8, 4, 128, 8
PROMPT_LENGTHS = (40, 300)
OURS, GENERATE, CONTINUOUS = "lowtide", "transformers generate", "transformers continuous batching"
SHAPE = Shape(
    {
        "model_type": "llama",
        "vocab_size": 32_000,
        "hidden_size": 384,
        "intermediate_size": 1024,
        "num_hidden_layers": 6,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
        "max_position_embeddings": 2048,
    },
    device="cpu",
    dtype="float32",
)
"""22 million parameters, with heads of 64."""
SAMPLED, GREEDY, SHORT = "sampled", "greedy", "sampled, short"
SHORT_MOST = 8
"""Tokens of a completion beside continuous batching, which takes seconds for each on a CPU."""
TARGETS = {(SAMPLED, GENERATE): 2.5, (GREEDY, GENERATE): 2.0, (SHORT, CONTINUOUS): 6.0}
"""How many times another's tokens a second lowtide is to write."""

Write = Callable[[float], int]
"""Writes all completions at a temperature; returns how many tokens they have."""


def main(argv: list[str] | None = None) -> int:
    """Measures, prints and records; returns 1 where a target is missed."""
    options, console = parse(argv), Console()
    runs = measure(options, console)
    reached = [report(runs, way, other, target, console) for (way, other), target in TARGETS.items()]
    if options.record:
        results = {"kind": GENERATION, "runs": runs, "hardware": hardware("cpu"), "versions": versions()}
        console.print(f"recorded in {write('generation-llama-22m', results)}")
    return 0 if all(reached) else 1


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.generation", description=SUMMARY)
    parser.add_argument("--turns", type=int, default=5, help="calls of each contestant (default: 5)")
    parser.add_argument(
        "--without-continuous", action="store_true", help="leave continuous batching out, which is slow"
    )
    parser.add_argument("--no-record", dest="record", action="store_false", help="print only")
    return parser.parse_args(argv)


def measure(options: argparse.Namespace, console: Console) -> list[dict[str, Any]]:
    """Returns the tokens a second of each contestant, sampled and greedy, by turn."""
    prompts, lengths = asked()
    short = [min(length, SHORT_MOST) for length in lengths]
    both = {OURS: ours(prompts, lengths), GENERATE: generate(prompts, lengths)}
    runs = [*turns_of(SAMPLED, both, sum(lengths), options.turns), *turns_of(GREEDY, both, sum(lengths), options.turns)]
    if not options.without_continuous:
        both = {OURS: ours(prompts, short), CONTINUOUS: continuous(prompts, short)}
        runs += turns_of(SHORT, both, sum(short), 1)
    for run in runs:
        console.print(f"{run['way']}: {run['contestant']}: {run['tokens_per_second']:,.1f} tokens/s")
    return runs


def turns_of(way: str, contestants: dict[str, Write], tokens: int, turns: int) -> list[dict[str, Any]]:
    """Returns the tokens a second of each contestant; the first turn, which warms up, does not count."""
    rates: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(turns + 1):
        for name, write_all in contestants.items():
            if name == CONTINUOUS and rates[CONTINUOUS]:
                continue
            began = time.perf_counter()
            written = write_all(0.0 if way == GREEDY else 1.0)
            rates[name].append(tokens / (time.perf_counter() - began))
            assert written == tokens, f"{name} wrote {written} tokens, not {tokens}"
    kept = {name: each[1:] or each for name, each in rates.items()}
    return [
        {"way": way, "contestant": name, "tokens_per_second": statistics.median(each), "turns": each}
        for name, each in kept.items()
    ]


def report(runs: list[dict[str, Any]], way: str, other: str, target: float, console: Console) -> bool:
    """Prints how many times another's rate lowtide has; returns whether that is the target."""
    rates = {run["contestant"]: run["tokens_per_second"] for run in runs if run["way"] == way}
    if other not in rates:
        return True
    ratio = rates[OURS] / rates[other]
    verdict = "reached" if ratio >= target else "NOT reached"
    console.print(f"{way}: {ratio:.2f} times {other}, target {target:.1f}: {verdict}")
    return ratio >= target


def asked() -> tuple[list[list[int]], list[int]]:
    """Returns the prompts, and the tokens of each completion, a prompt's one after the other."""
    import torch

    generator = torch.Generator().manual_seed(0)

    def draw(low: int, high: int, size: int) -> list[int]:
        return torch.randint(low, high, (size,), generator=generator).tolist()

    prompts = [draw(3, 32_000, length) for length in draw(*PROMPT_LENGTHS, PROMPTS)]
    return prompts, [*draw(FEWEST, MOST, PROMPTS * COUNT - 1), MOST]


def ours(prompts: list[list[int]], lengths: list[int]) -> Write:
    """lowtide's own generator."""
    from lowtide.engine.forward import install
    from lowtide.rollout.generators.generator import Request, Sampling
    from lowtide.rollout.generators.ragged import RaggedGenerator

    model = build_model(SHAPE)
    install(model)
    generator = RaggedGenerator(lengths=lambda request, number: lengths[request * COUNT + number])
    requests = [Request(prompt, COUNT) for prompt in prompts]

    def write_all(temperature: float) -> int:
        found = generator.generate(model, requests, Sampling(MOST, temperature=temperature))
        return sum(len(each.token_ids) for group in found for each in group)

    return write_all


def generate(prompts: list[list[int]], lengths: list[int]) -> Write:
    """transformers' `generate`, all rows at once, padded on the left."""
    import torch
    from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList

    model = build_model(SHAPE).eval()
    width, ends = max(len(prompt) for prompt in prompts), torch.tensor(lengths)
    input_ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts]).repeat_interleave(COUNT, 0)
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])

    class Lengths(StoppingCriteria):
        def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
            return ends <= input_ids.shape[1] - width

    def write_all(temperature: float) -> int:
        config = GenerationConfig(max_new_tokens=MOST, pad_token_id=0, eos_token_id=None, **drawing(temperature))
        found = model.generate(
            input_ids=input_ids,
            attention_mask=mask.repeat_interleave(COUNT, 0),
            generation_config=config,
            stopping_criteria=StoppingCriteriaList([Lengths()]),
        )
        return sum(min(length, found.shape[1] - width) for length in lengths)

    model.generation_config = GenerationConfig()
    return write_all


def drawing(temperature: float) -> dict[str, Any]:
    """Returns the options under which `generate` draws from the whole distribution, or takes the likeliest."""
    if temperature == 0:
        return {"do_sample": False}
    return {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}


def continuous(prompts: list[list[int]], lengths: Sequence[int]) -> Write:
    """transformers' continuous batching."""
    from transformers import GenerationConfig

    model = build_model(SHAPE).eval()
    model.generation_config = GenerationConfig()

    def write_all(temperature: float) -> int:
        config = GenerationConfig(max_new_tokens=MOST, pad_token_id=0, eos_token_id=-1, **drawing(temperature))
        tokens = 0
        with model.continuous_batching_context_manager(generation_config=config, block=True) as manager:
            for number, length in enumerate(lengths):
                manager.add_request(prompts[number // COUNT], max_new_tokens=length)
            for _ in lengths:
                found = manager.get_result(timeout=300)
                assert found is not None, "continuous batching gave no result within 300 seconds"
                tokens += len(found.generated_tokens)
        return tokens

    return write_all


if __name__ == "__main__":
    sys.exit(main())
