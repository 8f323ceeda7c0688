"""The fused head on CUDA: the Triton kernels against plain torch in float64, and the memory that the head takes."""

import pytest
import torch

from lowtide.ops.logits.linear_logprobs import CHUNK_BYTES, Projection, Term, Want, linear_logprobs, linear_loss
from lowtide.ops.logits.logit_rows import Slopes, TorchRows
from lowtide.ops.logits.rows_of import rows_of

PROJECTIONS = {
    "plain": Projection(),
    "scaled": Projection(scale=0.0625, temperature=0.7),
    "softcap": Projection(softcap=30.0),
    "all": Projection(scale=1.5, softcap=10.0, temperature=1.3),
}
WANTS = {"logprobs": Want(), "entropies": Want(entropies=True), "all": Want(True, True, True)}
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}
ALL = Want(entropies=True, mean_logprobs=True)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("vocab", [300, 50257, 151936])
@pytest.mark.parametrize("want", WANTS.values(), ids=WANTS)
@pytest.mark.parametrize("projection", PROJECTIONS.values(), ids=PROJECTIONS)
def test_kernels_equal_plain_torch(projection, want, vocab, dtype):
    logits = (4 * torch.randn(17, vocab, device="cuda")).to(dtype)
    target = logits.argmax(-1)
    target[::2] = torch.randint(0, vocab, (9,), device="cuda")
    ours, theirs = logits.clone(), logits.double()
    fast, plain = rows_of(ours, target, projection, want), TorchRows(theirs, target, projection)
    assert type(fast).__name__ == "TritonRows"

    stats, expected = fast.stats(want, keep=True), plain.stats(want, keep=True)
    for mine, reference in zip(stats, expected, strict=True):
        torch.testing.assert_close(mine, reference.to(mine.dtype), rtol=1e-5, atol=1e-5)

    slopes = [torch.randn(17, device="cuda") if w else None for w in (True, want.entropies, want.mean_logprobs)]
    fast.gradient(Slopes(*slopes), stats.entropies)
    plain.gradient(Slopes(*(s if s is None else s.double() for s in slopes)), expected.entropies)
    assert ours.dtype == dtype
    assert (ours.double() - theirs).norm() <= TOLERANCE[dtype] * theirs.norm()


def dense(leaves, index, target, projection):
    """Log-probs, entropies and mean log-probs by the textbook."""
    x, weight = leaves
    logits = x[index] @ weight.T * projection.scale
    if projection.softcap is not None:
        logits = projection.softcap * torch.tanh(logits / projection.softcap)
    logprobs = torch.log_softmax(logits / projection.temperature, -1)
    return torch.stack(
        [logprobs.gather(-1, target[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1), logprobs.mean(-1)]
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("variant", ["logprobs", "loss"])
@pytest.mark.parametrize("projection", PROJECTIONS.values(), ids=PROJECTIONS)
def test_the_head_equals_dense(projection, variant, dtype):
    torch.backends.cuda.matmul.allow_tf32 = False
    inputs = [torch.randn(120, 64, device="cuda").to(dtype), (torch.randn(5000, 64, device="cuda") / 8).to(dtype)]
    index, target = torch.arange(0, 120, 2, device="cuda"), torch.randint(0, 5000, (60,), device="cuda")
    mix = torch.tensor([[1.0], [0.1], [0.2]], device="cuda")
    ours = [t.clone().requires_grad_() for t in inputs]
    theirs = [t.double().requires_grad_() for t in inputs]
    if variant == "loss":
        loss = lambda s: s.logprobs + 0.1 * s.entropies + 0.2 * s.mean_logprobs  # noqa: E731
        total, _ = linear_loss([Term(*ours)], index, target, loss, projection=projection, want=ALL, chunk=16)
    else:
        stats = linear_logprobs([Term(*ours)], index, target, projection=projection, want=ALL, chunk=16)
        total = (mix * torch.stack([stats.logprobs, stats.entropies, stats.mean_logprobs])).sum()
    expected = (mix.double() * dense(theirs, index, target, projection)).sum()
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    assert abs(total.double() - expected) <= tolerance * abs(expected)
    grads = zip(torch.autograd.grad(total, ours), torch.autograd.grad(expected, theirs), strict=True)
    for mine, reference in grads:
        assert mine.dtype == dtype
        assert (mine.double() - reference).norm() <= tolerance * reference.norm()


@pytest.mark.parametrize("variant", ["logprobs", "loss"])
def test_the_head_holds_one_chunk_of_logits_in_their_own_dtype(variant, peak_above_start):
    tokens, hidden, vocab = 8192, 128, 151936  # all logits in float32 would be 5 GB
    x = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16).requires_grad_()
    weight = torch.randn(vocab, hidden, device="cuda", dtype=torch.bfloat16).requires_grad_()
    index = torch.arange(tokens, device="cuda")
    target = torch.randint(0, vocab, (tokens,), device="cuda")

    def step() -> None:
        x.grad = weight.grad = None
        if variant == "loss":
            linear_loss([Term(x, weight)], index, target, lambda s: -s.logprobs)[0].backward()
        else:
            linear_logprobs([Term(x, weight)], index, target).logprobs.sum().backward()

    step()  # kernels are compiled, the matmul library has its workspace
    x.grad = weight.grad = None
    gradients = 2 * (x.numel() + weight.numel())
    assert peak_above_start(step) < CHUNK_BYTES["cuda"] + 2 * gradients + (16 << 20)
