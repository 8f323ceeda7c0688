"""The rows that are planned for."""

import random
from typing import Any

from bench.inputs.generated import lognormal_lengths, word_source
from bench.inputs.preferences import GSM8K_MEDIAN, GSM8K_SIGMA


def pairs(count: int) -> list[dict[str, Any]]:
    """Returns pairs of conversations with GSM8K's lengths."""
    rng = random.Random(28)
    draw = word_source(rng)
    lengths = [lognormal_lengths(GSM8K_MEDIAN, GSM8K_SIGMA, rng, rows=count, shortest=4) for _ in range(3)]

    def message(role: str, length: int) -> list[dict[str, str]]:
        return [{"role": role, "content": " ".join(draw(length))}]

    return [
        {"prompt": message("user", a), "chosen": message("assistant", b), "rejected": message("assistant", c)}
        for a, b, c in zip(*lengths, strict=True)
    ]
