"""The fused head beside a teacher with another vocabulary against dense probabilities: values, gradients, memory."""

from dataclasses import replace

import pytest
import torch

from lowtide.ops.logits.across_vocabularies import LEAST, NO_SPAN, Across, Common, Spans
from lowtide.ops.logits.linear_logprobs import Projection, Teacher, Term, linear_loss
from tests.support.memory.live_bytes import LivingBytes
from tests.support.references.divergences import PROJECTIONS, WANT, Problem, dense, divergence, logits_of

OURS, THEIRS = torch.tensor([3, 0, 11, 20]), torch.tensor([0, 5, 1, 28])
WAYS = {
    "sorted": None,
    "forward": Common(OURS, THEIRS, 0.0),
    "between, weighted": Common(OURS, THEIRS, 0.4, (0.7, 0.2)),
    "reverse": Common(OURS, THEIRS, 1.0),
    "all common": Common(torch.arange(29), torch.arange(29), 0.5),
}
SPANS = {
    "each its own": torch.zeros(7, dtype=torch.long),
    "the last of several": torch.tensor([2, 1, 0, 0, NO_SPAN, 1, 0]),
    "the first of several": torch.tensor([0, -1, -2, NO_SPAN, 0, -1, 0]),
    "none": torch.full((7,), NO_SPAN),
}


def distances(q, p, common):
    """[rows], of probabilities, written out."""
    rows = []
    for one, other in zip(q, p, strict=True):
        own, its = ([], []) if common is None else (common.ours.tolist(), common.theirs.tolist())
        rest = [
            torch.stack([each[n] for n in range(len(each)) if n not in left_out] or [each.sum() * 0])
            for each, left_out in ((one, own), (other, its))
        ]
        there = len(one) > len(own) and len(other) > len(its)
        most = max(map(len, rest)) if there else 0
        filled = [
            torch.cat([each.sort(descending=True).values, each.new_zeros(max(most - len(each), 0))]) for each in rest
        ]
        found = (filled[0] - filled[1]).abs().sum() if there else one.sum() * 0
        if common is not None:
            share = len(its) / len(other)
            of_common, of_others = common.weights or (share, 1 - share)
            logs = [each.log().clamp(min=LEAST)[which] for each, which in ((one, own), (other, its))]
            found = of_common * unnormalized(*logs, common.beta) + of_others * found
        rows.append(found)
    return torch.stack(rows) if rows else q.sum(-1)


def unnormalized(log_q, log_p, beta):
    def kl(of, to):
        return (of.exp() * (of - to)).sum(-1)

    if beta in (0, 1):
        return kl(log_p, log_q) if beta == 0 else kl(log_q, log_p)
    log_m = (beta * log_p.exp() + (1 - beta) * log_q.exp()).log()
    return beta * kl(log_p, log_m) + (1 - beta) * kl(log_q, log_m)


@pytest.mark.parametrize("likelihood", [None, torch.linspace(0.5, -0.1, 7, dtype=torch.float64)], ids=["", "likely"])
@pytest.mark.parametrize("chunk", [2, None])
@pytest.mark.parametrize("base", SPANS.values(), ids=SPANS)
@pytest.mark.parametrize("common", WAYS.values(), ids=WAYS)
def test_losses_and_gradients_equal_dense(common, base, chunk, likelihood):
    problem = Problem(theirs=29, projection=PROJECTIONS["all"], rank=2)
    theirs = -torch.rand(7, dtype=torch.float64)
    factor = torch.linspace(0.1, 0.7, 7, dtype=torch.float64)
    spans, tempered = Spans(base, theirs, likelihood), Projection(temperature=1.7)
    teacher = replace(problem.teacher(0.5), across=Across(common), projection=tempered, spans=spans)
    how = {"bias": problem.bias, "projection": problem.projection, "want": WANT, "chunk": chunk, "factor": factor}
    total, stats = linear_loss(problem.terms, problem.index, problem.target, divergence, teacher=teacher, **how)
    q = logits_of(problem.terms, problem.index, problem.bias, problem.projection).softmax(-1)
    states = [(problem.states, problem.weight)]
    p = logits_of(states, torch.arange(7), problem.their_bias, teacher.projection).softmax(-1).detach()
    places = [n for n in range(7) if base[n] == 0]
    chosen = q.gather(-1, problem.target[:, None])[:, 0]
    ours = []
    for place in places:
        others = [n for n in range(7) if base[n] not in (0, NO_SPAN) and n + int(base[n]) == place]
        ours.append(torch.stack([chosen[n].clamp(min=1e-8) for n in others]).prod() if others else torch.ones(()))
    own = torch.stack(ours)[:, None] * q[places] if places else q[:0]
    expected = distances(own, theirs.exp()[places, None] * p[places], common)
    assert stats.divergences is not None
    torch.testing.assert_close(stats.divergences[places], expected)
    reference = (factor[places] * expected).sum()
    if likelihood is not None:
        reference = reference - (likelihood * chosen.log()).sum()
    torch.testing.assert_close(total, reference)
    found = torch.autograd.grad(2 * total, problem.leaves, allow_unused=True)
    wanted = torch.autograd.grad(2 * reference, problem.leaves, allow_unused=True)
    for one, other, leaf in zip(found, wanted, problem.leaves, strict=True):
        torch.testing.assert_close(one, torch.zeros_like(leaf) if other is None else other)


