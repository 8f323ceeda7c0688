"""Rows of preferences: solutions of school mathematics, right and wrong, and generated long-tailed ones.

The real ones are read from `../shared/data/gsm8k_solutions.*.jsonl` where it is there; elsewhere rows of such lengths
are generated. In the long-tailed case prompts and completions have log-normal lengths, each of its own, of which a
padded batch of 8 pairs holds about 40% real tokens; the longest come near 1,024 tokens, and none is longer, so that
nothing is cut or left out. Chosen and rejected always differ, for lowtide drops pairs whose sides are the same.
"""

import json
import random
from pathlib import Path
from typing import Any

from bench.inputs.generated import LONGEST, lognormal_lengths, word_source

Row = dict[str, Any]

FOLDER = Path(__file__).parents[3] / "shared" / "data"
PAIRS_FILE = FOLDER / "gsm8k_solutions.preference.jsonl"
LABELLED_FILE = FOLDER / "gsm8k_solutions.labelled.jsonl"
ROWS = 160
"""Enough for 20 steps; a reference whose log-probs are computed before training reads them all."""
GSM8K_MEDIAN, GSM8K_SIGMA = 45, 0.4
LONG_MEDIAN, LONG_SIGMA = 75, 1.2
LONGTAIL_SOURCE = (
    f"generated prompts and completions of log-normal lengths (median {LONG_MEDIAN} words, sigma {LONG_SIGMA}, at most "
    f"{LONGEST // 2} each)"
)


def gsm8k_pairs() -> list[Row]:
    return read(PAIRS_FILE) if PAIRS_FILE.exists() else generated_pairs(GSM8K_MEDIAN, GSM8K_SIGMA, seed=18)


def gsm8k_labelled() -> list[Row]:
    return read(LABELLED_FILE) if LABELLED_FILE.exists() else generated_labelled(GSM8K_MEDIAN, GSM8K_SIGMA, seed=28)


def longtail_pairs() -> list[Row]:
    return generated_pairs(LONG_MEDIAN, LONG_SIGMA, seed=19)


def longtail_labelled() -> list[Row]:
    return generated_labelled(LONG_MEDIAN, LONG_SIGMA, seed=29)


def pairs_source() -> str:
    return "solutions of GSM8K, a right and a wrong one" if PAIRS_FILE.exists() else "generated pairs of such lengths"


def labelled_source() -> str:
    return "solutions of GSM8K, right or wrong" if LABELLED_FILE.exists() else "generated solutions of such lengths"


def longtail_preferences() -> str:
    return LONGTAIL_SOURCE


def read(path: Path) -> list[Row]:
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line, _ in zip(lines, range(ROWS), strict=False)]


def generated_pairs(median: float, sigma: float, seed: int) -> list[Row]:
    """Returns pairs whose prompts and completions have log-normal lengths."""
    return generated(("prompt", "chosen", "rejected"), median, sigma, random.Random(seed))


def generated_labelled(median: float, sigma: float, seed: int) -> list[Row]:
    """Returns single completions, each as likely desirable as not."""
    rng = random.Random(seed)
    rows = generated(("prompt", "completion"), median, sigma, rng)
    return [row | {"label": rng.random() < 0.5} for row in rows]


def generated(columns: tuple[str, ...], median: float, sigma: float, rng: random.Random) -> list[Row]:
    """Returns rows of conversations: the first column is the user's, the others are answers."""
    lengths = {
        column: lognormal_lengths(median, sigma, rng, rows=ROWS, shortest=4, longest=LONGEST // 2) for column in columns
    }
    draw = word_source(rng)
    return [
        {
            column: [{"role": "user" if column == "prompt" else "assistant", "content": " ".join(draw(length))}]
            for column, length in zip(columns, row, strict=True)
        }
        for row in zip(*lengths.values(), strict=True)
    ]
