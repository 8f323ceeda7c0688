"""Every memory technique on two ranks, in each way to spread a run: what is trained is what one rank trains with it.

`cells_of` starts two ranks for each way and trains SFT with every technique there; `docs/matrix-ranks.md` is written
from it by `python -m tests.exactness --ranks`, and `test_matrix_ranks.py` holds the page against it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tests.support.matrix.matrix import ROUNDING, TECHNIQUES, Cell, check, has_options, uncompiled, with_it
from tests.support.ranks.processes import run_ranks
from tests.support.ranks.sharded_training import meeting_place, rank_of, trained

ZERO: dict[str, Any] = {"train_micro_batch_size_per_gpu": "auto"}
WAYS: dict[str, dict[str, Any]] = {
    "2 ranks": {},
    "FSDP2": {"fsdp": True},
    "ZeRO-2": {"deepspeed": {**ZERO, "zero_optimization": {"stage": 2}}},
    "ZeRO-3": {"deepspeed": {**ZERO, "zero_optimization": {"stage": 3}}},
    "SP": {"sequence": 2},
    "TP": {"tensor": 2},
}
"""The columns: how a config says it."""
NEEDS = {"ZeRO-2": "deepspeed", "ZeRO-3": "deepspeed"}
LEFT_OUT = {"packing", "fused head", "padding-free batches", "prefix sharing", "checkpointing of recurrences alone"}
"""Bins are dealt to ranks in another order; two are on in every run; the rows here share no tokens; and the model
has no recurrences."""
APART = 0.1
"""Relative distance up to which a technique that rounds is itself, in blocks that lie otherwise in a shard."""


def techniques() -> list[str]:
    """Those that are tried; compiled layers are tried by the tests of each way."""
    known = [name for name in TECHNIQUES if has_options("SFT", TECHNIQUES[name])]
    return [name for name in known if name not in LEFT_OUT and "compiled" not in name]


def _trained(name: str, ranks: int, folder: Path, way: Mapping[str, Any]) -> Any:
    """What `trained` returns of SFT with a technique, by its name."""
    technique = TECHNIQUES[name]
    with uncompiled(technique):
        return trained("SFT", ranks, folder, **with_it(technique), **way)


def rank_main(rank: int, folder: str, way: str) -> None:
    place = Path(folder)
    with rank_of(place, rank, 2):
        for number, name in enumerate(techniques()):
            try:
                found: Any = _trained(name, 2, place / str(number), WAYS[way])
            except ValueError as error:
                found = str(error)
            if rank == 0:
                torch.save(found, place / f"{number}.pt")


def cells_of(way: str) -> Mapping[str, Cell]:
    """By technique, what came of it in a way."""
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(rank_main, str(meeting_place(Path(folder))), way)
        found = {
            name: torch.load(Path(folder, f"{number}.pt"), weights_only=True)
            for number, name in enumerate(techniques())
        }
        return {name: _cell(name, each, Path(folder, f"one {name}".replace("/", " "))) for name, each in found.items()}


def _cell(name: str, found: Any, folder: Path) -> Cell:
    """Raises `AssertionError` where the numbers are not those of one rank."""
    if isinstance(found, str):
        return Cell("refused", found.partition(" cannot work here: ")[2] or found)
    changes, (losses, weights, _) = TECHNIQUES[name].changes, found
    expected_losses, expected, _ = _trained(name, 1, folder, {})
    apart = max(float((weights[n].float() - w.float()).norm() / w.float().norm()) for n, w in expected.items())
    apart = max([apart, *(abs(a - b) / abs(b) for a, b in zip(losses, expected_losses, strict=True))])
    if apart <= ROUNDING:
        return Cell("exact")
    check(changes is not None, f"{name}: {apart:.1e} from what one rank trains")
    check(apart <= APART, f"{name}: {apart:.1e} from what one rank trains")
    return Cell("not exact", changes or "")
