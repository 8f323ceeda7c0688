"""The chunked head against dense logits: values, every gradient, every option."""

import pytest
import torch
from torch.autograd import gradcheck
from torch.utils.flop_counter import FlopCounterMode

from lowtide.ops.in_place import takes_gradient_in_place
from lowtide.ops.logits import linear_logprobs as linear_logprobs_module
from lowtide.ops.logits.linear_logprobs import (
    Projection,
    Term,
    TokenStats,
    Want,
    chunk_rows,
    linear_logprobs,
    linear_loss,
)

ALL = Want(entropies=True, mean_logprobs=True, top1=True)
PROJECTIONS = {
    "plain": Projection(),
    "temperature": Projection(temperature=0.7),
    "scale": Projection(scale=0.25),
    "softcap": Projection(softcap=2.0),
    "all": Projection(scale=1.5, softcap=3.0, temperature=1.3),
}


def dense(terms, index, target, bias=None, projection=PROJECTIONS["plain"]) -> TokenStats:
    logits = sum(term.x[index] @ term.weight.T for term in terms)
    logits = logits if bias is None else logits + bias
    logits = logits * projection.scale
    if projection.softcap is not None:
        logits = projection.softcap * torch.tanh(logits / projection.softcap)
    logprobs = torch.log_softmax(logits / projection.temperature, -1)
    return TokenStats(
        logprobs.gather(-1, target[:, None])[:, 0],
        -(logprobs.exp() * logprobs).sum(-1),
        logprobs.mean(-1),
        logprobs.argmax(-1) == target,
    )


def problem(dtype=torch.float64, rank=0, bias=False, vocab=37):
    torch.manual_seed(0)
    leaf = lambda *shape: torch.randn(*shape, dtype=dtype).requires_grad_()  # noqa: E731
    terms = [Term(leaf(9, 5), leaf(vocab, 5))]
    if rank:
        terms.append(Term(leaf(9, rank), leaf(vocab, rank)))
    index = torch.tensor([0, 2, 2, 3, 5, 8, 8])
    target = torch.randint(0, vocab, (7,))
    return terms, index, target, leaf(vocab) if bias else None


def leaves(terms, bias):
    return [t for term in terms for t in term] + ([bias] if bias is not None else [])


@pytest.mark.parametrize("chunk", [1, 3, None])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("projection", PROJECTIONS.values(), ids=PROJECTIONS.keys())
def test_statistics_and_gradients_equal_dense(projection, rank, bias, chunk):
    terms, index, target, bias = problem(rank=rank, bias=bias)
    stats = linear_logprobs(terms, index, target, bias=bias, projection=projection, want=ALL, chunk=chunk)
    expected = dense(terms, index, target, bias, projection)
    torch.manual_seed(1)
    weights = torch.randn(3, 7, dtype=torch.float64)
    for name in ("logprobs", "entropies", "mean_logprobs"):
        torch.testing.assert_close(getattr(stats, name), getattr(expected, name))
    assert torch.equal(stats.top1, expected.top1)
    combine = lambda s: (weights * torch.stack([s.logprobs, s.entropies, s.mean_logprobs])).sum()  # noqa: E731
    ours = torch.autograd.grad(combine(stats), leaves(terms, bias))
    theirs = torch.autograd.grad(combine(expected), leaves(terms, bias))
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("want", [Want(), ALL], ids=["alone", "beside others"])
@pytest.mark.parametrize("chunk", [1, 3, None])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("projection", PROJECTIONS.values(), ids=PROJECTIONS.keys())
def test_gradients_of_logprobs_equal_dense(projection, frozen, rank, bias, chunk, want):
    terms, index, target, bias = problem(rank=rank, bias=bias)
    if frozen:
        terms = [Term(term.x, term.weight.detach()) for term in terms]
        bias = None if bias is None else bias.detach()
    slopes = torch.randn(7, dtype=torch.float64)
    found = linear_logprobs(terms, index, target, bias=bias, projection=projection, want=want, chunk=chunk).logprobs
    expected = dense(terms, index, target, bias, projection).logprobs
    trained = [leaf for leaf in leaves(terms, bias) if leaf.requires_grad]
    for factor in (1.0, -2.0):  # a second backward through the same graph
        ours = torch.autograd.grad(found @ slopes * factor, trained, retain_graph=True)
        theirs = torch.autograd.grad(expected @ slopes * factor, trained, retain_graph=True)
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(
    ("frozen", "chunk", "products"),
    [(False, None, 3), (False, 4, 3.5), (True, None, 2), (True, 2, 2)],
    ids=["one chunk", "two chunks", "frozen", "frozen, chunks"],
)
def test_the_last_chunk_and_a_frozen_head_are_not_computed_again(frozen, chunk, products):
    terms, index, target, _ = problem()
    index, target = torch.cat([index, index[:1]]), torch.cat([target, target[:1]])
    if frozen:
        terms = [Term(terms[0].x, terms[0].weight.detach())]
    product = lambda into, first, second, **_: 2 * first[0] * first[1] * second[1]  # noqa: E731
    with FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: product}) as counted:
        linear_logprobs(terms, index, target, chunk=chunk).logprobs.sum().backward()
    assert counted.get_total_flops() == products * 2 * len(index) * terms[0].weight.numel()


