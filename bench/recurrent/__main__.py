"""`python -m bench.recurrent`: recurrent layers without padding, beside the padded computation, and adapted experts.

Two small models in float32, of three recurrent layers and one of attention: a Qwen3.5 (gated delta rule) and a Bamba
(Mamba-2). Each way has a process of its own; of its runs the fastest counts, and the peak is that above the model.

- rows: forward and backward of 16 rows of 50 to 500 tokens, laid end to end and padded;
- recomputed: the same, laid end to end, where recurrences are computed again in backward, beside keeping all that they
  compute, and beside computing whole layers again;
- group: the same of 8 completions of one prompt, which is computed once and repeated for each;
- rollouts: 32 completions of 8 prompts, by lowtide's generator and by transformers' `generate`;
- trl: supervised fine-tuning of a Qwen3.5 of 24 million parameters beside TRL, each with its defaults: 8 conversations
  of log-normal lengths a step;
- experts: forward and backward of one layer's 64 experts with LoRA adapters, 2,048 tokens, beside PEFT.

Prints each beside its target, records them, and exits with 1 where one is missed. Some 6 minutes; the times want a
machine that does nothing else.
"""

import sys
from typing import Any

from bench.inputs.tokenizer import tokenizer_for
from bench.measuring.figures import Figure, measure
from bench.measuring.measure import GIGABYTE
from bench.measuring.processes import run_child
from bench.measuring.results import RECURRENT, ratios, summarise
from bench.memory.surroundings import environment
from bench.recurrent.child import long_tailed

NAME = "recurrent"
TIMEOUT = 600
TIMES = 3
"""Runs of each way in its process."""
TARGETS = {
    "rows": {"gated delta rule": 1.6, "Mamba-2": 2.3},
    "group": {"gated delta rule": 3.0, "Mamba-2": 3.0},
    "rollouts": {"gated delta rule": 2.0, "Mamba-2": 2.0},
}
"""How many times as fast the ragged way is to be."""
KEPT = {"nothing": None, "recurrences": "outside_recurrences", "layers": "full"}
"""What is computed again, and by which policy."""
SLOWER = 1.25
"""How many times as long a step may take whose recurrences are computed again."""
SPEED_BESIDE_TRL, PEAK_BESIDE_TRL = 4.0, 0.3
EXPERTS_BESIDE_PEFT = 0.65
OURS, TRL = "lowtide", "trl"
PASSIVE = {"OMP_WAIT_POLICY": "PASSIVE"}
"""Threads wait without taking time, in both libraries."""


def main(argv: list[str] | None = None) -> int:
    """Measures, prints and records; returns 1 where a figure misses its target or a run fails."""
    return measure(__doc__, argv, MEASURES, NAME, RECURRENT)


def child(spec: dict[str, Any], variables: dict[str, str] | None = None) -> dict[str, Any]:
    """What a process of its own finds."""
    return run_child(spec, lambda _: None, TIMEOUT, "bench.recurrent.child", variables)


def beside_padded(what: str) -> dict[str, Any]:
    """Both ways of both models."""
    models, texts = {}, []
    for model, target in TARGETS[what].items():
        spec = {"what": what, "model": model, "times": TIMES}
        runs = {way: child(spec | {"ragged": way == "ragged"}, environment()) for way in ("ragged", "padded")}
        ours, theirs = (min(run["seconds"]) for run in runs.values())
        peaks = [run["above_start_bytes"] / GIGABYTE for run in runs.values()]
        models[model] = runs | {"speed": theirs / ours, "target": target}
        texts.append(
            f"{model} {ours:.2f} s for {theirs:.2f} s, {theirs / ours:.2f}x (target {target}x), peak {peaks[0]:.2f} "
            f"GB for {peaks[1]:.2f} GB"
        )
    met = all(each["speed"] >= each["target"] for each in models.values())
    return {"models": models, "text": "; ".join(texts), "met": met}


def rows() -> dict[str, Any]:
    """Rows of many lengths."""
    return beside_padded("rows")


def recomputed() -> dict[str, Any]:
    """Recurrences alone computed again, beside no checkpointing and the whole of it."""
    models, texts = {}, []
    for model in TARGETS["rows"]:
        spec = {"what": "rows", "model": model, "times": TIMES, "ragged": True}
        runs = {name: child(spec | {"policy": policy}, environment()) for name, policy in KEPT.items()}
        seconds = {name: min(run["seconds"]) for name, run in runs.items()}
        peaks = {name: run["above_start_bytes"] / GIGABYTE for name, run in runs.items()}
        slower, smaller = (each["recurrences"] / each["nothing"] for each in (seconds, peaks))
        models[model] = runs | {"slower": slower, "peak": smaller}
        texts.append(
            f"{model} {slower:.2f}x the time (target {SLOWER}x) at {smaller:.2f}x the peak, and whole layers "
            f"{seconds['layers'] / seconds['nothing']:.2f}x at {peaks['layers'] / peaks['nothing']:.2f}x, of "
            f"{seconds['nothing']:.2f} s and {peaks['nothing']:.2f} GB"
        )
    met = all(each["slower"] <= SLOWER and each["peak"] < 1 for each in models.values())
    return {"models": models, "text": "; ".join(texts), "met": met}


def group() -> dict[str, Any]:
    """Completions of one prompt."""
    return beside_padded("group")


def rollouts() -> dict[str, Any]:
    """Completions that are written."""
    return beside_padded("rollouts")


def trl() -> dict[str, Any]:
    """Supervised fine-tuning beside TRL."""
    spec = {"what": "sft", "method": "sft", "shape": "qwen3.5-24m", "warmup": 1, "timed": 2}
    spec["tokenizer"] = str(tokenizer_for(long_tailed()))
    found = summarise({("sft", name): [child(spec | {"contestant": name}, PASSIVE)] for name in (OURS, TRL)}, 1.0)[
        "sft"
    ]
    speed, peak = ratios(found[OURS], found[TRL])
    rates = " for ".join(f"{found[name]['tokens_per_second']:,.0f} tokens/s" for name in (OURS, TRL))
    text = (
        f"{rates}, {speed:.2f}x (target {SPEED_BESIDE_TRL:.0f}x); peak {peak:.2f}x (target {PEAK_BESIDE_TRL}x) of "
        f"{found[TRL]['peak_above_start_bytes'] / GIGABYTE:.2f} GB"
    )
    met = speed >= SPEED_BESIDE_TRL and peak <= PEAK_BESIDE_TRL
    return {"contestants": found, "speed": speed, "peak": peak, "text": text, "met": met}


def experts() -> dict[str, Any]:
    """Adapters of experts beside PEFT's."""
    runs = {
        way: child({"what": "experts", "grouped": way == OURS, "times": 9}, environment()) for way in (OURS, "peft")
    }
    ours, theirs = (min(run["seconds"]) for run in runs.values())
    peaks = [run["above_start_bytes"] / GIGABYTE for run in runs.values()]
    text = (
        f"{ours:.3f} s for {theirs:.3f} s, {ours / theirs:.2f}x (target {EXPERTS_BESIDE_PEFT}x), "
        f"peak {peaks[0]:.2f} GB for {peaks[1]:.2f} GB"
    )
    return {"contestants": runs, "ratio": ours / theirs, "text": text, "met": ours <= EXPERTS_BESIDE_PEFT * theirs}


MEASURES: dict[str, Figure] = {
    "rows": rows,
    "recomputed": recomputed,
    "group": group,
    "rollouts": rollouts,
    "trl": trl,
    "experts": experts,
}


if __name__ == "__main__":
    sys.exit(main())
