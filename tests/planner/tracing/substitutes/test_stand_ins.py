"""What a step allocates as if on CUDA: its tensors add up to what the kernels are known to keep and to take."""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM, LlamaConfig

from lowtide.engine.forward import install, score
from lowtide.memory.activations.checkpointing import set_checkpointing
from lowtide.ops.attention.attention_plan import AttentionPlan
from lowtide.ops.attention.varlen_attention import BACKENDS, varlen_attention
from lowtide.ops.logits.linear_logprobs import CHUNK_BYTES, Term, Want, linear_logprobs
from lowtide.planner.devices import DEVICES, Device, device_named
from lowtide.planner.tracing.substitutes.stand_ins import as_on
from lowtide.planner.tracing.trace import StorageTrace
from lowtide.ragged import RaggedBatch

AMPERE, TURING, CPU = DEVICES["A100-40GB"], DEVICES["T4-16GB"], device_named("cpu")
HEADS, KV_HEADS, DIM = 8, 2, 64
LENGTHS = (300, 200, 500)
TOKENS = sum(LENGTHS)
SMALL = 4096
"""Offsets, random states and the like."""


class Trace(StorageTrace):
    @property
    def total(self) -> int:
        return sum(block.size for block in self.blocks())

    def grown(self, phase: str, call: Callable[[], Any]) -> tuple[Any, int, int]:
        """What a call returns, the bytes that it leaves, and the most beyond those before."""
        before, start = self.total, len(self.events)
        with self.during(phase):
            result = call()
        beyond = most = 0
        for event in self.events[start:]:
            assert event.block is not None
            beyond += event.block.size if event.born else -event.block.size
            most = max(most, beyond)
        return result, self.total - before, most


def ragged(lengths: Sequence[int]) -> RaggedBatch:
    return RaggedBatch.from_rows([{"input_ids": [1] * length, "labels": [1] * length} for length in lengths])


def inputs(dtype: torch.dtype = torch.bfloat16, kv_heads: int = KV_HEADS) -> tuple[Tensor, ...]:
    return tuple(torch.empty(TOKENS, n, DIM, dtype=dtype, requires_grad=True) for n in (HEADS, kv_heads, kv_heads))


def attend(
    device: Device,
    dtype: torch.dtype = torch.bfloat16,
    kv_heads: int = KV_HEADS,
    lengths: Sequence[int] = LENGTHS,
    **rules: Any,
) -> tuple[int, int]:
    """(bytes that attention keeps for backward, the most that its backward takes)"""
    batch = ragged(lengths)
    with FakeTensorMode(allow_non_fake_inputs=True) as fake, Trace() as trace, as_on(device, trace):
        plan = AttentionPlan.build(batch.map(fake.from_tensor))
        query, key, value = inputs(dtype, kv_heads)
        out, kept, _ = trace.grown("forward", lambda: varlen_attention(query, key, value, plan, **rules))
        gradient = torch.empty_like(out)
        _, _, most = trace.grown("backward", lambda: out.backward(gradient))
    return kept, most


def test_varlen_keeps_its_output_and_a_log_sum_exp():
    kept, most = attend(AMPERE)
    assert kept == pytest.approx(TOKENS * HEADS * (2 * DIM + 4), abs=SMALL)
    gradients = 2 * TOKENS * DIM * (HEADS + 2 * KV_HEADS)
    padded = TOKENS + 128 * len(LENGTHS)
    workspace = 4 * TOKENS * HEADS + 4 * padded * HEADS * (DIM + 1) + 2 * 2 * TOKENS * HEADS * DIM
    assert most == pytest.approx(gradients + workspace, abs=SMALL)


@pytest.mark.parametrize("rules", [{"softcap": 30.0}, {"sinks": torch.zeros(HEADS)}, {"chunk": 64}], ids=str)
def test_flex_holds_no_scores(rules):
    kept, most = attend(AMPERE, **rules)
    scale = TOKENS * HEADS * 2 * (DIM + 1)  # where there are sinks: the scaled output and its factors
    assert TOKENS * HEADS * 2 * DIM < kept < TOKENS * HEADS * (2 * DIM + 12) + scale + SMALL
    assert most < 10 * TOKENS * HEADS * 2 * DIM


OPEN = HEADS * TOKENS**2
"""Scores of a batch of one segment."""