def test_a_frozen_head_is_not_read_in_backward():
    terms, index, target, _ = problem(torch.float32)
    weight = terms[0].weight.detach()
    with torch.autocast("cpu", torch.bfloat16):
        (expected,) = torch.autograd.grad(dense([Term(terms[0].x, weight)], index, target).logprobs.sum(), terms[0].x)
        found = linear_logprobs([Term(terms[0].x, weight)], index, target).logprobs.sum()
    weight.untyped_storage().resize_(0)  # as where it is gathered for forward alone
    found.backward()
    torch.testing.assert_close(terms[0].x.grad, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.slow
@pytest.mark.parametrize("projection", PROJECTIONS.values(), ids=PROJECTIONS.keys())
def test_gradcheck(projection):
    terms, index, target, bias = problem(rank=2, bias=True, vocab=11)

    def run(x, w, a, b, bias):
        stats = linear_logprobs(
            [Term(x, w), Term(a, b)], index, target, bias=bias, projection=projection, want=ALL, chunk=3
        )
        return stats.logprobs, stats.entropies, stats.mean_logprobs

    assert gradcheck(run, leaves(terms, bias))


LOSSES = {
    "nll": lambda s: -s.logprobs,
    "dft": lambda s: -s.logprobs * s.logprobs.detach().exp(),
    "smoothed": lambda s: -0.9 * s.logprobs - 0.1 * s.mean_logprobs,
    "entropy": lambda s: -s.logprobs + 0.01 * s.entropies,
}


@pytest.mark.parametrize("chunk", [2, None])
@pytest.mark.parametrize("projection", PROJECTIONS.values(), ids=PROJECTIONS.keys())
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES.keys())
def test_loss_known_in_forward_equals_dense(loss, projection, chunk):
    terms, index, target, bias = problem(rank=2, bias=True)
    total, stats = linear_loss(
        terms, index, target, loss, factor=0.3, bias=bias, projection=projection, want=ALL, chunk=chunk
    )
    expected = dense(terms, index, target, bias, projection)
    reference = 0.3 * loss(expected).sum()
    torch.testing.assert_close(total, reference)
    torch.testing.assert_close(stats.logprobs, expected.logprobs)
    ours = torch.autograd.grad(2 * total, leaves(terms, bias))
    torch.testing.assert_close(ours, torch.autograd.grad(2 * reference, leaves(terms, bias)))


@pytest.mark.parametrize("variant", ["logprobs", "loss"])
def test_accumulating_straight_into_grad(variant):
    terms, index, target, _ = problem()

    def step(accumulate):
        if variant == "loss":
            linear_loss(terms, index, target, LOSSES["nll"], accumulate=accumulate)[0].backward()
        else:
            (-linear_logprobs(terms, index, target, accumulate=accumulate).logprobs.sum()).backward()

    grads = []
    for accumulate in (False, True):
        for tensor in terms[0]:
            tensor.grad = None
        for _ in range(3):
            step(accumulate)
        grads.append([tensor.grad.clone() for tensor in terms[0]])
    torch.testing.assert_close(grads[0], grads[1])


