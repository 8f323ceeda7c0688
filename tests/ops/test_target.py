"""What is chosen for the device that is planned for, on tensors that lie on a CPU."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lowtide.ops.attention.attention_flash import why_not_varlen
from lowtide.ops.attention.attention_flex import why_not_flex
from lowtide.ops.attention.attention_grouped import grouped_attention
from lowtide.ops.attention.attention_plan import AttentionPlan, Rules, Sight
from lowtide.ops.logits.logit_rows import Projection, Slopes, TorchRows, Want
from lowtide.ops.logits.rows_of import rows_of
from lowtide.ops.logits.triton_rows import TritonRows
from lowtide.ops.target import Target, planning_for, target_of
from tests.support.references.dense_attention import ragged


def test_a_tensor_is_where_it_lies_unless_another_device_is_planned_for():
    assert target_of(torch.ones(1)) == Target("cpu")
    with planning_for("cuda", (9, 0)):
        assert target_of(torch.ones(1)) == Target("cuda", (9, 0), planned=True)
        with planning_for("cpu"):
            assert target_of(torch.ones(1)).kind == "cpu"
    assert target_of(torch.ones(1)) == Target("cpu")


def test_kernels_are_those_of_the_planned_device():
    x = torch.ones(2, 3, 16, dtype=torch.bfloat16)
    capped, plain = Rules(1.0, softcap=30.0), Rules(1.0, Sight())
    assert why_not_varlen(x, x, x, plain) == why_not_flex(x, x, x, capped) == "needs a CUDA device"
    with planning_for("cuda", (7, 5)):
        assert why_not_varlen(x, x, x, plain) == "needs a GPU of compute capability 8.0 or above"
        assert why_not_flex(x, x, x, capped) == "needs a GPU of compute capability 8.0 or above"
    with planning_for("cuda", (8, 0)):
        assert why_not_varlen(x, x, x, plain) is None
        assert why_not_varlen(x, x, x, capped) == "needs no soft-cap"
        assert why_not_flex(x, x, x, capped) is None
        assert why_not_flex(x[..., :8], x[..., :8], x, capped) == "needs heads of a width of at least 16"
        assert why_not_varlen(x.float(), x.float(), x.float(), plain) == "needs float16 or bfloat16"


def test_rows_of_a_planned_gpu_are_those_of_the_kernels():
    def rows(dtype: torch.dtype, want: Want) -> type:
        return type(rows_of(torch.zeros(2, 5, dtype=dtype), torch.zeros(2, dtype=torch.long), Projection(), want))

    assert rows(torch.bfloat16, Want()) is TorchRows
    with FakeTensorMode(), planning_for("cuda", (8, 0)):
        assert rows(torch.bfloat16, Want()) is TritonRows
        assert rows(torch.float64, Want()) is TorchRows
        assert rows(torch.bfloat16, Want(collisions=True)) is TorchRows


def test_rows_without_memory_launch_no_kernel():
    with FakeTensorMode():
        logits, target = torch.empty(3, 75), torch.zeros(3, dtype=torch.long)
        rows = TritonRows(logits, target, Projection())
        stats = rows.stats(Want(entropies=True, top1=True), keep=True)
        rows.gradient(Slopes(stats.logprobs, stats.entropies), stats.entropies)
    assert [len(column) for column in stats] == [3, 3, 0, 3, 3, 0, 0, 0]


@pytest.mark.parametrize(
    ("dtype", "masked", "capability", "heads"),
    [
        (torch.bfloat16, False, (8, 0), 2),
        (torch.float16, False, (9, 0), 2),
        (torch.bfloat16, True, (9, 0), 4),
        (torch.float32, False, (9, 0), 4),
        (torch.float16, False, (7, 5), 4),
    ],
)
def test_keys_are_repeated_where_no_kernel_of_cuda_shares_them(dtype, masked, capability, heads, monkeypatch):
    seen = []
    monkeypatch.setattr(
        torch.nn.functional,
        "scaled_dot_product_attention",
        lambda q, k, v, attn_mask, **_: seen.append((k.shape[1], v.shape[1], attn_mask is not None)) or q,
    )
    q, k = torch.zeros(8, 4, 16, dtype=dtype), torch.zeros(8, 2, 16, dtype=dtype)
    plan, rules = AttentionPlan.build(ragged([8], [-1])), Rules(0.25, Sight(window=4) if masked else Sight())
    with planning_for("cuda", capability):
        grouped_attention(q, k, k, plan, rules)
    grouped_attention(q.float(), k.float(), k.float(), plan, rules)  # short ones in 16 bits call the kernel themselves
    assert seen == [(heads, heads, masked), (2, 2, masked)]


def test_repeated_keys_give_the_same_numbers_and_gradients():
    torch.manual_seed(0)
    q = torch.randn(8, 4, 16, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(8, 2, 16, dtype=torch.float64, requires_grad=True) for _ in range(2))
    plan = AttentionPlan.build(ragged([8], [-1]))
    shared = grouped_attention(q, k, v, plan, Rules(0.25))
    wanted = torch.autograd.grad(shared.square().sum(), (q, k, v))
    with planning_for("cuda", (7, 5)):
        repeated = grouped_attention(q, k, v, plan, Rules(0.25))
    torch.testing.assert_close(repeated, shared)
    torch.testing.assert_close(torch.autograd.grad(repeated.square().sum(), (q, k, v)), wanted)


def test_the_ends_of_rows_are_read_without_a_kernel():
    """The target's logit, where its column is among these, and the largest."""
    torch.manual_seed(0)
    logits, target = torch.randn(4, 9) * 3, torch.tensor([0, 3, -1, 8])
    chosen, top = TritonRows(logits, target, Projection(scale=0.5, softcap=2.0, temperature=0.7), split=True).ends()
    expected = 2.0 * torch.tanh(logits * 0.5 / 2.0) / 0.7
    torch.testing.assert_close(top, expected.amax(1))
    here = target >= 0
    torch.testing.assert_close(chosen[here], expected[here].gather(1, target[here, None])[:, 0])