def test_grouped_float32_heads_repeat_their_keys_and_write_no_scores():
    alike, _ = attend(AMPERE, torch.float32, HEADS, lengths=[TOKENS])
    unlike, _ = attend(AMPERE, torch.float32, lengths=[TOKENS])
    assert alike == pytest.approx(TOKENS * HEADS * 4 * (DIM + 1), abs=SMALL)
    repeated = 2 * TOKENS * HEADS * DIM * 4  # no kernel shares keys among heads in float32
    assert unlike == pytest.approx(alike + repeated, abs=SMALL)


def test_older_gpus_have_no_flash_attention():
    half, _ = attend(TURING, torch.float16, HEADS, lengths=[TOKENS])
    assert half == pytest.approx(TOKENS * HEADS * (2 * DIM + 4), abs=SMALL)
    unlike, _ = attend(TURING, torch.float16, KV_HEADS, lengths=[TOKENS])
    assert unlike == pytest.approx(half + 2 * TOKENS * HEADS * DIM * 2, abs=SMALL)
    kept, _ = attend(TURING, torch.bfloat16, HEADS, lengths=[TOKENS])
    assert kept > 2 * OPEN


@pytest.mark.parametrize("mask", [False, True])
def test_dense_attention_takes_the_kernels_of_cuda(mask):
    q, k, v = (torch.empty(2, HEADS, 256, DIM, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    seen = torch.ones(256, 256, dtype=torch.bool) if mask else None
    with FakeTensorMode(allow_non_fake_inputs=True) as fake, Trace() as trace, as_on(AMPERE, trace):
        q, k, v = (fake.from_tensor(each) for each in (q, k, v))
        seen = None if seen is None else fake.from_tensor(seen)
        out, kept, _ = trace.grown("forward", lambda: F.scaled_dot_product_attention(q, k, v, seen))
        name = out.grad_fn.name()
    assert ("Efficient" if mask else "Flash") in name
    assert kept == pytest.approx(2 * HEADS * 256 * (2 * DIM + 4) + (2 * 256**2 if mask else 0), abs=SMALL)


def test_the_head_holds_one_chunk_in_its_own_dtype():
    vocab, hidden, scores = 128_000, 64, 4096
    rows = CHUNK_BYTES["cuda"] // (2 * vocab)
    assert rows < scores
    with FakeTensorMode(), Trace() as trace, as_on(AMPERE, trace):
        x = torch.empty(scores, hidden, dtype=torch.bfloat16, requires_grad=True)
        weight = torch.empty(vocab, hidden, dtype=torch.bfloat16, requires_grad=True)
        index, target = torch.arange(scores), torch.zeros(scores, dtype=torch.long)
        want = Want(entropies=True)
        stats, kept, most = trace.grown("head", lambda: linear_logprobs([Term(x, weight)], index, target, want=want))
        loss = (stats.logprobs + stats.entropies).sum()
        _, _, again = trace.grown("backward", loss.backward)
    assert most == pytest.approx(rows * vocab * 2, rel=0.01)
    assert kept == pytest.approx(most, rel=0.01)  # for backward, which needs no other
    assert again == pytest.approx((x.numel() + weight.numel()) * 2, rel=0.02)


def test_sums_into_rows_sort_their_indices():
    with FakeTensorMode(), Trace() as trace, as_on(AMPERE, trace):
        into, values, index = torch.empty(100, 8), torch.empty(5000, 8), torch.zeros(5000, dtype=torch.long)
        _, kept, most = trace.grown("backward", lambda: into.index_put_((index,), values, accumulate=True))
    assert (kept, most) == (0, 5 * 8 * 5000)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("device", [CPU, AMPERE], ids=lambda device: device.name)
def test_experts_have_shapes_in_any_dtype(device):
    tokens, experts, hidden, inner = 12, 3, 16, 8
    ends = torch.tensor([4, 4, 12], dtype=torch.int32)

    def shapes(x: Tensor, weight: Tensor) -> list[torch.Size]:
        out = F.grouped_mm(x, weight, offs=ends)
        return [out.shape, *(each.shape for each in torch.autograd.grad(out.square().sum(), (x, weight)))]

    x, weight = (torch.ones(*size, requires_grad=True) for size in ((tokens, hidden), (experts, hidden, inner)))
    found = []
    with FakeTensorMode(allow_non_fake_inputs=True), as_on(device):
        found += shapes(x, weight)
    assert found == shapes(x, weight)


# -- precision ----------------------------------------------------------------------------------------------------


def test_autocast_keeps_the_dtypes_of_cuda():
    x, weight = torch.randn(4, 8, dtype=torch.bfloat16, requires_grad=True), torch.ones(8)
    calls = {
        "norm": lambda: F.layer_norm(x, (8,), weight),
        "power": lambda: x**2,
        "mean of powers": lambda: x.pow(2).mean(-1),
        "rsqrt": lambda: x.rsqrt(),
        "softmax": lambda: x.softmax(-1),
        "said": lambda: x.softmax(-1, torch.bfloat16),
        "sum": lambda: x.sum(0),
        "gate": lambda: F.silu(x),
        "product": lambda: F.linear(weight[None], x),
    }

    def dtypes() -> set[str]:
        with torch.autocast("cpu", torch.bfloat16):
            return {name for name, call in calls.items() if call().dtype == torch.float32}

    assert dtypes() == set()
    with as_on(AMPERE):
        assert dtypes() == {"norm", "power", "mean of powers", "rsqrt", "softmax", "sum"}
        assert x.softmax(-1).dtype == torch.bfloat16  # outside of autocast
        with torch.autocast("cpu", torch.bfloat16):
            torch.testing.assert_close(F.layer_norm(x, (8,), weight), F.layer_norm(x.float(), (8,), weight))
            (gradient,) = torch.autograd.grad(F.layer_norm(x, (8,), weight).square().sum(), x)
        assert gradient.dtype == torch.bfloat16
    assert dtypes() == set()


def test_cast_weights_are_held_once_a_forward():
    with FakeTensorMode(), Trace() as trace, as_on(AMPERE, trace):
        layer, x = torch.nn.Linear(512, 512, bias=False), torch.empty(4, 512)

        def three_times() -> None:
            with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
                layer(layer(layer(x)))

        for phase in ("forward", "head"):
            _, kept, most = trace.grown(phase, three_times)
            assert 0 <= most - 2 * 512**2 < 4 * x.numel() * 2
            assert kept == 0


# -- the whole ----------------------------------------------------------------------------------------------------

SHAPE: dict[str, Any] = {
    "vocab_size": 500,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}


@pytest.mark.parametrize("policy", [None, "full", "attention"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_step_runs_and_its_layers_run_again_on_the_same_kernels(policy, dtype):
    length = 4096
    batch = ragged([length])
    with FakeTensorMode(allow_non_fake_inputs=True) as fake, Trace() as trace, as_on(AMPERE, trace):
        model = AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE), dtype=dtype).train()
        install(model)
        if policy is not None:
            model.gradient_checkpointing_enable()
            set_checkpointing(model, policy)
        batch = batch.map(fake.from_tensor)
        _, _, forward = trace.grown("forward", lambda: score(model, batch).scored.sum().backward())
    scores = dtype.itemsize * SHAPE["num_attention_heads"] * length**2
    assert forward < scores


def test_adamw_has_its_foreach_form():
    with FakeTensorMode(), Trace() as trace, as_on(AMPERE, trace):
        parameters = [torch.nn.Parameter(torch.empty(1000, 1000)) for _ in range(4)]
        for parameter in parameters:
            parameter.grad = torch.empty_like(parameter)
        optimizer = torch.optim.AdamW(parameters)
        _, kept, most = trace.grown("optimizer", optimizer.step)
    size = 4 * 4_000_000
    assert kept == pytest.approx(2 * size, abs=SMALL)
    assert most == pytest.approx(3 * size, abs=SMALL)


def test_a_cpu_is_left_as_it_is():
    before = (
        dict(BACKENDS),
        F.scaled_dot_product_attention,
        sys.modules["torch.optim.adam"]._default_to_fused_or_foreach,
    )
    with as_on(CPU):
        assert (dict(BACKENDS), F.scaled_dot_product_attention) == before[:2]
    with as_on(AMPERE):
        assert list(BACKENDS) == ["varlen", "flex", "grouped"]
    after = dict(BACKENDS), F.scaled_dot_product_attention, sys.modules["torch.optim.adam"]._default_to_fused_or_foreach
    assert after == before