@pytest.mark.parametrize("variant", ["logprobs", "loss"])
def test_two_losses_on_a_weight_that_go_backward_together_add_up(variant):
    terms, index, target, _ = problem()

    def loss(accumulate):
        if variant == "loss":
            return linear_loss(terms, index, target, LOSSES["nll"], accumulate=accumulate)[0]
        return -linear_logprobs(terms, index, target, accumulate=accumulate).logprobs.sum()

    grads = []
    for accumulate in (False, True):
        for tensor in terms[0]:
            tensor.grad = None
        (loss(accumulate) + 2 * loss(accumulate)).backward()
        grads.append([tensor.grad.clone() for tensor in terms[0]])
    torch.testing.assert_close(grads[0], grads[1])


@pytest.mark.parametrize("variant", ["logprobs", "loss"])
@pytest.mark.parametrize("before", [False, True])
def test_hooks_of_a_weight_see_its_gradient(variant, before):
    (terms, index, target, _), seen = problem(), []
    weight = terms[0].weight
    weight.grad = torch.ones_like(weight) if before else None
    weight.register_hook(lambda grad: seen.append(grad.clone()) or grad * 0)
    if variant == "loss":
        linear_loss(terms, index, target, LOSSES["nll"], accumulate=True)[0].backward()
    else:
        (-linear_logprobs(terms, index, target, accumulate=True).logprobs.sum()).backward()
    (gradient,) = seen
    assert gradient.any()
    assert torch.equal(weight.grad, torch.full_like(weight, float(before)))


@pytest.mark.parametrize("variant", ["logprobs", "loss"])
def test_a_weight_with_a_hook_after_accumulation_gets_its_gradient_from_autograd(variant):
    (terms, index, target, _), seen = problem(), []
    weight = terms[0].weight
    weight.grad = torch.ones_like(weight)
    weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad.clone()))
    if variant == "loss":
        loss = linear_loss(terms, index, target, LOSSES["nll"], accumulate=True)[0]
    else:
        loss = -linear_logprobs(terms, index, target, accumulate=True).logprobs.sum()
    assert torch.equal(weight.grad, torch.ones_like(weight))  # not touched in forward
    (through_autograd,) = torch.autograd.grad(loss, weight, retain_graph=variant == "logprobs", allow_unused=True)
    assert through_autograd is not None
    assert not seen
    if variant == "logprobs":
        loss.backward()
        torch.testing.assert_close(*seen, through_autograd + 1)


@pytest.mark.parametrize("kind", ["register_hook", "register_prehook"])
def test_a_weight_whose_node_has_a_hook_gets_its_gradient_from_autograd(kind):
    (terms, index, target, _), seen = problem(), []
    weight = terms[0].weight
    node = torch.autograd.graph.get_gradient_edge(weight).node
    handle = getattr(node, kind)(lambda *gradients: seen.append(gradients))
    assert not takes_gradient_in_place(weight)
    (-linear_logprobs(terms, index, target, accumulate=True).logprobs.sum()).backward()
    assert len(seen) == 1
    handle.remove()
    assert takes_gradient_in_place(weight)
    (-linear_logprobs(terms, index, target, accumulate=True).logprobs.sum()).backward()
    assert len(seen) == 1


def test_accumulating_reaches_the_weight_under_hooks_for_saved_tensors():
    """What such hooks give back in backward is another tensor with the weight's values."""
    terms, index, target, _ = problem()
    (-linear_logprobs(terms, index, target).logprobs.sum()).backward()
    expected, terms[0].weight.grad = terms[0].weight.grad, None
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda packed: packed):
        total = -linear_logprobs(terms, index, target, accumulate=True).logprobs.sum()
    total.backward()
    torch.testing.assert_close(terms[0].weight.grad, expected)


def test_a_frozen_head_gets_no_gradient():
    terms, index, target, _ = problem()
    frozen = [Term(terms[0].x, terms[0].weight.detach())]
    linear_loss(frozen, index, target, LOSSES["nll"], accumulate=True)[0].backward()
    assert frozen[0].weight.grad is None
    assert terms[0].x.grad is not None


