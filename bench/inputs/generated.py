"""Seeded text of given lengths in words: made-up words, drawn with Zipf's frequencies, for rows of any method."""

import random
from collections.abc import Callable

ROWS = 512
LONGEST = 900
"""Words in the longest row; with its template's tokens it stays below 1,024."""

SYLLABLES = ("ka", "lo", "mi", "ren", "su", "ta", "vo", "shi", "pel", "dor", "an", "ber", "cu", "fin", "gra", "hol")


def word_source(rng: random.Random) -> Callable[[int], list[str]]:
    """Returns a function that draws so many words from a lexicon of its own."""
    lexicon = sorted({"".join(rng.choices(SYLLABLES, k=rng.randint(1, 4))) for _ in range(30_000)})
    rng.shuffle(lexicon)
    weights = [1 / rank for rank in range(1, len(lexicon) + 1)]
    return lambda count: rng.choices(lexicon, weights, k=count)


def lognormal_lengths(
    median: float, sigma: float, rng: random.Random, *, rows: int = ROWS, shortest: int = 16, longest: int = LONGEST
) -> list[int]:
    """Returns lengths in words, between `shortest` and `longest`."""
    return [min(longest, max(shortest, round(median * rng.lognormvariate(0.0, sigma)))) for _ in range(rows)]
