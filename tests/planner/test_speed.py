"""Costs of operations that are known by hand, and the time that a device takes for them."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from lowtide.ops.attention.attention_blocks import Part, block_kernel
from lowtide.ops.attention.attention_plan import AttentionPlan
from lowtide.ops.attention.varlen_attention import rules_of, varlen_attention
from lowtide.ops.layers.adapted_experts import AdaptedStack, Pairs, summed_over_experts, taken_by_experts
from lowtide.ops.logits.linear_logprobs import Term, linear_logprobs
from lowtide.planner.devices import DEVICES, DISPATCH_SECONDS, Device, Rates
from lowtide.planner.speed import OperationCosts
from lowtide.planner.tracing.substitutes.stand_ins import as_on
from lowtide.ragged import RaggedBatch

FLOAT, HALF = torch.float32, torch.bfloat16
RATES = Rates({"float32": 1e9, "bfloat16": 4e9}, 1e9, 1e8, 1e8, dispatch=0.0, measured=True)
PLAIN = Device("plain", "cpu", 1 << 30, sheet=RATES)


class Counted(TorchDispatchMode):
    """Hands every operation on to the costs, as a trace does."""

    def __init__(self) -> None:
        super().__init__()
        self.costs = OperationCosts()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.costs(func, args, out, kwargs)
        return out


def counted(call: Any) -> OperationCosts:
    with FakeTensorMode(allow_non_fake_inputs=True), Counted() as mode:
        call()
    return mode.costs


def only(call: Any) -> tuple[int, int, torch.dtype]:
    """(flops, bytes, dtype) of the one operation that costs anything."""
    ((cost, count),) = counted(call).operations.items()
    assert count == 1
    return cost[:3]


X, W = torch.ones(30, 10), torch.ones(10, 20)
SUM = torch.ones(30, 20)
ROW = torch.ones(1, 10).expand(30, 10)
MANY, FEW = torch.ones(1000, 8), torch.ones(6, 8)
INDEX = torch.arange(6)
COSTS = {
    "product": (lambda: X @ W, (2 * 30 * 10 * 20, 4 * (300 + 200 + 600))),
    "product added in place": (lambda: SUM.addmm_(X, W), (2 * 30 * 10 * 20, 4 * (600 + 300 + 200 + 600))),
    "product into a buffer": (lambda: torch.mm(X, W, out=SUM), (2 * 30 * 10 * 20, 4 * (300 + 200 + 600))),
    "sum": (lambda: X + X, (0, 4 * 900)),
    "in place": (lambda: X.mul_(2), (0, 4 * 600)),
    "expanded": (lambda: ROW + X, (0, 4 * (10 + 300 + 300))),
    "rows picked": (lambda: MANY.index_select(0, INDEX), (0, 2 * 4 * 48)),
    "rows of an embedding": (lambda: F.embedding(INDEX, MANY), (0, 2 * 4 * 48)),
    "rows added": (lambda: MANY.index_add_(0, INDEX, FEW), (0, 3 * 4 * 48)),
}


@pytest.mark.parametrize("case", COSTS)
def test_an_operation_costs(case):
    call, expected = COSTS[case]
    assert only(call) == (*expected, FLOAT)


def test_views_and_empty_memory_cost_nothing():
    costs = counted(lambda: torch.empty(5).view(1, 5).t()[1:].detach().expand(3, 4, 1).device)
    assert not costs.operations


def test_an_optimizer_reads_and_writes_its_states():
    parameter = torch.nn.Parameter(torch.ones(1000))

    def step() -> None:
        parameter.grad = torch.empty(1000)
        torch.optim.AdamW([parameter], fused=True).step()

    costs = [each for each in counted(step).operations if each.bytes > 16_000]
    (cost,) = costs
    assert cost.bytes == pytest.approx(2 * 4 * 4000, rel=0.01)  # weight, gradient and two moments


def test_a_layer_and_its_gradients_are_three_products():
    weight = torch.ones(64, 32, requires_grad=True)
    x = torch.ones(16, 32, requires_grad=True)
    assert counted(lambda: F.linear(x, weight).sum().backward()).flops == 3 * 2 * 16 * 32 * 64


def test_the_head_computes_all_logits_but_those_of_the_last_chunk_twice():
    x, weight = torch.ones(50, 16, requires_grad=True), torch.ones(300, 16, requires_grad=True)
    index, target = torch.arange(50), torch.zeros(50, dtype=torch.long)
    on_gpu, on_cpu = OperationCosts(), OperationCosts()
    for costs, device in ((on_gpu, DEVICES["A100-40GB"]), (on_cpu, PLAIN)):
        with FakeTensorMode(allow_non_fake_inputs=True) as fake, Counted() as mode, as_on(device):
            terms = [Term(fake.from_tensor(x), fake.from_tensor(weight))]
            linear_logprobs(terms, index, target, chunk=25).logprobs.sum().backward()
        costs.by_layer = mode.costs.by_layer
        assert costs.flops == (3 + 1 / 2) * 2 * 50 * 300 * 16
    passes = [each for each in on_gpu.operations if each.flops == 0 and each.bytes > 300 * 25 * 4]
    assert passes  # of the kernels, which are not launched


ATTENTION = {
    "varlen": ("A100-40GB", HALF, {}, 256),
    "window": ("A100-40GB", HALF, {"window": 32}, 64),
    "flex": ("A100-40GB", HALF, {"softcap": 30.0}, 256),
    "dense": ("T4-16GB", torch.float16, {}, 256),
    "cpu": (None, FLOAT, {}, 256),
}


@pytest.mark.parametrize("case", ATTENTION)
def test_attention_computes_half_of_all_pairs(case):
    name, dtype, rules, keys = ATTENTION[case]
    batch = RaggedBatch.from_rows([{"input_ids": [1] * 256, "labels": [1] * 256}] * 4)
    device = PLAIN if name is None else DEVICES[name]
    with FakeTensorMode(allow_non_fake_inputs=True) as fake, Counted() as mode, as_on(device):
        plan = AttentionPlan.build(batch.map(fake.from_tensor))
        q, k, v = (torch.empty(1024, 8, 64, dtype=dtype, requires_grad=True) for _ in range(3))
        varlen_attention(q, k, v, plan, **rules).sum().backward()
    fused = sum(each.flops for each in mode.costs.operations if each.attention)
    assert fused == 3.5 * 2 * 1024 * keys * 8 * 64


def plain_attention(queries: int, keys: int) -> int:
    """What torch counts of attention written out, 8 heads of width 64, each query to all keys, forward and backward;
    and one product more, of the scores that a kernel computes again in backward."""
    q, k, v = (torch.ones(8, count, 64, requires_grad=True) for count in (queries, keys, keys))
    with FlopCounterMode(display=False) as count:
        ((q @ k.mT).softmax(-1) @ v).sum().backward()
        q @ k.mT
    return count.get_total_flops()


@pytest.mark.parametrize("case", ["varlen", "cpu"])
@pytest.mark.parametrize(("queries", "keys", "causal"), [(64, 192, False), (128, 128, False), (128, 128, True)])
def test_a_block_of_earlier_keys_is_seen_whole_and_the_own_one_by_half(case, queries, keys, causal):
    name, dtype, *_ = ATTENTION[case]
    with FakeTensorMode(), Counted() as mode, as_on(PLAIN if name is None else DEVICES[name]):
        q, k, v = (torch.empty(count, 8, 64, dtype=dtype) for count in (queries, keys, keys))
        rules = rules_of({}, 64, queries + keys)
        kernel = block_kernel(q, v, rules)
        part = kernel.forward(q, k, v, rules, causal=causal)
        kernel.backward(q, q, k, v, Part(part.out, part.lse), rules, causal=causal)
    fused = sum(each.flops * count for each, count in mode.costs.operations.items() if each.attention)
    assert fused == plain_attention(queries, keys) // (2 if causal else 1)


def test_keys_that_a_mask_hides_are_computed_with():
    q = torch.empty(1, 8, 128, 64, requires_grad=True)
    mask = torch.ones(128, 128).tril().bool()
    masked = counted(lambda: F.scaled_dot_product_attention(q, q, q, attn_mask=mask).sum().backward())
    causal = counted(lambda: F.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward())
    assert masked.flops == 2 * causal.flops == plain_attention(128, 128)


def test_experts_compute_each_token_once():
    x, weight = torch.ones(12, 16, requires_grad=True), torch.ones(3, 16, 8, requires_grad=True)
    ends = torch.tensor([4, 4, 12], dtype=torch.int32)
    with FakeTensorMode(allow_non_fake_inputs=True), Counted() as mode, as_on(PLAIN):
        F.grouped_mm(x, weight, offs=ends).sum().backward()
    assert mode.costs.flops == 3 * 2 * 12 * 16 * 8
    first, second = torch.ones(3, 16, 2, requires_grad=True), torch.ones(3, 2, 8, requires_grad=True)
    stack, pairs = AdaptedStack(weight.detach(), first, second), Pairs(torch.arange(12) % 6, ends)
    each = 2 * 12 * (2 * 16 * 8 + 3 * (16 * 2 + 2 * 8))
    with FakeTensorMode(allow_non_fake_inputs=True), Counted() as mode:
        taken_by_experts(x[:6], stack, pairs).sum().backward()
    assert mode.costs.flops == each
    with FakeTensorMode(allow_non_fake_inputs=True), Counted() as mode:
        summed_over_experts(x, stack, pairs, 6).sum().backward()
    assert mode.costs.flops == each


# -- time ---------------------------------------------------------------------------------------------------------


def test_an_operation_takes_what_bounds_it():
    assert counted(lambda: X + X).seconds(PLAIN) == pytest.approx(3600 / 1e9)  # bytes
    square = torch.ones(100, 100)
    assert counted(lambda: square @ square).seconds(PLAIN) == pytest.approx(2e6 / 1e9)  # flops
    half = square.to(HALF)
    assert counted(lambda: half @ half).seconds(PLAIN) == pytest.approx(2e6 / 4e9)


def test_transfers_go_on_beside():
    costs = counted(lambda: X + X)
    costs.host_bytes = 100
    assert costs.seconds(PLAIN) == pytest.approx(3600 / 1e9)
    costs.host_bytes = 1000
    assert costs.seconds(PLAIN) == pytest.approx(1000 / 1e8)


def test_what_ranks_wait_for_comes_on_top():
    costs = counted(lambda: X + X)
    costs.sends(100)
    assert costs.sent_bytes == 100
    assert costs.seconds(PLAIN) == pytest.approx(3600 / 1e9 + 100 / 1e8)


def test_small_operations_take_their_dispatch():
    costs = counted(lambda: [X.mul_(2) for _ in range(100)])
    assert costs.seconds(DEVICES["H100-80GB"]) == pytest.approx(100 * DISPATCH_SECONDS)
    slow = replace(PLAIN, sheet=replace(RATES, dispatch=1.0))
    assert costs.seconds(slow) == pytest.approx(100, rel=1e-3)  # a CPU computes on top


def test_views_take_the_host_a_part_of_an_operation():
    def call() -> None:
        x = torch.zeros(30, 10)
        for _ in range(100):
            x.view(10, 30).t()

    costs = counted(call)
    assert sum(costs.operations.values()) == 1
    assert costs.seconds(DEVICES["H100-80GB"]) == pytest.approx((1 + 0.3 * 200) * DISPATCH_SECONDS)


def test_a_faster_device_is_faster():
    large = torch.ones(4096, 4096, dtype=HALF)
    costs = counted(lambda: [large @ large for _ in range(10)])
    names = ("T4-16GB", "L4-24GB", "A100-40GB", "H100-80GB", "B200-180GB")
    times = [costs.seconds(DEVICES[name]) for name in names]
    assert times == sorted(times, reverse=True)
    assert times[3] == pytest.approx(10 * 2 * 4096**3 / 989e12 / 0.7, rel=0.05)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("layers", [5, 12])
def test_layers_are_unrolled(layers, fused):
    def model(count: int) -> OperationCosts:
        weights = [torch.nn.Parameter(torch.ones(64, 64)) for _ in range(count)]
        head = torch.nn.Parameter(torch.ones(64, 500))
        with FakeTensorMode(allow_non_fake_inputs=True), Counted() as mode:
            costs = mode.costs
            costs.layer_of = lambda tensor: next((n for n, weight in enumerate(weights) if tensor is weight), None)
            x = torch.ones(32, 64, requires_grad=True)
            for number, weight in enumerate(weights):
                costs.layer = number
                x = torch.relu(x @ weight)
            costs.layer = None
            x = x @ head
            for weight in (*weights, head):
                weight.grad = torch.empty_like(weight)
            torch.optim.SGD([*weights, head], lr=0.1, fused=fused, foreach=False).step()
        return costs

    guessed, found = model(5).unrolled(layers), model(layers)
    assert guessed.flops == found.flops
    assert sum(each.bytes * count for each, count in guessed.operations.items()) == pytest.approx(
        sum(each.bytes * count for each, count in found.operations.items()), rel=1e-3
    )
    assert guessed.seconds(PLAIN) == pytest.approx(found.seconds(PLAIN), rel=0.01 if not fused else 0.05)