def test_nothing_to_score_keeps_the_graph():
    terms, _, _, _ = problem()
    none = torch.empty(0, dtype=torch.long)
    for total in (
        linear_loss(terms, none, none, LOSSES["nll"])[0],
        linear_logprobs(terms, none, none).logprobs.sum(),
    ):
        total.backward()
        assert total == 0
    assert terms[0].x.grad.abs().sum() == 0


@pytest.mark.parametrize("chunk", [3, None])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("run", ["loss", "logprobs"])
def test_bfloat16_under_autocast_is_near_float32(run, bias, chunk):
    """Chunks of 1, 3 or 7 rows, which are filled up there."""
    terms, index, target, bias = problem(torch.float32, bias=bias)
    wanted = torch.autograd.grad(-dense(terms, index, target, bias).logprobs.sum(), leaves(terms, bias))
    with torch.autocast("cpu", torch.bfloat16):
        if run == "loss":
            total, stats = linear_loss(terms, index, target, LOSSES["nll"], bias=bias, chunk=chunk)
        else:
            stats = linear_logprobs(terms, index, target, bias=bias, chunk=chunk)
            total = -stats.logprobs.sum()
    assert len(stats.logprobs) == len(index)
    for found, expected in zip(torch.autograd.grad(total, leaves(terms, bias)), wanted, strict=True):
        assert found.dtype == torch.float32
        assert (found - expected).norm() / expected.norm() < 0.05


@pytest.mark.parametrize("accumulate", [False, True])
def test_gradients_too_small_for_float16_survive_a_loss_scaler(accumulate):
    scale, factor = 2.0**16, 2.0**-24  # one over millions of scores; a probability times that is no float16
    terms, index, target, _ = problem(vocab=301)
    exact = [leaf.detach().requires_grad_() for leaf in leaves(terms, None)]
    linear_loss([Term(*exact)], index, target, lambda stats: -stats.logprobs, factor=factor)[0].backward()

    def relative_error(grad_scale: float) -> float:
        x, weight = (leaf.detach().half().requires_grad_() for leaf in exact)
        x.grad, weight.grad = torch.zeros_like(x), torch.zeros_like(weight)
        loss, _ = linear_loss(
            [Term(x, weight)], index, target, lambda stats: -stats.logprobs,
            factor=factor, grad_scale=grad_scale, accumulate=accumulate and grad_scale == scale,
        )  # fmt: skip
        (loss * scale).backward()
        pairs = [(leaf.grad.double() / scale, wanted.grad) for leaf, wanted in zip((x, weight), exact, strict=True)]
        return max(float((got - wanted).norm() / wanted.norm()) for got, wanted in pairs)

    assert relative_error(scale) < 0.02
    assert relative_error(1.0) > 0.2


@pytest.mark.parametrize("vocab", [5, 31, 32, 101, 640])
@pytest.mark.parametrize("scores", [1, linear_logprobs_module.FEW_ROWS, linear_logprobs_module.FEW_ROWS + 1])
def test_logits_that_are_read_are_the_product_whatever_the_vocabulary(vocab, scores):
    x, weight, bias = (torch.randn(*size, dtype=torch.float64) for size in ((40, 7), (vocab, 7), (vocab,)))
    index = torch.arange(scores)
    found = linear_logprobs_module.read_logits(
        [linear_logprobs_module.Term(x, weight)], index, lambda logits, span: logits.t().clone(), bias=bias
    )
    torch.testing.assert_close(found, (x[index] @ weight.t() + bias).t())


@pytest.mark.parametrize(
    ("vocab", "dtype", "kind", "rows"),
    [
        (32_000, torch.float32, "cpu", 262),
        (32_000, torch.bfloat16, "cpu", 256),  # half the workspace does, in even rows
        (151_936, torch.float32, "cpu", 55),
        (151_936, torch.bfloat16, "cpu", 96),
        (32_000, torch.bfloat16, "cuda", 4194),
        (10_000_000, torch.float32, "cpu", 16),
    ],
)
def test_chunks_have_enough_rows_within_their_workspace(vocab, dtype, kind, rows):
    assert chunk_rows(vocab, dtype, kind) == rows
