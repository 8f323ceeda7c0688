"""An embedding's gradient is exchanged by the rows that are not zero on some rank: what comes out is the plain mean."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lowtide.ranks import replicas
from tests.support.ranks.processes import run_ranks

TOKENS, HIDDEN = 64, 6
FEW = [[3, 9, 9], [9, 60], [0, 3], [63]]
"""Rows that each rank has, one of them twice, one on several ranks."""
CASES: dict[str, list[Any]] = {
    "few": FEW,
    "one rank has none": [[5, 7], None, [7], []],
    "none": [None] * 4,
    "many": [list(range(0, 64, 2)), list(range(1, 64, 2)), [1], [2]],
}
"""The rows of each rank; None where it has no gradient."""


def gradient(rank: int, rows: list[int] | None, dtype: torch.dtype) -> Tensor | None:
    if rows is None:
        return None
    found = torch.zeros(TOKENS, HIDDEN, dtype=dtype)
    values = torch.randn(len(rows), HIDDEN, generator=torch.Generator().manual_seed(rank)).to(dtype)
    return found.index_add_(0, torch.tensor(rows, dtype=torch.long), values)


def exchanged(rank: int, name: str, dtype: torch.dtype = torch.float32, fails: int = -1) -> dict[str, Any]:
    """An embedding and a layer after it, in buckets of two rows of the embedding."""
    model = nn.Sequential(nn.Embedding(TOKENS, HIDDEN), nn.Linear(HIDDEN, 2)).to(dtype)
    weight = model[0].weight
    weight.grad = gradient(rank, CASES[name][rank], dtype)
    model[1].weight.grad = torch.full_like(model[1].weight, rank + 1.0)
    sent: list[int] = []
    plain = dist.all_reduce

    def counting(tensor: Tensor, *args: Any, **more: Any) -> Any:
        sent.append(tensor.nbytes)
        return plain(tensor, *args, **more)

    with (
        mock.patch.object(replicas, "BUCKET_BYTES", 2 * HIDDEN * weight.element_size()),
        mock.patch.object(dist, "all_reduce", counting),
    ):
        exchange = replicas.Averaging(model, last=[weight])
        if rank == fails:
            exchange.forgo()
        else:
            exchange.complete()
    return {"gradient": weight.grad, "layer": model[1].weight.grad, "sent": sum(sent)}


def rank_main(rank: int, folder: str, ranks: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=ranks)
    cases: dict[str, Callable[[int], Any]] = {name: functools.partial(exchanged, name=name) for name in CASES}
    cases["bfloat16"] = functools.partial(exchanged, name="few", dtype=torch.bfloat16)
    cases["failed"] = functools.partial(exchanged, name="few", fails=1)
    torch.save({name: case(rank) for name, case in cases.items()}, Path(folder, f"{rank}.pt"))
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks(rank_main, str(folder), request.param, ranks=request.param)
    return [torch.load(folder / f"{rank}.pt") for rank in range(request.param)]


def mean(name: str, ranks: int, dtype: torch.dtype = torch.float32, without: int = -1) -> Tensor:
    parts = [gradient(rank, CASES[name][rank], dtype) for rank in range(ranks) if rank != without]
    return torch.stack([torch.zeros(TOKENS, HIDDEN, dtype=dtype) if p is None else p for p in parts]).sum(0) / ranks


@pytest.mark.parametrize("name", CASES)
def test_the_mean_over_ranks_is_the_plain_one(name: str, found: list[dict[str, Any]]):
    for each in found:
        torch.testing.assert_close(each[name]["gradient"], mean(name, len(found)), rtol=1e-6, atol=1e-7)
        assert (each[name]["layer"] == (len(found) + 1) / 2).all()


def test_rows_that_are_zero_on_all_ranks_are_not_sent(found: list[dict[str, Any]]):
    layer, row = (2 * HIDDEN + 2) * 4, HIDDEN * 4
    for name in ("few", "one rank has none", "none"):
        rows = {row for own in CASES[name][: len(found)] for row in own or ()}
        assert {each[name]["sent"] for each in found} == {layer + TOKENS + len(rows) * row}
    assert {each["many"]["sent"] for each in found} == {layer + TOKENS + TOKENS * row}


def test_bfloat16(found: list[dict[str, Any]]):
    expected = mean("few", len(found), torch.bfloat16)
    for each in found:
        torch.testing.assert_close(each["bfloat16"]["gradient"], expected, rtol=2e-2, atol=1e-2)


def test_a_rank_that_failed_sends_zeros_and_nobody_waits(found: list[dict[str, Any]]):
    expected = mean("few", len(found), without=1)
    for rank, each in enumerate(found):
        if rank != 1:
            torch.testing.assert_close(each["failed"]["gradient"], expected, rtol=1e-6, atol=1e-7)


def test_rows_that_are_no_numbers_are_exchanged():
    lost = torch.zeros(3, 2)
    lost[1, 0] = torch.nan
    assert (torch.linalg.vector_norm(lost, torch.inf, dim=1) != 0).tolist() == [False, True, False]
