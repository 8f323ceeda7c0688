"""`python -m bench.vocabulary`: the peak of a DPO step does not depend on the vocabulary, beyond the weights.

The same rows, token ids below 32,000, train llama-22m with a vocabulary of 32,000 and of 256,000, each in a process
of its own, and the resident peak of one step is taken. From it go what the imports held, and the states: weights,
gradients and AdamW's two moments of the policy and the weights of the reference. What is left are activations, the
head's working memory and the process's own; logits of such a batch would be hundreds of times as large.
"""

import argparse
import sys
from typing import Any

from rich.console import Console

from bench.cases import CASES
from bench.measure import GIGABYTE, hardware
from bench.processes import ChildFailed, run_child
from bench.results import VOCABULARY, versions, write
from bench.tables import VOCABULARY_TARGET, vocabulary_verdict
from bench.tokenizer import tokenizer_for

VOCABULARIES = (32_000, 256_000)


def main(argv: list[str] | None = None) -> int:
    """Measures, prints and records; returns 1 where the target is missed."""
    options, console = parse(argv), Console()
    try:
        runs = [measure(vocabulary, options, console) for vocabulary in VOCABULARIES]
    except ChildFailed as failure:
        console.print(f"[red]failed: {failure.reason}[/]")
        console.print("\n".join(failure.last_lines), markup=False, highlight=False)
        return 1
    console.print(vocabulary_verdict(runs))
    if options.record:
        results = {"kind": VOCABULARY, "runs": runs, "hardware": hardware("cpu"), "versions": versions()}
        console.print(f"recorded in {write('vocabulary-dpo-llama', results)}")
    return 0 if runs[-1]["above_states_bytes"] <= VOCABULARY_TARGET * runs[0]["above_states_bytes"] else 1


def measure(vocabulary: int, options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Returns what a child measured with one vocabulary, and prints it."""
    tokenizer = tokenizer_for(CASES["dpo"]["longtail"].rows())
    spec = {"vocabulary": vocabulary, "tokenizer": str(tokenizer)}
    with console.status(f"vocabulary {vocabulary:,}"):
        run = run_child(spec, lambda step: None, options.timeout, module="bench.vocabulary_child")
    states, above = run["states_bytes"] / GIGABYTE, run["above_states_bytes"] / GIGABYTE
    console.print(f"vocabulary {vocabulary:,}: states {states:.3f} GB, the step's peak beside them {above:.3f} GB")
    return run


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.vocabulary", description=__doc__.splitlines()[0])
    parser.add_argument("--timeout", type=float, default=1800, help="seconds after which one run is given up")
    parser.add_argument("--no-record", dest="record", action="store_false", help="print only")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
