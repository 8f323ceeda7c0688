"""`python -m bench.conversations`: turns as they are generated, with what rounds have in common computed once.

A chat of 20 rounds under a template that drops the thoughts of earlier rounds, as Qwen3's does. A step of supervised
fine-tuning (llama-22m, one conversation) is timed as a tree of rounds and with whole rounds (`prefix_sharing=False`),
in turn, each in a process of its own; the losses are compared. The peak of the tree is measured and predicted.
Preparing 10,000 conversations of 10 turns is timed beside `turns="whole"`, under a template that keeps all turns, as
that wants. The times want a machine that does nothing else.

Prints each beside its target, records them, and exits with 1 where one is missed.
"""

import statistics
import sys
from typing import Any

from bench.conversations.child import ROUNDS, TALKS, TURNS
from bench.measuring.figures import Figure, measure
from bench.measuring.measure import GIGABYTE
from bench.measuring.processes import run_child
from bench.measuring.results import CONVERSATIONS
from bench.memory.surroundings import ENVIRONMENT

SUMMARY = "Time and measure conversations whose rounds share what they have in common."
NAME = "conversations-llama-22m"
TIMEOUT = 1800
AGAIN = 3
"""Times that each way is timed."""


def main(argv: list[str] | None = None) -> int:
    """Measures, prints and records; returns 1 where a figure misses its target or a run fails."""
    return measure(__doc__, argv, MEASURES, NAME, CONVERSATIONS)


def run(**spec: Any) -> dict[str, Any]:
    return run_child(spec, lambda _: None, TIMEOUT, "bench.conversations.child", ENVIRONMENT)


def step() -> dict[str, Any]:
    """A step with the tree, and with whole rounds."""
    trees, rounds = [], []
    for _ in range(AGAIN):
        trees.append(run(what="train", sharing=True))
        rounds.append(run(what="train", sharing=False))
    seconds = [statistics.median(each["seconds"] for each in runs) for runs in (trees, rounds)]
    tree, whole, ratio = trees[0], rounds[0], seconds[0] / seconds[1]
    apart = abs(tree["loss"] - whole["loss"]) / whole["loss"]
    text = (
        f"{ROUNDS} rounds, {whole['tokens']:,} tokens that become {tree['tokens']:,}: {seconds[0]:.2f} s for "
        f"{seconds[1]:.2f} s, {ratio:.2f}x (target 0.35x); losses differ by {apart:.1e} (target 1e-6)"
    )
    found = {"tokens": tree["tokens"], "whole_tokens": whole["tokens"], "seconds": seconds, "ratio": ratio}
    return {**found, "loss_error": apart, "text": text, "met": ratio <= 0.35 and apart <= 1e-6}


def peak() -> dict[str, Any]:
    """The peak of the tree, of the whole process."""
    measured, predicted = run(what="train", sharing=True)["peak_bytes"], run(what="predict")["peak_bytes"]
    error = predicted / measured - 1
    text = f"{measured / GIGABYTE:.3f} GB, {predicted / GIGABYTE:.3f} GB predicted: {error:+.1%} (target 4%)"
    found = {"measured_bytes": measured, "predicted_bytes": predicted, "error": error}
    return {**found, "text": text, "met": abs(error) <= 0.04}


def preparing() -> dict[str, Any]:
    """The time to prepare many conversations."""
    own, whole = (run(what="prepare", turns=turns)["seconds"] for turns in ("as_generated", "whole"))
    text = (
        f"{TALKS:,} conversations of {TURNS} turns in {own:.1f} s, as whole rows in {whole:.1f} s: "
        f"{own / whole:.2f}x (target 3x)"
    )
    return {"seconds": [own, whole], "ratio": own / whole, "text": text, "met": own <= 3 * whole}


MEASURES: dict[str, Figure] = {"step": step, "peak": peak, "preparing": preparing}


if __name__ == "__main__":
    sys.exit(main())
