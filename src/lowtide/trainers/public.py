"""The trainer of each method under TRL's name: `SFTTrainer` and the others, made of the table of methods."""

from __future__ import annotations

import functools
from typing import Any

from lowtide.methods import METHODS
from lowtide.methods.method import Method
from lowtide.run.options.configs import config_class, public_name
from lowtide.trainers.generating import GeneratingTrainer
from lowtide.trainers.method import MethodTrainer
from lowtide.trainers.online.trainer import OnlineTrainer
from lowtide.trainers.reference import ReferenceTrainer
from lowtide.trainers.signatures import signature_of
from lowtide.trainers.taught import TaughtTrainer


@functools.cache
def trainer_class(method: Method) -> type[MethodTrainer]:
    """The method's trainer."""
    kind = GeneratingTrainer if method.generates else MethodTrainer
    if method.compares:
        kind = OnlineTrainer if method.writes else TaughtTrainer if method.taught else ReferenceTrainer
    made: Any = type(
        f"{public_name(method)}Trainer",
        (kind,),
        {
            "__doc__": f"Trains by {method.title}; rows are described in `docs/{method.name}.md`.\n\n"
            "    The arguments are those of `MethodTrainer`.\n    ",
            "__module__": "lowtide",
            "__signature__": signature_of(method),
            "method": method,
            "config": config_class(method),
        },
    )
    return made


def __getattr__(name: str) -> Any:
    method = METHODS.public(name)
    if method is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return config_class(METHODS[method]) if name.endswith("Config") else trainer_class(METHODS[method])
