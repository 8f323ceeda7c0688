"""The data that is trained on, by method and case name: real school mathematics, and generated long-tailed rows.

For supervised fine-tuning `gsm8k` reads `../shared/data/gsm8k_train.messages.jsonl` where it is there; elsewhere rows
are generated with lengths like GSM8K's. `longtail` draws lengths from a log-normal distribution, of which a padded
batch of 8 holds about 40% real tokens, as with most chat data. Rows of preferences are in `preferences.py`.
Everything is seeded, and no row is longer than TRL's default `max_length` of 1,024 tokens, so that every contestant
trains on the same tokens.
"""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.inputs.generated import ROWS, lognormal_lengths, word_source
from bench.inputs.preferences import (
    gsm8k_labelled,
    gsm8k_pairs,
    labelled_source,
    longtail_labelled,
    longtail_pairs,
    longtail_preferences,
    pairs_source,
)

Row = dict[str, Any]

GSM8K_FILE = Path(__file__).parents[3] / "shared" / "data" / "gsm8k_train.messages.jsonl"


@dataclass(frozen=True)
class Case:
    """Rows, and what is to be reached on them on a CPU against TRL with its defaults."""

    rows: Callable[[], list[Row]]
    source: Callable[[], str]
    """What the rows are on this machine, in words."""
    speed_target: float
    """At least so many times TRL's real tokens a second."""
    peak_target: float
    """At most so many times TRL's peak above the start."""


def generated_dialogues(lengths: list[int], rng: random.Random) -> list[Row]:
    """Returns one question and answer for each length in words; words are drawn with Zipf's frequencies."""
    draw = word_source(rng)
    rows = []
    for length in lengths:
        words = draw(length)
        asked = max(1, length // 3)
        question, answer = " ".join(words[:asked]), " ".join(words[asked:]) or words[0]
        rows.append(dialogue(question, answer))
    return rows


def dialogue(question: str, answer: str) -> Row:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def gsm8k_rows() -> list[Row]:
    if GSM8K_FILE.exists():
        with GSM8K_FILE.open(encoding="utf-8") as lines:
            return [json.loads(line) for line, _ in zip(lines, range(ROWS), strict=False)]
    rng = random.Random(8)
    return generated_dialogues(lognormal_lengths(median=150, sigma=0.35, rng=rng), rng)


def gsm8k_source() -> str:
    return "GSM8K's training split" if GSM8K_FILE.exists() else "generated conversations of GSM8K's lengths"


def longtail_rows() -> list[Row]:
    rng = random.Random(9)
    return generated_dialogues(lognormal_lengths(median=150, sigma=1.0, rng=rng), rng)


def longtail_source() -> str:
    return "generated conversations of log-normal lengths (median 150 words, sigma 1.0, at most 900)"


CASES = {
    "sft": {
        "gsm8k": Case(gsm8k_rows, gsm8k_source, speed_target=3.5, peak_target=0.2),
        "longtail": Case(longtail_rows, longtail_source, speed_target=3.0, peak_target=0.2),
    },
    "sft-lora": {
        "gsm8k": Case(gsm8k_rows, gsm8k_source, speed_target=3.0, peak_target=0.2),
        "longtail": Case(longtail_rows, longtail_source, speed_target=3.0, peak_target=0.2),
    },
    "dpo": {
        "gsm8k": Case(gsm8k_pairs, pairs_source, speed_target=5.0, peak_target=0.15),
        "longtail": Case(longtail_pairs, longtail_preferences, speed_target=12.0, peak_target=0.15),
    },
    "gkd": {
        "gsm8k": Case(gsm8k_rows, gsm8k_source, speed_target=3.0, peak_target=0.2),
        "longtail": Case(longtail_rows, longtail_source, speed_target=4.0, peak_target=0.2),
    },
    "kto": {
        "gsm8k": Case(gsm8k_labelled, labelled_source, speed_target=4.0, peak_target=0.2),
        "longtail": Case(longtail_labelled, longtail_preferences, speed_target=4.0, peak_target=0.2),
    },
    "reward": {
        "gsm8k": Case(gsm8k_pairs, pairs_source, speed_target=2.5, peak_target=0.4),
        "longtail": Case(longtail_pairs, longtail_preferences, speed_target=2.5, peak_target=0.4),
    },
}
