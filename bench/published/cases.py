"""Peaks that others have published, with the settings that they give, and the same settings as lowtide has them.

torchtune: the table "Memory and training speed" of its README (meta-pytorch/torchtune at bd2a0fc7c): batch 2 without
accumulation, packed to 2,048, compiled; optimizer, ranks and checkpointing are those of
`recipes/configs/llama3_1/8B_*_single_device.yaml`. Adapters are trained in mixed precision here, as TRL's defaults have
it: products in bfloat16 as theirs, and adapters in float32 where theirs are in bfloat16. torchtitan:
`benchmarks/llama3_h100_202412_torchtitan.md`. Unsloth: the table of its page of requirements, which gives no settings
and calls its numbers the absolute minimum.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

TORCHTUNE = "https://github.com/meta-pytorch/torchtune#memory-and-training-speed"
TORCHTITAN = "https://github.com/pytorch/torchtitan/blob/main/benchmarks/llama3_h100_202412_torchtitan.md"
UNSLOTH = "https://unsloth.ai/docs/get-started/fine-tuning-for-beginners/unsloth-requirements"
GIB, GB = 1 << 30, 10**9
LORA = ("q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PACKED = (2048, 2048)


@dataclass(frozen=True)
class Published:
    """A peak that somebody has published."""

    source: str
    name: str
    published: float
    """In `unit`."""
    model: str
    """A name that lowtide has the shape of."""
    device: str
    options: Mapping[str, Any]
    lengths: tuple[int, ...]
    lora: tuple[str, ...] | str = ()
    rank: int = 8
    four_bits: bool = False
    double: bool = False
    """Whether the scales of 4-bit weights are quantized too."""
    ranks: int = 1
    unit: int = GIB
    reserved: bool = False
    """Whether it counts what the allocator reserves, rather than what tensors hold."""
    apart: tuple[str, ...] = ()
    """Categories of ours that theirs does not count, which are left out here too."""
    differs: str = ""
    """What differs in the settings, by the buffer that it concerns."""
    strict: bool = False
    """Whether all settings are known, so that the difference is to be within 10%."""
    weights: Mapping[str, Any] = field(default_factory=lambda: {"dtype": "bfloat16"})


PAGED = (
    "optimizer left out: paged moments are in CUDA's managed memory, which torch's allocator, and their figure, do not "
    "count (meta-pytorch/torchtune#990: -46% by paging 8-bit moments; #527)"
)


def _tune(name: str, published: float, device: str, differs: str, **more: Any) -> Published:
    options = {"gradient_checkpointing": True, "max_grad_norm": 0.0, **more.pop("options", {})}
    return Published(TORCHTUNE, name, published, "Llama-3.1-8B", device, options, PACKED, differs=differs, **more)


def _unsloth(name: str, model: str, published: float, *, four_bits: bool) -> Published:
    saving = {"gradient_checkpointing": True, "activation_offloading": True, "bf16": True}
    settings = "settings are not published; ours: 1 row of 1,024 tokens, rank 16 on all linear layers"
    return Published(
        UNSLOTH, name, published, model, "A100-80GB" if published < 75 else "B200-180GB", saving, (1024,),
        lora="all-linear", rank=16, four_bits=four_bits, double=four_bits, unit=GB, reserved=True, differs=settings,
    )  # fmt: skip


SIZES = {
    "3B": ("Llama-3.2-3B", 3.5, 8), "7B": ("Qwen2.5-7B", 5, 19), "8B": ("Llama-3.1-8B", 6, 22),
    "9B": ("gemma-2-9b", 6.5, 24), "14B": ("phi-4", 8.5, 33), "27B": ("gemma-2-27b", 22, 64),
    "32B": ("Qwen2.5-32B", 26, 76), "70B": ("Llama-3.1-70B", 41, 164),
}  # fmt: skip
"""Unsloth's table: by its row the model that stands for it here, QLoRA and LoRA in GB."""
LOGITS = "logits and their gradient, 2 x {gib:.1f} GiB in float32, are what lowtide never makes"
POINTWISE = (
    "Activations: it is compiled, which computes again in backward what is pointwise; here are kept SiLU's output and "
    "its product, 2 x 14,336 x 2 bytes x 4,096 tokens x 32 layers = 7.0 GiB, and the norms' inputs in float32, 2 x "
    "4,096 x 4 bytes x 4,096 tokens x 32 layers = 4.0 GiB"
)
MIXED = {"optim": "adamw_torch_fused", "bf16": True}
CASES: dict[str, Published] = {
    each.name: each
    for each in (
        _tune(
            "QLoRA, 4090", 7.4, "RTX-4090", "", lora=LORA, four_bits=True, double=True, strict=True,
            options=MIXED,
        ),
        _tune("LoRA, 4090", 16.2, "RTX-4090", "", lora=LORA, strict=True, options=MIXED),
        _tune(
            "LoRA, A6000", 30.3, "RTX-A6000",
            f"its settings are not given; ours: as on a 4090, without checkpointing. {POINTWISE}",
            lora=LORA, options={"gradient_checkpointing": False, **MIXED},
        ),
        _tune(
            "full, 4090", 18.9, "RTX-4090", PAGED, apart=("optimizer",),
            options={"optim": "paged_adamw_8bit", "optimizer_in_backward": True},
        ),
        _tune(
            "full, A6000", 37.4, "RTX-A6000",
            f"{PAGED}. Its settings are not given; ours: as on a 4090, without checkpointing", apart=("optimizer",),
            options={
                "gradient_checkpointing": False, "optim": "paged_adamw_8bit", "optimizer_in_backward": True,
            },
        ),
        Published(
            TORCHTITAN, "FSDP, 2 x 8,192", 82.4, "Llama-3.1-8B", "H100-80GB",
            {"bf16": True, "checkpointing_policy": "matmul"}, (8192, 8192), ranks=8, reserved=True,
            differs=f"{LOGITS.format(gib=7.8)}; its selective checkpointing keeps every second product", weights={},
        ),
        Published(
            TORCHTITAN, "FSDP, 1 x 32,768", 83.9, "Llama-3.1-8B", "H100-80GB", {"bf16": True}, (32_768,), ranks=8,
            reserved=True, differs=f"{LOGITS.format(gib=15.7)}; it is compiled, and computes in Float8",
            weights={},
        ),
        *(
            _unsloth(f"{way}, {name}", model, size, four_bits=way == "QLoRA")
            for name, (model, *sizes) in SIZES.items() for way, size in zip(("QLoRA", "LoRA"), sizes, strict=True)
        ),
    )
}  # fmt: skip
"""By name."""
