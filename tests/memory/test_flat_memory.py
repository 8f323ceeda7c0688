"""No technique keeps more from step to step.

Live is what glibc's heap holds, in all its arenas, so what only autograd or a store holds counts too, and it is known
to the byte. The interpreter's own tables grow now and then, at once and by much, so it is the median of the growths
between marks that must be nothing.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Iterator
from typing import Any

import pytest
from exactness.matrix import ACTED, TECHNIQUES, make, with_it, young_heap
from transformers import TrainerCallback

from lowtide.memory import host_heap

EVERY, STEPS = 20, 200
"""Steps between marks, and in all. An epoch has two batches, so all marks follow the same rows."""
SLACK = 2 << 10
"""Bytes between two marks, for numbers that the Trainer keeps. The smallest weight of the model, 128 bytes, would show
if each step kept one."""


class Marks(TrainerCallback):
    """Live bytes after some steps, and what is in the offloading file."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.live: list[int] = []
        self.away: list[int] = []
        self.ends: list[int] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % EVERY:
            return
        gc.collect()
        heap = host_heap._glibc().mallinfo2()
        self.live.append(heap.uordblks + heap.hblkhd)
        offload = self.trainer.run.offload
        if offload is not None:
            self.away.append(offload.offloaded_bytes)
            self.ends.append(offload.store.space.end)

    @property
    def growth(self) -> float:
        """Median over the stretches between two marks."""
        return statistics.median(after - before for before, after in zip(self.live, self.live[1:], strict=False))


class Leak(TrainerCallback):
    """Keeps the smallest weight at each step."""

    def __init__(self) -> None:
        self.kept: list[Any] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.kept.append(kwargs["model"].model.norm.weight.detach().clone())


@pytest.fixture(scope="module", autouse=True)
def _heap() -> Iterator[None]:
    with young_heap():
        yield


def marks(kind: str, *callbacks: TrainerCallback, **options: Any) -> Marks:
    trainer = make(kind, **{**options, "max_steps": STEPS, "logging_steps": 10 * STEPS})
    found = Marks(trainer)
    for callback in (*callbacks, found):
        trainer.add_callback(callback)
    trainer.train()
    return found


pytestmark = pytest.mark.skipif(host_heap._glibc() is None, reason="glibc is asked what is live")


@pytest.mark.parametrize("technique", ACTED)
def test_live_bytes_do_not_grow_with_steps(technique):
    found = marks("DPO" if technique == "prefix sharing" else "SFT", **with_it(TECHNIQUES[technique]))
    assert found.growth <= SLACK
    assert found.away == ([0] * len(found.live) if technique == "activation offloading" else [])
    assert len(set(found.ends)) <= 1


def test_a_leak_would_be_seen():
    assert marks("SFT", Leak()).growth > SLACK