def test_without_spans_each_score_is_one():
    problem = Problem(theirs=29)
    teacher = replace(problem.teacher(0.5), across=Across())
    given, how = (problem.terms, problem.index, problem.target, divergence), {"bias": problem.bias, "want": WANT}
    each = Spans(SPANS["each its own"], torch.zeros(7, dtype=torch.float64))
    found = linear_loss(*given, teacher=teacher, **how)
    torch.testing.assert_close(found[0], linear_loss(*given, teacher=replace(teacher, spans=each), **how)[0])


def test_common_tokens_alone_are_the_divergence_of_one_vocabulary():
    problem = Problem(theirs=37)
    every = torch.arange(37)
    across = Across(Common(every, every, 0.5))
    how = {"bias": problem.bias, "want": WANT}
    given = (problem.terms, problem.index, problem.target, divergence)
    total, _ = linear_loss(*given, teacher=replace(problem.teacher(0.5), across=across), **how)
    torch.testing.assert_close(total, dense(*problem_logits(problem), 0.5).sum())


def problem_logits(problem):
    states = [(problem.states, problem.weight)]
    return (
        logits_of(problem.terms, problem.index, problem.bias, problem.projection),
        logits_of(states, torch.arange(7), problem.their_bias, problem.projection).detach(),
    )


def test_gradients_go_straight_into_grad():
    grads = []
    for accumulate in (False, True):
        problem = Problem(theirs=29)
        spans = Spans(SPANS["the last of several"], torch.zeros(7, dtype=torch.float64))
        for _ in range(3):
            total, _ = linear_loss(
                problem.terms,
                problem.index,
                problem.target,
                divergence,
                teacher=replace(problem.teacher(0.5), across=Across(), spans=spans),
                bias=problem.bias,
                want=WANT,
                accumulate=accumulate,
            )
            total.backward()
        grads.append([leaf.grad for leaf in problem.leaves])
    torch.testing.assert_close(grads[0], grads[1])


def test_memory_holds_a_chunk_of_each_models_logits():
    """Beside what the gradients take: 64 scores of 2,000 tokens and of 3,000 at a time, of 1,024."""
    torch.manual_seed(0)
    scores, vocab, theirs, chunk = 1024, 2000, 3000, 64
    student = Term(torch.randn(scores, 4).requires_grad_(), torch.randn(vocab, 4).requires_grad_())
    spans = Spans((torch.arange(scores) + 1) % 2, torch.zeros(scores))
    teacher = Teacher([Term(torch.randn(scores, 8), torch.randn(theirs, 8))], across=Across(), spans=spans)
    index, target = torch.arange(scores), torch.randint(0, vocab, (scores,))
    seen = LivingBytes()
    with seen, seen.during("head"):
        before = seen.living()
        total, _ = linear_loss([student], index, target, divergence, teacher=teacher, want=WANT, chunk=chunk)
        total.backward()
    gradients = 2 * 4 * (student.x.numel() + student.weight.numel())
    blocks = 24 << 20
    taken = seen.peaks["head"] - before - gradients
    assert taken < 4 * chunk * (2 * vocab + theirs) + blocks, taken
    assert blocks < 4 * scores * (vocab + theirs) * 2
