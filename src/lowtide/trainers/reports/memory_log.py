"""The memory of a run in its logs: the peak so far, the phase it fell in, what was predicted, and whether that held."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from lowtide.memory.allocators.measure import bytes_text
from lowtide.planner.estimate import BANDS
from lowtide.step.phases import HighWater

GIB = 1 << 30
SLACK = 32 << 20
"""Bytes by which a process grows in any run: modules that logging and saving import, holes of the heap."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prediction:
    """What the peak should be, by whose word, and how far off that word may be."""

    bytes: int
    by: str
    band: float
    """A share."""

    @classmethod
    def estimated(cls, bytes: int, device: str) -> Prediction:
        return cls(bytes, "the estimate", BANDS[device])

    @classmethod
    def rehearsed(cls, bytes: int) -> Prediction:
        return cls(bytes, "the rehearsal", 0.02)


class MemoryLog:
    """What a run logs about its memory, and one warning where it takes more than was predicted."""

    def __init__(self, mark: HighWater) -> None:
        self.mark = mark
        self._phase: str | None = None
        self._warned = False

    def metrics(self, prediction: Prediction | None) -> dict[str, float | str]:
        """`memory/peak` and `memory/predicted` in GiB; `memory/phase`, a text, when it is another than before.

        Loggers that take numbers alone leave a text out with a warning, so it is not repeated.
        """
        self.mark.note(self.mark.phase)
        found: dict[str, float | str] = {"memory/peak": self.mark.bytes / GIB}
        if self.mark.phase != self._phase:
            found["memory/phase"] = self._phase = self.mark.phase
        if prediction is not None:
            found["memory/predicted"] = prediction.bytes / GIB
            self._compare(prediction)
        return found

    def _compare(self, prediction: Prediction) -> None:
        over = self.mark.bytes - prediction.bytes
        if self._warned or over <= max(prediction.band * prediction.bytes, SLACK):
            return
        self._warned = True
        logger.warning(
            f"the peak is {bytes_text(self.mark.bytes)} so far, in {self.mark.phase}: {bytes_text(over)} more than "
            f"{prediction.by} had, which should hold to {prediction.band:.0%}. `lowtide profile` shows what takes it"
        )
