"""`python -m bench.front_door.evaluation`: what `lowtide evaluate --tasks` costs beside lm-eval's Hugging Face backend.

Questions of lm-eval's kind, each a context and four choices of unequal lengths, short contexts and long ones, for a
llama of 3 layers with random weights on a CPU. Every backend scores all of them through lm-eval's own
`loglikelihood`, in turns in one process on one thread: lowtide's, and lm-eval's at several batch sizes, of which the
best counts. Of each the fastest turn counts. Seconds are the processor's, which other processes do not lengthen; those
on the clock stand beside them. The log-probabilities are compared, and so is which choice is likeliest. Needs
lowtide[eval].
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table

from bench.inputs.generated import word_source
from bench.inputs.tokenizer import load_tokenizer, tokenizer_for
from bench.measuring.measure import hardware
from bench.measuring.results import EVALUATION, versions, write

SUMMARY = "Measure what lm-eval's questions cost on lowtide's backend and on lm-eval's own."
OURS = "lowtide"
QUESTIONS, CHOICES = 100, 4
BATCHES = (1, 8, 32)
TURNS = 3
TOKENS_PER_BATCH = 4096
CLOSE = 1e-4
"""Nats by which log-probabilities may differ."""
CONFIG: dict[str, Any] = {
    **{"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 3, "num_attention_heads": 8},
    **{"num_key_value_heads": 4, "max_position_embeddings": 4096},
}


class Lengths(NamedTuple):
    """Words of contexts and of choices, at least and at most."""

    contexts: tuple[int, int]
    choices: tuple[int, int]
    target: float
    """How many times lowtide's processor seconds lm-eval's best are to be."""


CASES = {"short": Lengths((8, 40), (1, 24), 1.7), "long": Lengths((100, 400), (1, 24), 2.3)}


def main(argv: list[str] | None = None) -> int:
    """Measures, prints and records; returns 1 where a target is missed."""
    import torch

    options, console = parse(argv), Console()
    torch.set_num_threads(1)
    runs = [run for name in CASES for run in measured(name, options.questions, options.turns)]
    console.print(table(runs))
    reached = [report(runs, name, lengths.target, console) for name, lengths in CASES.items()]
    if options.record:
        found = {"kind": EVALUATION, "questions": options.questions, "runs": runs}
        place = write("evaluation-llama", found | {"hardware": hardware("cpu"), "versions": versions()})
        console.print(f"recorded in {place}")
    return 0 if all(reached) else 1


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.front_door.evaluation", description=SUMMARY)
    parser.add_argument("--questions", type=int, default=QUESTIONS, help=f"of each case (default: {QUESTIONS})")
    parser.add_argument("--turns", type=int, default=TURNS, help=f"of which the fastest counts (default: {TURNS})")
    parser.add_argument("--no-record", dest="record", action="store_false", help="print only")
    return parser.parse_args(argv)


def asked(lengths: Lengths, count: int) -> list[tuple[str, str]]:
    """(context, choice) of so many questions, four of each."""
    rng = random.Random(51)
    draw = word_source(rng)
    found = []
    for _ in range(count):
        context = " ".join(draw(rng.randint(*lengths.contexts)))
        found += [(context, " " + " ".join(draw(rng.randint(*lengths.choices)))) for _ in range(CHOICES)]
    return found


def measured(case: str, count: int, turns: int) -> list[dict[str, Any]]:
    """What each backend takes for the questions of a case, and how far it is from lowtide's numbers."""
    pairs = asked(CASES[case], count)
    requests = [SimpleNamespace(args=pair) for pair in pairs]
    taking = backends(pairs)
    spent, found = dict[str, list[tuple[float, float]]](), dict[str, list[tuple[float, bool]]]()
    for _ in range(turns):
        for name, backend in taking.items():
            processor, clock = time.process_time(), time.perf_counter()
            found[name] = backend.loglikelihood(requests, disable_tqdm=True)
            spent.setdefault(name, []).append((time.process_time() - processor, time.perf_counter() - clock))
    runs = []
    for name, theirs in found.items():
        processor, clock = min(spent[name])
        run = {"case": case, "backend": name, "processor_seconds": processor, "seconds": clock, "turns": turns}
        run["difference"] = max(abs(a - b) for (a, _), (b, _) in zip(found[OURS], theirs, strict=True))
        run["same_choices"] = sum(map(int.__eq__, chosen(found[OURS]), chosen(theirs)))
        runs.append(run)
    return runs


def chosen(answers: list[tuple[float, bool]]) -> list[int]:
    """Of each question the number of the likeliest choice."""
    questions = [answers[start : start + CHOICES] for start in range(0, len(answers), CHOICES)]
    return [max(range(CHOICES), key=lambda n, each=each: each[n][0]) for each in questions]


def backends(pairs: list[tuple[str, str]]) -> dict[str, Any]:
    """Those that take turns, each with a model of its own with the same weights."""
    from lm_eval.models.huggingface import HFLM

    from lowtide.cli.after_training.ragged_lm import RaggedLM
    from lowtide.engine.probe import probe
    from lowtide.rollout.generators.ragged import RaggedGenerator

    tokenizer = load_tokenizer(tokenizer_for([{"text": " ".join(pair)} for pair in pairs]))
    make = _maker(len(tokenizer))
    model = make()
    ours = RaggedLM(model, tokenizer, probe(model), RaggedGenerator(tokenizer), TOKENS_PER_BATCH)
    theirs = {f"lm-eval, batches of {n}": HFLM(pretrained=make(), tokenizer=tokenizer, batch_size=n) for n in BATCHES}
    return {OURS: ours, **theirs}


def _maker(vocabulary: int) -> Callable[[], Any]:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    def make() -> Any:
        torch.manual_seed(0)
        return LlamaForCausalLM(LlamaConfig(vocab_size=vocabulary, initializer_range=0.1, **CONFIG)).eval()

    return make


def table(runs: list[dict[str, Any]]) -> Table:
    made = Table(box=box.SIMPLE_HEAD)
    for name in ("contexts", "backend"):
        made.add_column(name)
    for name in ("processor, s", "clock, s", "largest difference", "same choices"):
        made.add_column(name, justify="right")
    for run in runs:
        numbers = (f"{run['processor_seconds']:.1f}", f"{run['seconds']:.1f}", f"{run['difference']:.1e}")
        made.add_row(run["case"], run["backend"], *numbers, f"{run['same_choices']:,}")
    return made


def report(runs: list[dict[str, Any]], case: str, target: float, console: Console) -> bool:
    """Prints how many times lowtide's seconds lm-eval's best are; returns whether they are so many as is asked, and
    numbers are equal."""
    seconds = {run["backend"]: run["processor_seconds"] for run in runs if run["case"] == case}
    apart = max(run["difference"] for run in runs if run["case"] == case)
    ratio = min(each for name, each in seconds.items() if name != OURS) / seconds[OURS]
    verdict = "reached" if ratio >= target else "NOT reached"
    equal = "equal" if apart <= CLOSE else "NOT equal"
    console.print(
        f"{case}: lm-eval's best takes {ratio:.2f} times the processor's time, target {target:.1f}: {verdict}; "
        f"log-probabilities are {equal} to {CLOSE}"
    )
    return ratio >= target and apart <= CLOSE


if __name__ == "__main__":
    sys.exit(main())
