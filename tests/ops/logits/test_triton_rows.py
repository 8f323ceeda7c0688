"""The Triton kernels in Triton's interpreter, on the CPU, against plain torch in float64.

They run for real in tests/gpu/test_rows.py; here every option is there, at sizes that leave a part of a block over.
"""

from importlib.util import find_spec

import pytest
import torch

from lowtide.ops.logits import linear_logprobs as head
from lowtide.ops.logits.linear_logprobs import Projection, Term, Want, linear_logprobs, linear_loss
from lowtide.ops.logits.logit_rows import Slopes, TorchRows

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="needs triton, which comes with the CUDA builds of torch"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="Triton compiles here instead of interpreting: see tests/gpu"),
]

ROWS, VOCAB = 3, 75
PROJECTIONS = {
    "plain": Projection(),
    "all": Projection(scale=1.5, softcap=3.0, temperature=1.3),
}
WANTS = {"logprobs": Want(), "all": Want(True, True, True)}
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


@pytest.fixture
def triton_rows(monkeypatch: pytest.MonkeyPatch):
    from lowtide.ops.logits import triton_rows

    monkeypatch.setattr(triton_rows, "BLOCK", 32)
    return triton_rows


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("want", WANTS.values(), ids=WANTS)
@pytest.mark.parametrize("projection", PROJECTIONS.values(), ids=PROJECTIONS)
def test_rows_equal_plain_torch(triton_rows, projection, want, dtype):
    logits = (3 * torch.randn(ROWS, VOCAB)).to(dtype)
    target = logits.argmax(-1)
    target[0] = 7
    ours, theirs = logits.clone(), logits.double()
    fast = triton_rows.TritonRows(ours, target, projection)
    plain = TorchRows(theirs, target, projection)

    stats, expected = fast.stats(want, keep=True), plain.stats(want, keep=True)
    torch.testing.assert_close([*stats], [e if e.dtype == torch.bool else e.float() for e in expected])
    assert torch.equal(ours, logits)

    slopes = [torch.randn(ROWS) if wanted else None for wanted in (True, want.entropies, want.mean_logprobs)]
    fast.gradient(Slopes(*slopes), stats.entropies)
    plain.gradient(Slopes(*(s if s is None else s.double() for s in slopes)), expected.entropies)
    assert ours.dtype == dtype
    assert (ours.double() - theirs).norm() <= TOLERANCE[dtype] * theirs.norm()


@pytest.mark.parametrize("projection", PROJECTIONS.values(), ids=PROJECTIONS)
def test_rows_of_which_some_columns_are_elsewhere(triton_rows, projection):
    logits, want = 3 * torch.randn(ROWS, VOCAB), Want(entropies=True)
    target = torch.tensor([7, VOCAB - 1, 50])
    whole = TorchRows(logits.double(), target, projection)
    expected = whole.stats(want, keep=True)
    slopes = Slopes(torch.randn(ROWS), torch.randn(ROWS))
    chosen, found = torch.zeros(ROWS), []
    for first, last in ((0, 40), (40, VOCAB)):
        here = (target >= first) & (target < last)
        part = logits[:, first:last].contiguous()
        rows = triton_rows.TritonRows(part, torch.where(here, target - first, -1), projection, split=True)
        at_target, top = rows.ends()
        torch.testing.assert_close(top, TorchRows(part.clone(), target * 0, projection).x.amax(1))
        chosen = torch.where(here, at_target, chosen)
        rows.stats(want, keep=True)
        rows.settle(expected.lse.float())
        rows.gradient(slopes, expected.entropies.float())
        found.append(part)
    torch.testing.assert_close(chosen - expected.lse.float(), expected.logprobs.float())
    whole.gradient(Slopes(*(s if s is None else s.double() for s in slopes)), expected.entropies)
    torch.testing.assert_close(torch.cat(found, 1), whole.x.float())


def test_one_large_logit_overflows_nothing(triton_rows):
    logits = torch.full((2, VOCAB), -1e4)
    logits[0, 40], logits[1, 3] = 1e4, 0.0
    stats = triton_rows.TritonRows(logits, torch.tensor([40, 3]), Projection()).stats(Want(True, True, True), False)
    assert stats.logprobs.tolist() == stats.entropies.tolist() == [0.0, 0.0]
    assert stats.top1.all()


@pytest.mark.parametrize("variant", ["logprobs", "loss"])
def test_the_head_on_the_kernels_equals_the_head_without(triton_rows, monkeypatch, variant):
    x, weight = torch.randn(5, 4), torch.randn(VOCAB, 4)
    index, target = torch.tensor([0, 1, 1, 3]), torch.randint(0, VOCAB, (4,))
    found = []
    for rows in (TorchRows, triton_rows.TritonRows):
        monkeypatch.setattr(head, "rows_of", lambda *args, rows=rows: rows(*args[:3]))
        leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
        if variant == "loss":
            want = Want(mean_logprobs=True, top1=True)
            loss = lambda s: -0.9 * s.logprobs - 0.1 * s.mean_logprobs  # noqa: E731
            total, stats = linear_loss([Term(*leaves)], index, target, loss, want=want, chunk=3)
        else:
            stats = linear_logprobs([Term(*leaves)], index, target, want=Want(entropies=True), chunk=3)
            total = (stats.logprobs + 0.1 * stats.entropies).sum()
        found.append([total.detach(), stats.logprobs.detach(), *torch.autograd.grad(total, leaves)])
    torch.testing.assert_close(*found)
