"""A small problem of the fused head beside a teacher, and its divergences from dense logits."""

import torch
import torch.nn.functional as F

from lowtide.ops.logits.linear_logprobs import Projection, Teacher, Term, Want, linear_loss

PROJECTIONS = {
    "plain": Projection(),
    "temperature": Projection(temperature=0.7),
    "all": Projection(scale=1.5, softcap=3.0, temperature=1.3),
}
WANT = Want(divergences=True)


def divergence(stats):
    return stats.divergences


def logits_of(terms, index, bias, projection):
    logits = sum(x[index] @ weight.T for x, weight in terms)
    logits = (logits if bias is None else logits + bias) * projection.scale
    if projection.softcap is not None:
        logits = projection.softcap * torch.tanh(logits / projection.softcap)
    return logits / projection.temperature


def dense(student, teacher, beta):
    """[scores] from logits, by the formula of the paper with the KL divergences of torch."""
    common = min(student.shape[1], teacher.shape[1])
    log_q, log_p = (torch.log_softmax(each[:, :common], -1) for each in (student, teacher))

    def kl(of, to):
        return F.kl_div(to, of, reduction="none", log_target=True).sum(-1)

    if beta in (0, 1):
        return kl(log_p, log_q) if beta == 0 else kl(log_q, log_p)
    log_m = (beta * log_p.exp() + (1 - beta) * log_q.exp()).log()
    return beta * kl(log_p, log_m) + (1 - beta) * kl(log_q, log_m)


class Problem:
    """Tokens 1 and 4 of 9 are not scored, one is scored twice; student and teacher differ in hidden size."""

    def __init__(self, dtype=torch.float64, vocab=37, theirs=37, projection=PROJECTIONS["plain"], rank=0):
        torch.manual_seed(0)
        leaf = lambda *shape: torch.randn(*shape, dtype=dtype).requires_grad_()  # noqa: E731
        self.terms, self.bias, self.projection = [Term(leaf(9, 5), leaf(vocab, 5))], leaf(vocab), projection
        if rank:
            self.terms.append(Term(leaf(9, rank), leaf(vocab, rank)))
        self.index = torch.tensor([0, 2, 2, 3, 5, 8, 7])
        self.target = torch.randint(0, min(vocab, theirs), (7,))
        self.states, self.weight, self.their_bias = leaf(7, 8), leaf(theirs, 8), leaf(theirs)

    def teacher(self, beta):
        return Teacher([Term(self.states, self.weight)], self.their_bias, self.projection, beta)

    def run(self, beta, loss=divergence, **options):
        settings = {"bias": self.bias, "projection": self.projection, "want": WANT, **options}
        return linear_loss(self.terms, self.index, self.target, loss, teacher=self.teacher(beta), **settings)

    def dense(self, beta):
        student = logits_of(self.terms, self.index, self.bias, self.projection)
        teacher = logits_of([(self.states, self.weight)], torch.arange(7), self.their_bias, self.projection)
        return student, dense(student, teacher.detach(), beta)

    @property
    def leaves(self):
        return [*(tensor for term in self.terms for tensor in term), self.bias]
