"""An option is a dataclass field with the sentence that documents it, its group in `--help` and, if it is a number,
its range.

The command line, the check at construction and the docs read these (`lowtide.option_values`).
"""

from __future__ import annotations

import copy
import math
from dataclasses import Field, dataclass, field
from enum import StrEnum
from typing import Any

PATH = "my_module.my_loss"
"""Among the `choices` of an option: any path of what a user has written may stand there."""


@dataclass(frozen=True)
class Range:
    """The numbers that an option takes. NaN and infinity are in no range; whether None is taken, the type hint says."""

    least: float | None = None
    """The smallest number; or, as `above`, the number that all are larger than."""
    most: float | None = None
    """The largest number; or, as `below`, the number that all are smaller than."""
    above: float | None = None
    below: float | None = None
    also: float | None = None
    """One number outside the bounds that has a meaning of its own."""
    note: str = ""
    """What such a number means, or which other way there is; a clause for messages."""

    def __contains__(self, value: float) -> bool:
        if not math.isfinite(value):
            return False
        if value == self.also:
            return True
        return (
            (self.least is None or value >= self.least)
            and (self.most is None or value <= self.most)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
        )

    def __str__(self) -> str:
        bounds = {"at least": self.least, "above": self.above, "at most": self.most, "below": self.below}
        words = " and ".join(f"{words} {bound:.15g}" for words, bound in bounds.items() if bound is not None)
        return (words or "finite") + ("" if self.also is None else f", or {self.also:.15g}")


POSITIVE = Range(above=0)
NOT_NEGATIVE = Range(least=0)
COUNT = Range(least=1)
SHARE = Range(least=0, most=1)
FINITE = Range()


class Group(StrEnum):
    """The groups of `--help`, in its order. A class says by `group` which one its options are in, an option by `group=`
    that it is in another one. Options without a group are in that of the method, which stands after the first."""

    DATA = "model and data"
    TRAINING = "training"
    REFERENCE = "reference"
    MEMORY = "memory and precision"
    DEVICES = "several devices"
    ADAPTERS = "LoRA and quantization"
    SAVING = "evaluation, logging and saving"


class OptionField(Field):
    """A dataclass field with a range and a group.

    They are not in the metadata, since `transformers.HfArgumentParser`, which scripts read configs with, hands all of
    that to argparse.
    """

    __slots__ = ("group", "range")

    @classmethod
    def of(cls, plain: Any, range: Range | None, group: Group | None) -> OptionField:
        """A field like another one, with a range and a group."""
        made = cls.__new__(cls)
        for name in Field.__slots__:
            setattr(made, name, getattr(plain, name))
        made.range, made.group = range, group
        return made


def option(default: Any, help: str, range: Range | None = None, *, group: Group | None = None, **metadata: Any) -> Any:
    """A field of an options class: its default, the one sentence that documents it and, for a number, its range.

    Args:
        group: where `--help` lists it, if not in the group of its class.
        metadata: `choices`, and `aliases`, which are other names.
    """
    metadata = {"help": help, **metadata}
    if isinstance(default, dict | list):
        made: Any = field(default_factory=lambda: copy.copy(default), metadata=metadata)
    else:
        made = field(default=default, metadata=metadata)
    return OptionField.of(made, range, group)
