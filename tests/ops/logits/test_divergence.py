"""The fused head beside a teacher against dense logits: the generalized Jensen-Shannon divergence and its gradients."""

import gc
import math
from dataclasses import replace

import pytest
import torch

from lowtide.ops.logits.linear_logprobs import ChunkedHead, Teacher, Term, Want, linear_loss
from lowtide.ops.logits.logit_rows import Named, Support
from tests.support.memory.live_bytes import LivingBytes
from tests.support.references.divergences import PROJECTIONS, WANT, Problem, dense, divergence, logits_of

BETAS = [0.0, 0.1, 0.5, 1.0]


@pytest.mark.parametrize("chunk", [3, None])
@pytest.mark.parametrize("projection", PROJECTIONS.values(), ids=PROJECTIONS.keys())
@pytest.mark.parametrize("beta", BETAS)
def test_divergences_and_gradients_equal_dense(beta, projection, chunk):
    problem = Problem(projection=projection, rank=2)
    total, stats = problem.run(beta, factor=0.3, chunk=chunk)
    student, expected = problem.dense(beta)
    torch.testing.assert_close(stats.divergences, expected)
    torch.testing.assert_close(total, 0.3 * expected.sum())
    chosen = torch.log_softmax(student, -1).gather(-1, problem.target[:, None])[:, 0]
    torch.testing.assert_close(stats.logprobs, chosen)
    ours = torch.autograd.grad(2 * total, problem.leaves)
    torch.testing.assert_close(ours, torch.autograd.grad(0.6 * expected.sum(), problem.leaves))


@pytest.mark.parametrize("theirs", [30, 45])
@pytest.mark.parametrize("beta", BETAS)
def test_of_vocabularies_of_different_sizes_the_common_rows_count(beta, theirs):
    problem = Problem(theirs=theirs)
    total, stats = problem.run(beta)
    _, expected = problem.dense(beta)
    torch.testing.assert_close(stats.divergences, expected)
    ours = torch.autograd.grad(total, problem.leaves)
    torch.testing.assert_close(ours, torch.autograd.grad(expected.sum(), problem.leaves))


@pytest.mark.parametrize("theirs", [37, 30])
@pytest.mark.parametrize("tail", [False, True])
@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("of_teacher", [False, True])
def test_on_the_likeliest_tokens_of_either(of_teacher, beta, tail, theirs):
    """Values and gradients are those of dense distributions over these tokens, and one for all others."""
    problem = Problem(projection=PROJECTIONS["all"], rank=2, theirs=theirs)

    def loss(stats):
        return stats.divergences * (stats.logprobs.detach() - stats.old).exp() - 0.5 * stats.logprobs

    old = torch.linspace(-3, -1, 7, dtype=torch.float64)
    teacher = replace(problem.teacher(beta), support=Support(5, tail, of_teacher=of_teacher))
    settings = {"bias": problem.bias, "projection": problem.projection, "want": WANT, "chunk": 3}
    total, stats = linear_loss(
        problem.terms, problem.index, problem.target, loss, teacher=teacher, old=old, factor=0.3, **settings
    )
    student, _ = problem.dense(beta)
    states = [(problem.states, problem.weight)]
    taught = logits_of(states, torch.arange(7), problem.their_bias, problem.projection).detach()
    common = student[:, :theirs], taught
    place = common[of_teacher].topk(5, dim=-1).indices
    chosen = [each.softmax(-1).gather(-1, place) for each in common]
    if tail:
        chosen = [torch.cat([each, 1 - each.sum(-1, keepdim=True)], -1) for each in chosen]
    else:
        chosen = [each / each.sum(-1, keepdim=True) for each in chosen]
    expected = dense(*(each.log() for each in chosen), beta)
    torch.testing.assert_close(stats.divergences, expected)
    logprobs = common[0].log_softmax(-1).gather(-1, problem.target[:, None])[:, 0]
    reference = 0.3 * (expected * (logprobs.detach() - old).exp() - 0.5 * logprobs).sum()
    torch.testing.assert_close(total, reference)
    ours = torch.autograd.grad(total, problem.leaves)
    torch.testing.assert_close(ours, torch.autograd.grad(reference, problem.leaves))


