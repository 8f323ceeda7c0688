"""A head and an embedding whose rows lie on several ranks, against whole ones on each: values and every gradient."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from lowtide.ops.embedding import embed_tokens
from lowtide.ops.logits.linear_logprobs import Projection, Teacher, Term, TokenStats, Want, linear_logprobs, linear_loss
from lowtide.ops.logits.split_vocabulary import SplitVocabulary
from tests.support.marks import slow_but
from tests.support.ranks.processes import run_ranks

EVERYTHING = Want(entropies=True, mean_logprobs=True, top1=True, collisions=True)
SCORES = (7, 0, 12, 3)
"""Of each rank; the second has none."""
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}
FAST, SOME, ALL = 6, 16, 999
"""Combinations that are compared in a fast test and on four ranks, drawn from all of which two ranks compare."""
PROJECTIONS = {
    "plain": Projection(),
    "all": Projection(scale=1.5, softcap=3.0, temperature=1.3),
}
VOCAB, HIDDEN, LOW, TOKENS = 37, 5, 2, 9


RUNS = slow_but([(2, FAST)], [(2, FAST), (2, ALL), (4, SOME)])


def some_of(most: int, *values: Iterable[Any]) -> list[tuple[Any, ...]]:
    """So many of the combinations of values at most, the same on each rank."""
    found = [*itertools.product(*values)]
    return random.Random(1).sample(found, min(most, len(found)))


def group_of_ranks(rank: int, ranks: int, folder: str) -> Any:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=ranks)
    return init_device_mesh("cpu", (ranks,))


class Problem:
    """What all ranks know of: hidden states of each rank, weights, targets."""

    def __init__(self, ranks: int, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        made = lambda *shape: torch.randn(*shape, dtype=dtype)  # noqa: E731
        self.ranks = ranks
        self.xs = [made(TOKENS, HIDDEN) for _ in range(ranks)]
        self.lows = [made(TOKENS, LOW) for _ in range(ranks)]
        self.weights = [made(VOCAB, HIDDEN), made(VOCAB, LOW)]
        self.bias = made(VOCAB)
        self.indices = [torch.randint(0, TOKENS, (SCORES[rank],)) for rank in range(ranks)]
        self.targets = [torch.randint(0, VOCAB, (SCORES[rank],)) for rank in range(ranks)]
        place = self.indices[0][0]
        logits = self.xs[0][place] @ self.weights[0].T + self.lows[0][place] @ self.weights[1].T + self.bias
        self.targets[0][0] = logits.argmax()

    def terms(self, rank: int, weights: list[Tensor]) -> tuple[list[Term], list[Tensor]]:
        xs = [each[rank].clone().requires_grad_() for each in (self.xs, self.lows)]
        return [Term(x, weight) for x, weight in zip(xs, weights, strict=True)], xs


def cut(whole: Tensor, mesh: Any) -> nn.Parameter:
    part = torch.chunk(whole, mesh.size())[mesh.get_local_rank()].clone()
    return nn.Parameter(
        DTensor.from_local(part, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride())
    )


def combined(stats: TokenStats) -> Tensor:
    assert stats.entropies is not None
    assert stats.mean_logprobs is not None
    return (-stats.logprobs + 0.3 * stats.entropies + 0.2 * stats.mean_logprobs).sum()


def nll(stats: TokenStats) -> Tensor:
    assert stats.entropies is not None
    assert stats.mean_logprobs is not None
    return -0.9 * stats.logprobs - 0.1 * stats.mean_logprobs + 0.3 * stats.entropies


def run(kind: str, terms: list[Term], *where: Tensor, **options: Any) -> tuple[Tensor, TokenStats]:
    """The loss, and the statistics."""
    if kind == "loss":
        return linear_loss(terms, *where, nll, factor=0.7 / (1 + where[1] % 3), **options)
    stats = linear_logprobs(terms, *where, **options)
    # A rank without scores has a loss of log-probs alone, as a micro-batch without scores.
    return (combined(stats) if len(where[0]) else stats.logprobs.sum()), stats


def backward(total: Tensor, kind: str) -> None:
    """Twice where the gradients are not formed in forward."""
    if kind == "logprobs":
        total.backward(retain_graph=True)
    total.backward()


def assert_near(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(found, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def compare(
    mesh: Any, kind: str, dtype: torch.dtype, projection: Projection, in_place: bool, chunk: int | None
) -> None:
    rank, ranks = mesh.get_local_rank(), mesh.size()
    problem, split = Problem(ranks, dtype), SplitVocabulary(mesh.get_group(), VOCAB)
    options: dict[str, Any] = {"projection": projection, "want": EVERYTHING, "accumulate": in_place}
    # whole: the loss of all ranks on each
    whole = [nn.Parameter(weight.clone()) for weight in [*problem.weights, problem.bias]]
    expected: Any = None
    for other in range(ranks):
        terms, xs = problem.terms(other, whole[:2])
        total, stats = run(kind, terms, problem.indices[other], problem.targets[other], bias=whole[2], **options)
        backward(total, kind)
        if other == rank:
            expected = total, stats, xs
    # split
    mine = [cut(weight, mesh) for weight in [*problem.weights, problem.bias]]
    terms, xs = problem.terms(rank, mine[:2])
    where = problem.indices[rank], problem.targets[rank]
    total, stats = run(kind, terms, *where, bias=mine[2], split=split, chunk=chunk, **options)
    backward(total, kind)
    assert_near(total.detach(), expected[0].detach(), dtype)
    for name in ("logprobs", "entropies", "mean_logprobs", "collisions"):
        assert_near(getattr(stats, name), getattr(expected[1], name), dtype)
    assert stats.top1 is not None
    assert torch.equal(stats.top1, expected[1].top1)
    for found, known in zip(xs, expected[2], strict=True):
        assert_near(found.grad, known.grad, dtype)
    for found, known in zip(mine, whole, strict=True):
        assert found.grad.placements == found.placements
        assert_near(found.grad.full_tensor() * ranks, known.grad, dtype)


def compare_all(rank: int, ranks: int, most: int, folder: str) -> None:
    mesh = group_of_ranks(rank, ranks, folder)
    cases = some_of(
        most,
        ("logprobs", "loss"),
        (torch.float32, torch.float64),
        PROJECTIONS.values(),
        (False, True),
        (None, 2 * ranks),
    )
    for case in cases:
        compare(mesh, *case)
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize(("ranks", "most"), RUNS)
def test_statistics_and_gradients_are_those_of_a_whole_head(ranks: int, most: int, tmp_path: Path) -> None:
    run_ranks(compare_all, ranks, most, str(tmp_path), ranks=ranks)


def compare_same(rank: int, ranks: int, most: int, folder: str) -> None:
    """Ranks with the same scores: every number is that of a whole head, and no gradient is divided."""
    mesh = group_of_ranks(rank, ranks, folder)
    split = SplitVocabulary(mesh.get_group(), VOCAB, same_scores=True)
    cases = some_of(most, ("logprobs", "loss"), PROJECTIONS.values(), (False, True), (None, 4))
    for kind, projection, in_place, chunk in cases:
        dtype, problem = torch.float64, Problem(ranks, torch.float64)
        options: dict[str, Any] = {"projection": projection, "want": EVERYTHING, "accumulate": in_place}
        found: list[tuple[Tensor, TokenStats, list[Tensor]]] = []
        whole = [nn.Parameter(weight.clone()) for weight in [*problem.weights, problem.bias]]
        mine = [cut(weight, mesh) for weight in [*problem.weights, problem.bias]]
        for weights, more in ((whole, {}), (mine, {"split": split, "chunk": chunk})):
            terms, xs = problem.terms(0, weights[:2])
            where = problem.indices[0], problem.targets[0]
            total, stats = run(kind, terms, *where, bias=weights[2], **more, **options)
            backward(total, kind)
            found.append((total.detach(), stats, xs))
        for name in ("logprobs", "entropies", "mean_logprobs", "collisions"):
            assert_near(getattr(found[1][1], name), getattr(found[0][1], name), dtype)
        assert_near(found[1][0], found[0][0], dtype)
        for own, known in zip([*found[1][2]], [*found[0][2]], strict=True):
            assert_near(own.grad, known.grad, dtype)
        for own, known in zip(mine, whole, strict=True):
            assert_near(own.grad.full_tensor(), known.grad, dtype)
    table, ids = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(0)), torch.tensor([[3, 36, 3, 0]])
    whole_table, own_table = nn.Parameter(table.clone()), cut(table, mesh)
    for padding_idx in (None, 3):
        (embed_tokens(ids, whole_table, padding_idx) ** 2).sum().backward()
        looked_up = embed_tokens(ids, own_table, padding_idx, split)
        (looked_up**2).sum().backward()
        assert torch.equal(looked_up, table[ids])
        torch.testing.assert_close(own_table.grad.full_tensor(), whole_table.grad)
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize(("ranks", "most"), RUNS)
def test_ranks_with_the_same_scores_have_the_numbers_of_a_whole_head(ranks: int, most: int, tmp_path: Path) -> None:
    run_ranks(compare_same, ranks, most, str(tmp_path), ranks=ranks)


TAUGHT = Want(entropies=True, top1=True, divergences=True)


def distance(stats: TokenStats) -> Tensor:
    assert stats.entropies is not None
    assert stats.divergences is not None
    return stats.divergences + 0.1 * stats.entropies - 0.2 * stats.logprobs


def compare_taught(rank: int, ranks: int, most: int, folder: str) -> None:
    """Beside a teacher, whose vocabulary is cut likewise, is larger or smaller, or lies on each rank whole; and beside
    one that is cut where the student's is whole."""
    mesh = group_of_ranks(rank, ranks, folder)
    cases = some_of(
        most,
        (0.0, 0.3, 1.0),
        PROJECTIONS.values(),
        (None, 4),
        (VOCAB, VOCAB + 3, VOCAB - 2),
        (True, False),
        (True, False),
    )
    for beta, projection, chunk, theirs, cuts_student, cuts_teacher in cases:
        problem = Problem(ranks, torch.float64)
        problem.targets[0].clamp_(max=min(VOCAB, theirs) - 1)
        states, their_weight, their_bias = (
            torch.randn(*shape, dtype=torch.float64) for shape in ((SCORES[0], 6), (theirs, 6), (theirs,))
        )
        found: list[tuple[Tensor, TokenStats, list[Tensor], list[Any]]] = []
        for cuts, cuts_theirs in ((False, False), (cuts_student, cuts_teacher)):
            lying = (lambda weight: cut(weight, mesh)) if cuts else (lambda weight: nn.Parameter(weight.clone()))
            weights = [lying(weight) for weight in [*problem.weights, problem.bias]]
            terms, xs = problem.terms(0, weights[:2])
            of_teacher = [cut(each, mesh) if cuts_theirs else each for each in (their_weight, their_bias)]
            split, their_split = (
                SplitVocabulary(mesh.get_group(), size, same_scores=True) if there else None
                for there, size in ((cuts, VOCAB), (cuts_theirs, theirs))
            )
            teacher = Teacher([Term(states, of_teacher[0])], of_teacher[1], projection, beta, their_split)
            total, stats = linear_loss(
                terms,
                problem.indices[0],
                problem.targets[0],
                distance,
                **{"bias": weights[2], "projection": projection, "want": TAUGHT, "chunk": chunk},
                teacher=teacher,
                split=split,
            )
            total.backward()
            found.append((total.detach(), stats, xs, [full_of(weight.grad) for weight in weights]))
        (expected, known, *rest), (total, stats, *own) = found
        assert_near(total, expected, torch.float64)
        for name in ("logprobs", "entropies", "divergences"):
            assert_near(getattr(stats, name), getattr(known, name), torch.float64)
        for mine, whole in zip([x.grad for x in own[0]] + own[1], [x.grad for x in rest[0]] + rest[1], strict=True):
            assert_near(mine, whole, torch.float64)
    dist.barrier()
    dist.destroy_process_group()


