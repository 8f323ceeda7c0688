"""`python -m bench.vocabulary`: the peak of a DPO step does not depend on the vocabulary, beyond the weights.

The same rows, token ids below 32,000, train llama-22m with a vocabulary of 32,000 and of 256,000, each in a process
of its own. The states are set aside: weights, gradients and AdamW's two moments of the policy, and the weights of the
reference. What tensors hold beyond them at one time is activations and the head's working memory, and is compared.
The resident peak, less the states and what the imports held, is printed too; it also holds what freed tensors leave
in the heap, which differs from run to run.
"""

import argparse
import sys
from typing import Any

from rich.console import Console

from bench.compare.tables import growth, vocabulary_verdict
from bench.inputs.rows import CASES
from bench.inputs.tokenizer import tokenizer_for
from bench.measuring.measure import GIGABYTE, hardware
from bench.measuring.processes import ChildFailed, run_child
from bench.measuring.results import VOCABULARY, versions, write

SUMMARY = "Show that the peak of a DPO step does not depend on the vocabulary, beyond the weights."
VOCABULARIES = (32_000, 256_000)


def main(argv: list[str] | None = None) -> int:
    """Measures, prints and records; returns 1 where a run fails or the target is missed."""
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
    return 0 if growth(runs)[1] else 1


def measure(vocabulary: int, options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Returns what a child measured with one vocabulary, and prints it."""
    tokenizer = tokenizer_for(CASES["dpo"]["longtail"].rows())
    spec = {"vocabulary": vocabulary, "tokenizer": str(tokenizer)}
    with console.status(f"vocabulary {vocabulary:,}"):
        run = run_child(spec, lambda step: None, options.timeout, module="bench.vocabulary.child")
    states, tensors, resident = (
        f"{run[f'{key}_bytes'] / GIGABYTE:.3f} GB"
        for key in ("states", "tensors_above_states", "resident_above_states")
    )
    console.print(f"vocabulary {vocabulary:,}: states {states}, tensors beside them {tensors} (resident {resident})")
    return run


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.vocabulary", description=SUMMARY)
    parser.add_argument("--timeout", type=float, default=1800, help="seconds after which one run is given up")
    parser.add_argument("--no-record", dest="record", action="store_false", help="print only")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
