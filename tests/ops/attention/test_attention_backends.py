"""The CUDA backends as far as a CPU shows them: flex attention uncompiled, the flash kernels as documented.

tests/gpu/test_attention.py runs the kernels themselves.
"""

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.nn.attention.flex_attention import flex_attention

from lowtide.ops.attention import attention_flash, attention_flex
from lowtide.ops.attention.attention_grouped import grouped_attention
from lowtide.ops.attention.attention_plan import AttentionPlan, Rules, Sight
from lowtide.ops.attention.varlen_attention import BACKENDS, varlen_attention
from lowtide.ragged import RaggedBatch
from tests.support.marks import slow_but
from tests.support.references.dense_attention import LENGTHS, VARIANTS, dense, ragged

SIGHTS = {
    "causal": Sight(),
    "window": Sight(window=4),
    "chunk": Sight(chunk=5),
    "both": Sight(window=7, chunk=9),
}
SHAPES = [shape for shape in LENGTHS if shape != "long"]


def visible(batch, sight: Sight) -> torch.Tensor:
    """[tokens, tokens] bool: which token sees which, one pair at a time."""
    seen = torch.zeros(batch.tokens, batch.tokens, dtype=torch.bool)
    for part in batch.segments:
        before = batch.segments[part.prefix] if part.prefix >= 0 else None
        keys = [*(range(before.start, before.stop) if before else ()), *range(part.start, part.stop)]
        keys = keys if part.prefix_length < 0 else [*keys[: part.prefix_length], *range(part.start, part.stop)]
        ahead = len(keys) - part.length
        for query in range(part.start, part.stop):
            place = query - part.start + ahead
            for at, key in enumerate(keys[: place + 1]):
                near = sight.window is None or at > place - sight.window
                seen[query, key] = near and (sight.chunk is None or at // sight.chunk == place // sight.chunk)
    return seen


@pytest.mark.parametrize("sight", SIGHTS.values(), ids=SIGHTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_flex_masks_show_what_is_visible(shape, sight, monkeypatch):
    monkeypatch.setattr(attention_flex, "BLOCK", 4)
    batch = ragged(*LENGTHS[shape])
    mask = attention_flex.block_mask(AttentionPlan.build(batch), sight)
    expected = visible(batch, sight)
    token = torch.arange(batch.tokens)
    assert torch.equal(mask.mask_mod(0, 0, token[:, None], token[None, :]), expected)

    blocks = -(-batch.tokens // 4)
    inside = torch.zeros(blocks * 4, blocks * 4, dtype=torch.bool)
    inside[: batch.tokens, : batch.tokens] = expected
    inside = inside.unflatten(1, (blocks, 4)).unflatten(0, (blocks, 4)).transpose(1, 2).flatten(2)
    partial, full = (
        listed(*pair, blocks)
        for pair in ((mask.kv_num_blocks, mask.kv_indices), (mask.full_kv_num_blocks, mask.full_kv_indices))
    )
    assert torch.equal(partial | full, inside.any(-1))
    assert not (full & ~inside.all(-1)).any()
    assert not (partial & full).any()


def listed(counts: torch.Tensor, indices: torch.Tensor, blocks: int) -> torch.Tensor:
    """[blocks, blocks] bool from flex attention's lists of key blocks."""
    found = torch.zeros(blocks, blocks, dtype=torch.bool)
    for query, (count, keys) in enumerate(zip(counts[0, 0], indices[0, 0], strict=True)):
        found[query, keys[:count].long()] = True
    return found


def test_flex_masks_pass_over_whole_blocks():
    batch = ragged([600, 300], [-1, 0])
    mask = attention_flex.block_mask(AttentionPlan.build(batch), Sight())
    assert mask.full_kv_num_blocks[0, 0].tolist() == [0, 1, 2, 3, 4, 4, 5, 0]
    assert mask.kv_num_blocks[0, 0].tolist() == [1, 1, 1, 1, 1, 2, 2, 8]


def compare_with_dense(run, variant: dict) -> None:
    """`run(query, key, value, plan, rules)` against the textbook: values and gradients, the sinks' too."""
    for shape in ("prefix", "tree"):
        compare_shape_with_dense(run, variant, ragged(*LENGTHS[shape]))


def compare_shape_with_dense(run, variant: dict, batch: RaggedBatch) -> None:
    tensors = [torch.randn(batch.tokens, heads, 8, dtype=torch.float64) for heads in (4, 2, 2)]
    weights = torch.randn(batch.tokens, 4, 8, dtype=torch.float64)
    found = []
    for ours in (True, False):
        leaves = [t.clone().requires_grad_() for t in tensors]
        asked = dict(variant)
        if "sinks" in asked:
            asked["sinks"] = asked["sinks"].clone().requires_grad_()
        if ours:
            sight = Sight(asked.get("window"), asked.get("chunk"))
            rules = Rules(asked.get("scale", 8**-0.5), sight, asked.get("softcap"), asked.get("sinks"))
            rules = rules._replace(causal=asked.get("causal", True))
            out = run(*leaves, AttentionPlan.build(batch), rules)
        else:
            out = dense(*leaves, batch, **asked)
        leaves += [asked["sinks"]] if "sinks" in asked else []
        found.append([out.detach(), *torch.autograd.grad((out * weights).sum(), leaves)])
    torch.testing.assert_close(*found, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("variant", slow_but(["all"], VARIANTS))
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_equals_dense(variant, monkeypatch):
    # Not compiled it has a backward on every device; that nobody asks for one on a CPU is checked beforehand.
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *tensors: None)
    compare_with_dense(attention_flex.flex_ragged_attention, VARIANTS[variant])


@pytest.mark.slow
def test_few_compilations_serve_all_sizes_windows_and_chunks(monkeypatch):
    counter = CompileCounter()
    compiled = torch.compile(flex_attention, fullgraph=True, dynamic=True, backend=counter)
    monkeypatch.setattr(attention_flex, "flex_attention", compiled)
    for shape in (([200, 30], [-1, 0]), ([5, 300, 70], [-1, 0, -1]), ([500, 9], [-1, -1]), ([129], [-1])):
        plan = AttentionPlan.build(ragged(*shape))
        tensors = [torch.randn(plan.tokens, heads, 8) for heads in (4, 2, 2)]
        for sight in (Sight(window=9), Sight(chunk=50)):
            rules = Rules(8**-0.5, sight)
            out = attention_flex.flex_ragged_attention(*tensors, plan, rules)
            torch.testing.assert_close(out, grouped_attention(*tensors, plan, rules))
    assert counter.frame_count <= 2


def documented(q, k, v, starts_q, starts_k, scale, causal, window, softcap) -> torch.Tensor:
    """What flash-attn and torch say that their kernels compute, one sequence at a time."""
    outputs = []
    for (q0, q1), (k0, k1) in zip(starts_q.unfold(0, 2, 1).tolist(), starts_k.unfold(0, 2, 1).tolist(), strict=True):
        # Query i sees keys from i + ahead - left to i + ahead + right, where -1 is no limit; causal is right = 0.
        place = torch.arange(q1 - q0)[:, None] + (k1 - k0) - (q1 - q0)
        keys = torch.arange(k1 - k0)[None]
        left, right = window[0], 0 if causal else window[1]
        seen = (keys >= place - left) | (left < 0)
        seen &= (keys <= place + right) | (right < 0)
        repeat = q.shape[1] // k.shape[1]
        scores = torch.einsum("qhd,khd->hqk", q[q0:q1], k[k0:k1].repeat_interleave(repeat, dim=1)) * scale
        scores = softcap * torch.tanh(scores / softcap) if softcap else scores
        weights = torch.softmax(scores.masked_fill(~seen, float("-inf")), -1)
        outputs.append(torch.einsum("hqk,khd->qhd", weights, v[k0:k1].repeat_interleave(repeat, dim=1)))
    return torch.cat(outputs)


def check_longest(starts: torch.Tensor, longest: int) -> None:
    assert starts.dtype == torch.int32
    assert starts.diff().max() == longest


FLASH = {
    **{name: VARIANTS[name] for name in ("causal", "scale", "window", "softcap")},
    "both ways": {"causal": False},
    "a window on both sides": {"causal": False, "window": 4},
}


@pytest.mark.parametrize("variant", FLASH)
@pytest.mark.parametrize("version", ["2", "3"])
def test_flash_attn_as_documented_equals_dense(variant, version, monkeypatch):
    def flash_attn_varlen_func(
        q, k, v, cu_q, cu_k, max_q, max_k, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0
    ):
        check_longest(cu_q, max_q)
        check_longest(cu_k, max_k)
        return documented(q, k, v, cu_q, cu_k, softmax_scale, causal, window_size, softcap)

    monkeypatch.setattr(attention_flash, f"flash{version}_kernel", lambda: flash_attn_varlen_func)
    compare_with_dense(getattr(attention_flash, f"flash{version}_attention"), FLASH[variant])


@pytest.mark.parametrize("variant", [v for v in FLASH if v != "softcap"])
@pytest.mark.parametrize("knows_groups", [True, False], ids=["torch2.13", "torch2.11"])
def test_torchs_kernel_as_documented_equals_dense(variant, knows_groups, monkeypatch):
    def varlen_attn(q, k, v, cu_q, cu_k, max_q, max_k, *, scale=None, window_size=(-1, -1), enable_gqa=False):
        assert enable_gqa == knows_groups  # before, heads that share keys were taken unasked
        check_longest(cu_q, max_q)
        check_longest(cu_k, max_k)
        return documented(q, k, v, cu_q, cu_k, scale, False, window_size, 0.0)

    def varlen_attn_2_11(q, k, v, cu_q, cu_k, max_q, max_k, *, scale=None, window_size=(-1, -1)):
        return varlen_attn(q, k, v, cu_q, cu_k, max_q, max_k, scale=scale, window_size=window_size)

    kernel = varlen_attn if knows_groups else varlen_attn_2_11
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", kernel)
    compare_with_dense(attention_flash.torch_varlen_attention, FLASH[variant])


@pytest.mark.parametrize("name", [name for name in BACKENDS if name != "grouped"])
def test_a_backend_that_cannot_serve_says_why(name):
    batch = ragged([3], [-1])
    tensors = [torch.randn(3, 1, 8) for _ in range(3)]
    with pytest.raises(ValueError, match=f"'{name}' needs a CUDA device"):
        varlen_attention(*tensors, AttentionPlan.build(batch), backend=name)
