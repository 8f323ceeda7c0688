"""No technique keeps more from step to step.

Live are, first, the storages that operations have made, whoever holds them: their bytes are the same at all marks.
Second, what glibc's heap holds, in all its arenas, so what no operation made counts too. The interpreter's own tables
are among that and grow now and then, at once and by much, so there it is the lower quartile of the growths between
marks that must be nothing: what each step kept would raise all of them.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import TrainerCallback

from lowtide.memory.allocators import host_heap
from tests.support.marks import slow_but
from tests.support.matrix.matrix import ACTED, TECHNIQUES, make, with_it
from tests.support.memory.storages import Storages

EVERY, STEPS = 8, 48
"""Steps between marks, and in all."""
SWEPT = [name for n, name in enumerate(ACTED) if n % 4 or "torchao" in TECHNIQUES[name].needs]
"""Left to the sweeps; torchao compiles its step, which takes half a minute."""
BATCH = 4
"""Rows of a step. An epoch has four batches, so all marks follow the same rows."""
SLACK = 96 * EVERY
"""Bytes between two marks, for numbers that the Trainer keeps. The smallest weight of the model, 128 bytes, would show
if each step kept one."""


class Marks(TrainerCallback):
    """Live bytes after some steps, and what is in the offloading file."""

    def __init__(self, trainer: Any, storages: Storages) -> None:
        self.trainer, self.storages = trainer, storages
        self.tensors: list[int] = []
        self.live: list[int] = []
        self.away: list[int] = []
        self.ends: list[int] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        live = self.storages.live  # at each step, so that it forgets what is gone
        if state.global_step % EVERY:
            return
        if gc.collect():
            live = self.storages.live
        self.tensors.append(live)
        heap = host_heap.glibc().mallinfo2()
        self.live.append(heap.uordblks + heap.hblkhd)
        offload = self.trainer.run.offload
        if offload is not None:
            self.away.append(offload.offloaded_bytes)
            self.ends.append(offload.store.space.end)

    @property
    def growth(self) -> float:
        """Lower quartile over the stretches between two marks."""
        growths = [after - before for before, after in zip(self.live, self.live[1:], strict=False)]
        return statistics.quantiles(growths)[0]


class Leak(TrainerCallback):
    """Keeps a tensor at some steps."""

    def __init__(self, tensor: Callable[[Any], Tensor], leaks: Callable[[int], bool]) -> None:
        self.tensor, self.leaks = tensor, leaks
        self.kept: list[Any] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.leaks(state.global_step):
            self.kept.append(self.tensor(kwargs["model"]))


def smallest_weight(model: Any) -> Tensor:
    return model.model.norm.weight.detach().clone()


def hidden_states_in_a_graph(model: Any) -> Tensor:
    """A number, whose graph alone holds them."""
    return (model.model.norm.weight * torch.zeros(8, 1).add(1)).exp().sum()


def marks(kind: str, *callbacks: TrainerCallback, **options: Any) -> Marks:
    trainer = make(
        kind, **{"per_device_train_batch_size": BATCH, **options, "max_steps": STEPS, "logging_steps": 10 * STEPS}
    )
    with Storages() as storages:
        found = Marks(trainer, storages)
        for callback in (*callbacks, found):
            trainer.add_callback(callback)
        trainer.train()
    return found


pytestmark = [
    pytest.mark.skipif(host_heap.glibc() is None, reason="glibc is asked what is live"),
    pytest.mark.unchecked_shapes,
]


@pytest.mark.parametrize("technique", slow_but((), ACTED, swept=SWEPT))
def test_live_bytes_do_not_grow_with_steps(technique):
    if "torchao" in TECHNIQUES[technique].needs and " " in torch.__file__:
        pytest.skip("torchao compiles its step, which torch cannot where its path has a space")
    found = marks("DPO" if technique == "prefix sharing" else "SFT", **with_it(TECHNIQUES[technique]))
    assert set(found.tensors) == {found.tensors[0]}
    assert found.growth <= SLACK
    assert found.away == ([0] * len(found.live) if technique == "activation offloading" else [])
    assert len(set(found.ends)) <= 1


@pytest.mark.slow
def test_a_leak_would_be_seen():
    found = marks("SFT", Leak(smallest_weight, lambda step: True))
    assert found.growth > SLACK
    assert sorted(set(found.tensors)) == found.tensors


@pytest.mark.slow
@pytest.mark.parametrize("leaks", [lambda step: step % 3 == 0, lambda step: step == 40], ids=["every third", "once"])
def test_a_leak_at_some_steps_would_be_seen(leaks):
    found = marks("SFT", Leak(hidden_states_in_a_graph, leaks))
    assert found.tensors[-1] - found.tensors[0] >= 8 * 32 * 4
    assert sorted(found.tensors) == found.tensors
