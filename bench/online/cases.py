"""Prompts to write after: questions of GSM8K, and generated ones of long-tailed and of equal lengths."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.inputs.generated import lognormal_lengths, word_source

GSM8K_FILE = Path(__file__).parents[3] / "shared" / "data" / "gsm8k_test.prompt_answer.jsonl"
ROWS = 160
LONG_TOKENS = 1000


def gsm8k() -> list[dict[str, Any]]:
    """Conversations; generated where the file is not there."""
    if not GSM8K_FILE.exists():
        return generated(60, 0.35, seed=38)
    with GSM8K_FILE.open(encoding="utf-8") as lines:
        return [{"prompt": json.loads(line)["prompt"]} for line, _ in zip(lines, range(ROWS), strict=False)]


def longtail() -> list[dict[str, Any]]:
    return generated(75, 1.2, seed=39)


def long() -> list[dict[str, Any]]:
    """Prompts that are cut to `LONG_TOKENS`."""
    return generated(LONG_TOKENS, 0.0, seed=40)


def generated(median: float, sigma: float, seed: int) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    draw = word_source(rng)
    lengths = lognormal_lengths(median, sigma, rng, rows=ROWS, shortest=4)
    return [{"prompt": [{"role": "user", "content": " ".join(draw(length))}]} for length in lengths]


CASES: dict[str, Callable[[], list[dict[str, Any]]]] = {"gsm8k": gsm8k, "longtail": longtail, "long": long}
