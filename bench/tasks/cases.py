"""The tasks of `bench.tasks`, who trains them, and what is to be reached."""

from dataclasses import dataclass

PLAIN, GROUPED, OURS = "transformers", "transformers, group_by_length", "lowtide"
CONTESTANTS = (PLAIN, GROUPED, OURS)
LEAST_BESIDE_GROUPED = 1.3
"""Times the tokens/s of `group_by_length`."""


@dataclass(frozen=True)
class Target:
    """What is to be reached against transformers with its defaults."""

    speed: float
    peak: float


TARGETS = {
    "token-classification": Target(2.5, 0.4),
    "masked-lm": Target(4.0, 0.2),
    "seq2seq": Target(2.5, 0.3),
}
PAIRS = "seq2seq"
"""The task of encoder-decoders."""