@pytest.mark.parametrize("projection", PROJECTIONS.values(), ids=PROJECTIONS.keys())
@pytest.mark.parametrize("tail", [False, True])
@pytest.mark.parametrize("beta", BETAS)
def test_on_the_tokens_that_a_teacher_names(beta, tail, projection):
    """Of a teacher of which no more is known; rows that name fewer tokens than others are filled up."""
    problem = Problem(projection=projection, rank=2)

    def loss(stats):
        return stats.divergences * 1.5 - 0.5 * stats.logprobs + 0.1 * stats.entropies

    of_teacher = torch.randn(7, 37, dtype=torch.float64).log_softmax(-1)
    logprobs, tokens = of_teacher.topk(4, dim=-1)
    kept = [4, 2, 4, 1, 3, 4, 4]
    for row, count in enumerate(kept):
        logprobs[row, count:], tokens[row, count:] = -math.inf, 0
    teacher = Teacher((), beta=beta, support=Support(4, tail, named=True), named=Named(tokens, logprobs))
    settings = {"bias": problem.bias, "projection": projection, "want": Want(entropies=True, divergences=True)}
    total, stats = linear_loss(
        problem.terms, problem.index, problem.target, loss, teacher=teacher, factor=0.3, chunk=3, **settings
    )
    student = problem.dense(beta)[0].log_softmax(-1)
    expected = []
    for row, count in enumerate(kept):
        chosen = [each[row, tokens[row, :count]].exp() for each in (student, of_teacher)]
        if tail:
            chosen = [torch.cat([each, 1 - each.sum(-1, keepdim=True)], -1) for each in chosen]
        else:
            chosen = [each / each.sum(-1, keepdim=True) for each in chosen]
        expected.append(dense(*(each.log()[None] for each in chosen), beta))
    expected = torch.cat(expected)
    torch.testing.assert_close(stats.divergences, expected)
    entropies = -(student.exp() * student).sum(-1)
    own = student.gather(-1, problem.target[:, None])[:, 0]
    reference = 0.3 * (1.5 * expected - 0.5 * own + 0.1 * entropies).sum()
    torch.testing.assert_close(total, reference)
    ours = torch.autograd.grad(total, problem.leaves)
    torch.testing.assert_close(ours, torch.autograd.grad(reference, problem.leaves))


