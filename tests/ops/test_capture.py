"""Which steps may be captured as a CUDA graph: one of fixed addresses and shapes, and none of the wrong ones."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lowtide.ops.capture import Watch, difference, why_not_capturable

ROWS, CAPACITY, DIM, VOCAB = 64, 256, 1536, 151_936
META = torch.device("meta")


class Writer(nn.Module):
    """A decode step of one layer, all of whose state lies at fixed addresses."""

    def __init__(self, device: torch.device, vocab: int = VOCAB):
        super().__init__()
        with device:
            self.embedding = nn.Embedding(vocab, DIM)
            self.keys = torch.zeros(ROWS, CAPACITY, DIM)
            self.token, self.held = torch.zeros(2, ROWS, dtype=torch.long)
            self.done = torch.zeros(ROWS, dtype=torch.bool)

    def step(self) -> None:
        """Each row writes a token."""
        self.advance(self.draw(self.held), self.held)

    def draw(self, held: Tensor | int) -> Tensor:
        query = self.embedding(self.token)
        rows = torch.arange(ROWS, device=query.device)
        self.keys.view(-1, DIM).index_copy_(0, rows * CAPACITY + held, query)
        bias = torch.where(torch.arange(CAPACITY, device=query.device) <= self.held[:, None], 0.0, -1e9)
        weights = torch.softmax(torch.einsum("rd,rkd->rk", query, self.keys) + bias, -1)
        return torch.einsum("rk,rkd->rd", weights, self.keys) @ self.embedding.weight.T

    def advance(self, logits: Tensor, held: Tensor) -> None:
        self.token.copy_(logits.argmax(-1))
        self.held.copy_(held + 1)
        self.done.logical_or_(self.token == 2)


class ReadsHost(Writer):
    def step(self) -> None:
        if not bool(self.done.all()):
            super().step()


class ReadsAll(Writer):
    def step(self) -> None:
        super().step()
        self.seen = self.token.tolist()


class Grows(Writer):
    def step(self) -> None:
        super().step()
        self.keys = torch.cat([self.keys, self.keys[:, :1]], 1)[:, 1:].contiguous()


class DependsOnData(Writer):
    def step(self) -> None:
        super().step()
        self.embedding(self.token[self.done.logical_not()])


class CopiesFromHost(Writer):
    def step(self) -> None:
        self.held.add_(torch.ones(ROWS, dtype=torch.long).to(self.held.device))
        super().step()


class Moves(Writer):
    """Each step writes to the state that the one before did not."""

    def __init__(self, device: torch.device, vocab: int = VOCAB):
        super().__init__(device, vocab)
        self.other = self.token.clone()

    def step(self) -> None:
        self.token, self.other = self.other, self.token
        super().step()


class CountsOnHost(Writer):
    """A graph would write every key to the place of the first."""

    place = 0

    def step(self) -> None:
        self.advance(self.draw(self.place), self.held)
        self.place += 1


class Widens(Writer):
    width = 1

    def step(self) -> None:
        self.keys[:, : self.width].mul_(1.0)
        self.width += 1
        super().step()


WRONG: dict[type[Writer], str] = {
    ReadsHost: "the host reads the device: aten::_local_scalar_dense",
    ReadsAll: "the host reads the device: aten::_to_copy",
    Grows: "memory outlives the step: aten::",
    DependsOnData: "a size depends on data: aten::index.Tensor",
    CopiesFromHost: "memory of the host is copied to the device: aten::_to_copy",
    Moves: "it does not run alike twice: operation",
    CountsOnHost: "it does not run alike twice: operation",
    Widens: "it does not run alike twice: operation",
}


@torch.no_grad()
def test_a_step_of_fixed_shapes_and_addresses_may_be_captured():
    assert why_not_capturable(Writer(META).step, META) is None


@pytest.mark.parametrize("wrong", WRONG)
@torch.no_grad()
def test_a_step_that_a_graph_would_get_wrong_is_refused(wrong: type[Writer]):
    if wrong is DependsOnData:  # torch gives no shape to what is picked by a mask on the meta device
        writer, device = wrong(torch.device("cpu"), 100), torch.device("cpu")
    else:
        writer, device = wrong(META), META
    told = why_not_capturable(writer.step, device)
    assert told is not None
    assert told.startswith(WRONG[wrong])


@torch.no_grad()
def test_on_a_device_with_values_reads_are_what_they_are():
    writer, read = Writer(torch.device("cpu"), 100), []

    def step() -> None:
        writer.step()
        read.append(int(writer.held[0]))

    told = why_not_capturable(step, torch.device("cpu"))
    assert told == "the host reads the device: aten::_local_scalar_dense"
    assert read == [1, 2]


@torch.no_grad()
def test_fewer_operations_than_before_are_another_step():
    calls: list[Callable[[], Tensor]] = [lambda: torch.zeros(1) + 1, lambda: torch.zeros(1)]
    with Watch(torch.device("cpu")) as watch:
        calls[0]()
        watch.begin()
        calls[1]()
    assert difference(*watch.steps) == "it runs 2 operations, then 1"
