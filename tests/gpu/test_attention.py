"""Every attention backend on CUDA against the grouped one in float32: values, gradients, memory."""

from importlib.util import find_spec

import pytest
import torch

from lowtide.ops.attention.attention_plan import AttentionPlan
from lowtide.ops.attention.cached_flash import right_on
from lowtide.ops.attention.varlen_attention import BACKENDS, varlen_attention
from lowtide.ragged import RaggedBatch

SHAPES = {
    "few": ([40, 1, 30], [-1] * 3, [*range(3)]),  # fewer queries than a block has
    "equal": ([64] * 5, [-1] * 5, [*range(5)]),
    "unequal": ([1, 30, 200, 7, 131, 19, 700], [-1] * 7, [*range(7)]),
    "prefix": ([150, 33, 90, 1, 40, 4, 2], [-1, 0, 0, -1, -1, 4, 4], [0, 0, 0, 1, 2, 2, 2]),
}
VARIANTS = {
    "causal": {},
    "scale": {"scale": 0.3},
    "window": {"window": 20},
    "chunk": {"chunk": 25},
    "softcap": {"softcap": 5.0},
    "softcap and window": {"softcap": 5.0, "window": 20},
    "sinks": {"sinks": torch.linspace(-1, 2, 8)},
    "sinks and window": {"sinks": torch.linspace(-1, 2, 8), "window": 20},
}
SERVES = {
    "flash3": ["causal", "scale", "window", "softcap", "softcap and window"],
    "flash2": ["causal", "scale", "window", "softcap", "softcap and window"],
    "varlen": ["causal", "scale", "window"],
    "flex": [variant for variant in VARIANTS if variant not in ("causal", "scale")],
    "grouped": [*VARIANTS],
}
PACKAGES = {"flash3": "flash_attn_interface", "flash2": "flash_attn"}
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}


def attend(tensors: list[torch.Tensor], plan: AttentionPlan, variant: str, backend: str, weights: torch.Tensor):
    """The output, and the gradients of its weighted sum at queries, keys, values and sinks."""
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    options = dict(VARIANTS[variant])
    if "sinks" in options:
        options["sinks"] = options["sinks"].cuda().requires_grad_()
    out = varlen_attention(*leaves, plan, backend=backend, **options)
    leaves += [options["sinks"]] if "sinks" in options else []
    return [out.detach(), *torch.autograd.grad((out * weights.to(out.dtype)).sum(), leaves)]


def skip_without_package(backend: str, dtype: torch.dtype) -> None:
    package = PACKAGES.get(backend)
    if package is not None and find_spec(package) is None:
        pytest.skip(f"needs {package}, which is not installed")
    if backend in ("flash3", "flash2", "varlen") and dtype == torch.float32:
        pytest.skip(f"{backend} knows half precision only")


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("backend", "variant"), [(b, v) for b, variants in SERVES.items() for v in variants])
def test_backends_equal_the_grouped_one_in_float32(backend, variant, shape, dtype):
    skip_without_package(backend, dtype)
    torch.backends.cuda.matmul.allow_tf32 = False
    lengths, prefix, row = SHAPES[shape]
    batch = RaggedBatch.from_segments([[1] * n for n in lengths], prefix=prefix, row=row).to("cuda")
    plan = AttentionPlan.build(batch)
    tensors = [torch.randn(batch.tokens, heads, 64, device="cuda").to(dtype) for heads in (8, 2, 2)]
    weights = torch.randn(batch.tokens, 8, 64, device="cuda")
    ours = attend(tensors, plan, variant, backend, weights)
    reference = attend([t.double() for t in tensors], plan, variant, "grouped", weights)
    for mine, expected in zip(ours, reference, strict=True):
        assert (mine.double() - expected).norm() <= TOLERANCE[dtype] * expected.norm()


@pytest.mark.parametrize("variant", ["causal", "softcap", "chunk"])
def test_half_precision_never_falls_back_to_the_grouped_backend(variant, monkeypatch):
    monkeypatch.setitem(BACKENDS, "grouped", None)
    batch = RaggedBatch.from_segments([[1] * 40, [1] * 90]).to("cuda")
    tensors = [torch.randn(130, heads, 64, device="cuda", dtype=torch.bfloat16) for heads in (8, 2, 2)]
    assert varlen_attention(*tensors, AttentionPlan.build(batch), **VARIANTS[variant]).isfinite().all()


@pytest.mark.parametrize("variant", ["causal", "window", "softcap", "sinks"])
def test_memory_is_linear_in_tokens(variant, peak_above_start):
    tokens = 32768  # one mask of tokens x tokens would be 1 GB in bytes alone
    batch = RaggedBatch.from_segments([[1] * (tokens // 2)] * 2).to("cuda")
    plan = AttentionPlan.build(batch)
    tensors = [torch.randn(tokens, heads, 64, device="cuda", dtype=torch.bfloat16) for heads in (8, 2, 2)]
    weights = torch.ones(tokens, 8, 64, device="cuda", dtype=torch.bfloat16)
    options = {name: v.cuda() if name == "sinks" else v for name, v in VARIANTS[variant].items()}

    def step() -> None:
        leaves = [t.requires_grad_() for t in tensors]
        torch.autograd.grad((varlen_attention(*leaves, plan, **options) * weights).sum(), leaves)

    step()
    inputs = sum(t.numel() * t.element_size() for t in tensors)
    assert peak_above_start(step) < 12 * inputs


def test_autocast_brings_all_to_one_dtype():
    batch = RaggedBatch.from_segments([[1] * 40, [1] * 90]).to("cuda")
    query, key, value = (torch.randn(130, heads, 64, device="cuda") for heads in (8, 2, 2))
    with torch.autocast("cuda", torch.bfloat16):
        out = varlen_attention(query, key, value.bfloat16(), AttentionPlan.build(batch))
    assert out.dtype == torch.bfloat16


@pytest.mark.parametrize("dim", [64, 96, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_generation_attends_by_the_kernel_that_is_told_how_many_keys_are_used(dtype, dim, caplog):
    assert right_on(torch.device("cuda", 0), dtype, dim), caplog.text