def test_a_support_as_large_as_the_vocabulary_is_the_whole_divergence():
    problem = Problem()
    settings = {"bias": problem.bias, "want": WANT}
    for tail in (False, True):
        teacher = replace(problem.teacher(0.5), support=Support(50, tail))
        found = linear_loss(problem.terms, problem.index, problem.target, divergence, teacher=teacher, **settings)
        torch.testing.assert_close(found[1].divergences, problem.dense(0.5)[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("beta", BETAS)
def test_beside_other_statistics(beta):
    """A loss of divergence, likelihood, mean log-probability and entropy, each with its gradient."""
    problem = Problem(projection=PROJECTIONS["all"])

    def loss(stats):
        return stats.divergences - 0.5 * stats.logprobs + 0.1 * stats.entropies - 0.2 * stats.mean_logprobs

    total, stats = problem.run(beta, loss, want=Want(True, True, True, divergences=True))
    student, expected = problem.dense(beta)
    logprobs = torch.log_softmax(student, -1)
    chosen = logprobs.gather(-1, problem.target[:, None])[:, 0]
    entropies = -(logprobs.exp() * logprobs).sum(-1)
    torch.testing.assert_close(stats.entropies, entropies)
    assert torch.equal(stats.top1, logprobs.argmax(-1) == problem.target)
    reference = (expected - 0.5 * chosen + 0.1 * entropies - 0.2 * logprobs.mean(-1)).sum()
    torch.testing.assert_close(total, reference)
    ours = torch.autograd.grad(total, problem.leaves)
    torch.testing.assert_close(ours, torch.autograd.grad(reference, problem.leaves))


def test_a_teacher_gets_no_gradient():
    problem = Problem()
    problem.run(0.5)[0].backward()
    assert problem.weight.grad is None
    assert problem.states.grad is None
    assert problem.terms[0].weight.grad is not None


@pytest.mark.parametrize("beta", BETAS)
def test_a_student_that_is_its_teacher_learns_nothing(beta):
    problem = Problem(dtype=torch.float32)
    x, weight = problem.terms[0]
    same = Teacher([Term(x.detach()[problem.index], weight.detach())], problem.bias.detach(), beta=beta)
    total, stats = linear_loss(
        problem.terms, problem.index, problem.target, divergence, teacher=same, want=WANT, bias=problem.bias
    )
    total.backward()
    assert stats.divergences.abs().max() < 1e-6
    assert weight.grad.abs().max() < 1e-6


def test_far_apart_distributions_stay_finite():
    """Probabilities that float32 rounds to 0 have logarithms all the same."""
    problem = Problem(dtype=torch.float32)
    with torch.no_grad():
        problem.terms[0].weight.mul_(300)
        problem.weight.mul_(300)
    for beta in BETAS:
        total, stats = problem.run(beta)
        _, expected = problem.dense(beta) if beta in (0, 1) else (None, None)
        assert stats.divergences.isfinite().all()
        assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(total, problem.leaves))
        if expected is not None:
            torch.testing.assert_close(stats.divergences, expected, rtol=1e-4, atol=1e-3)


def test_accumulating_straight_into_grad():
    grads = []
    for accumulate in (False, True):
        problem = Problem()
        for _ in range(3):
            problem.run(0.5, accumulate=accumulate)[0].backward()
        grads.append([leaf.grad for leaf in problem.leaves])
    torch.testing.assert_close(grads[0], grads[1])


def test_bfloat16_under_autocast_is_near_float32():
    problem = Problem(dtype=torch.float32)
    _, expected = problem.dense(0.5)
    (wanted,) = torch.autograd.grad(expected.sum(), problem.terms[0].weight)
    with torch.autocast("cpu", torch.bfloat16):
        total, _ = problem.run(0.5)
    (grad,) = torch.autograd.grad(total, problem.terms[0].weight)
    assert grad.dtype == torch.float32
    assert (grad - wanted).norm() / wanted.norm() < 0.05


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize(("own", "theirs"), [(torch.float64, torch.float32), (torch.float32, torch.bfloat16)])
def test_a_teacher_of_another_dtype(own, theirs, beta):
    problem = Problem(dtype=own)
    with torch.no_grad():
        for each in (problem.states, problem.weight, problem.their_bias):
            each.copy_(each.to(theirs))
    _, expected = problem.dense(beta)
    problem.states, problem.weight = problem.states.detach().to(theirs), problem.weight.detach().to(theirs)
    problem.their_bias = problem.their_bias.detach().to(theirs)
    _, stats = problem.run(beta)
    assert stats.divergences.dtype == own
    torch.testing.assert_close(stats.divergences, expected, rtol=0.05, atol=0.05)


def test_nothing_to_score_keeps_the_graph():
    problem = Problem()
    none = torch.empty(0, dtype=torch.long)
    teacher = Teacher([Term(problem.states[:0], problem.weight)])
    total, _ = linear_loss(problem.terms, none, none, divergence, teacher=teacher, want=WANT)
    total.backward()
    assert total == 0
    assert problem.terms[0].x.grad.abs().sum() == 0


@pytest.mark.parametrize("beta", BETAS)
def test_memory_holds_a_chunk_of_each_models_logits(beta):
    """Beside what the gradients take: 64 scores of 2,000 tokens at a time, of 1,024."""
    torch.manual_seed(0)
    scores, vocab, chunk = 1024, 2000, 64
    student = Term(torch.randn(scores, 4).requires_grad_(), torch.randn(vocab, 4).requires_grad_())
    teacher = Teacher([Term(torch.randn(scores, 8), torch.randn(vocab, 8))], beta=beta)
    index, target = torch.arange(scores), torch.randint(0, vocab, (scores,))
    seen = LivingBytes()
    with seen, seen.during("head"):
        before = seen.living()
        linear_loss([student], index, target, divergence, teacher=teacher, want=WANT, chunk=chunk)
    gradients = 4 * (student.x.numel() + student.weight.numel())
    blocks = 8 << 20  # of 1 MiB each, for what is between
    assert seen.peaks["head"] - before - gradients < 2 * 4 * chunk * vocab + blocks < 4 * scores * vocab * 2


def test_nothing_waits_for_the_collector():
    """A head and its chunks of logits are freed where they are let go, and not where cycles are looked for."""
    gc.collect()
    gc.disable()
    try:
        total, _ = Problem().run(0.5)
        total.backward()
        del total
        assert not [each for each in gc.get_objects() if isinstance(each, ChunkedHead)]
    finally:
        gc.enable()