def compare_taught_of_each(rank: int, ranks: int, most: int, folder: str) -> None:
    """As before, each rank with scores of its own, of which one has none."""
    mesh = group_of_ranks(rank, ranks, folder)
    split = SplitVocabulary(mesh.get_group(), VOCAB)
    cases = some_of(
        most, (0.0, 0.3, 1.0), PROJECTIONS.values(), (None, 2 * ranks), (VOCAB, VOCAB + 3, VOCAB - 2), (True, False)
    )
    for beta, projection, chunk, theirs, cuts_teacher in cases:
        problem = Problem(ranks, torch.float64)
        states = [torch.randn(SCORES[other], 6, dtype=torch.float64) for other in range(ranks)]
        their_weight, their_bias = (torch.randn(*shape, dtype=torch.float64) for shape in ((theirs, 6), (theirs,)))
        their_split = SplitVocabulary(mesh.get_group(), theirs) if cuts_teacher else None
        whole = [nn.Parameter(weight.clone()) for weight in [*problem.weights, problem.bias]]
        mine = [cut(weight, mesh) for weight in whole]
        of_teacher = [cut(each, mesh) if cuts_teacher else each for each in (their_weight, their_bias)]
        options: dict[str, Any] = {"projection": projection, "want": TAUGHT, "chunk": chunk}

        def run_one(other: int, weights: Any, taught: Any, split: Any, their_split: Any) -> Any:
            terms, xs = problem.terms(other, weights[:2])  # noqa: B023
            teacher = Teacher([Term(states[other], taught[0])], taught[1], projection, beta, their_split)  # noqa: B023
            where = problem.indices[other], problem.targets[other].clamp(max=min(VOCAB, theirs) - 1)  # noqa: B023
            shared = {"bias": weights[2], **options}  # noqa: B023
            total, stats = linear_loss(terms, *where, distance, teacher=teacher, split=split, **shared)
            total.backward()
            return total.detach(), stats, xs

        known = [run_one(other, whole, (their_weight, their_bias), None, None) for other in range(ranks)][rank]
        found = run_one(rank, mine, of_teacher, split, their_split)
        assert_near(found[0], known[0], torch.float64)
        for name in ("logprobs", "entropies", "divergences"):
            assert_near(getattr(found[1], name), getattr(known[1], name), torch.float64)
        for own, all_of in zip(found[2], known[2], strict=True):
            assert_near(own.grad, all_of.grad, torch.float64)
        for own, all_of in zip(mine, whole, strict=True):
            assert_near(own.grad.full_tensor() * ranks, all_of.grad, torch.float64)
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize(("ranks", "most"), RUNS)
def test_divergences_of_each_ranks_scores_are_those_of_whole_heads(ranks: int, most: int, tmp_path: Path) -> None:
    run_ranks(compare_taught_of_each, ranks, most, str(tmp_path), ranks=ranks)


def full_of(gradient: Any) -> Tensor:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


@pytest.mark.parametrize(("ranks", "most"), RUNS)
def test_divergences_from_a_teacher_are_those_of_whole_heads(ranks: int, most: int, tmp_path: Path) -> None:
    run_ranks(compare_taught, ranks, most, str(tmp_path), ranks=ranks)


def look_up(rank: int, ranks: int, folder: str) -> None:
    mesh = group_of_ranks(rank, ranks, folder)
    split = SplitVocabulary(mesh.get_group(), VOCAB)
    torch.manual_seed(0)
    table = torch.randn(VOCAB, HIDDEN, dtype=torch.float64)
    ids = [torch.randint(0, VOCAB if number else 5, (2, 4 + 5 * number)) for number in range(ranks)]
    slopes = [torch.randn(*each.shape, HIDDEN, dtype=torch.float64) for each in ids]
    for padding_idx, hooked in itertools.product((None, 3), (False, True)):
        whole, mine, seen = nn.Parameter(table.clone()), cut(table, mesh), []
        if hooked:
            mine.register_hook(seen.append)
        for _ in range(2):
            for each, slope in zip(ids, slopes, strict=True):
                (embed_tokens(each, whole, padding_idx) * slope).sum().backward()
            found = embed_tokens(ids[rank], mine, padding_idx, split)
            (found * slopes[rank]).sum().backward()
        assert torch.equal(found, table[ids[rank]])
        assert len(seen) == 2 * hooked
        torch.testing.assert_close(mine.grad.full_tensor() * ranks, whole.grad)
        frozen = cut(table, mesh).requires_grad_(False)
        assert not embed_tokens(ids[rank], frozen, padding_idx, split).requires_grad
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("ranks", slow_but([2], [2, 4]))
def test_embeddings_and_their_gradients_are_those_of_a_whole_table(ranks: int, tmp_path: Path) -> None:
    run_ranks(look_up, ranks, str(tmp_path), ranks=ranks)
