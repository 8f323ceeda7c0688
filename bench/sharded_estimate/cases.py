"""Runs over ranks whose peaks are predicted and then measured: every engine, with what changes the memory of a rank."""

from __future__ import annotations

from typing import Any

from bench.estimate.cases import EstimateCase, case_of

FSDP2 = {"fsdp": True}
IN_ROWS = {"fsdp": True, "fsdp_split_vocabulary": True}
SIZES = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
ON_HOST = {"device": "cpu"}


def zero(stage: int, **more: Any) -> dict[str, Any]:
    """Options for a stage of ZeRO, with the sizes that transformers' `"auto"` stands for."""
    return {"deepspeed": {"zero_optimization": {"stage": stage, **dict.fromkeys(SIZES, "auto"), **more}}}


def split(**sizes: int) -> dict[str, Any]:
    """Options for a `parallelism_config`."""
    return {"parallelism_config": {f"{name}_size": size for name, size in sizes.items()}}


def _over(
    ranks: int, options: dict[str, Any], method: str = "sft", model: str = "llama-22m", **more: Any
) -> EstimateCase:
    return case_of(method, model, ranks=ranks, **options, **more)


CASES: dict[str, EstimateCase] = {
    "FSDP2": _over(2, FSDP2),
    "FSDP2, 4 ranks": _over(4, FSDP2),
    "FSDP2, no reshard": _over(2, FSDP2 | {"fsdp_config": {"reshard_after_forward": False}}),
    "FSDP2, accumulation": _over(2, FSDP2, gradient_accumulation_steps=2),
    "FSDP2, offload": _over(2, FSDP2 | {"fsdp_config": {"offload_params": True}}),
    "FSDP2, rows": _over(2, IN_ROWS),
    "FSDP2, rows, 4 ranks": _over(4, IN_ROWS),
    "FSDP2, tied 45M": _over(2, FSDP2, model="qwen2-45m"),
    "FSDP2, rows, tied 45M": _over(2, IN_ROWS, model="qwen2-45m"),
    "FSDP2, 96M": _over(2, FSDP2, model="llama-96m"),
    "FSDP2, LoRA, 96M": _over(2, FSDP2, model="llama-96m", lora=True),
    "FSDP2, DPO": _over(2, FSDP2, method="dpo"),
    "FSDP2, DPO, LoRA": _over(2, FSDP2, method="dpo", lora=True),
    "FSDP2, reward": _over(2, FSDP2, method="reward", rows=2, max_length=2048),
    "HSDP, 4 ranks": _over(4, split(dp_replicate=2, dp_shard=2)),
    "whole copies": _over(2, {}),
    "whole copies, tied 45M, 4 ranks": _over(4, {}, model="qwen2-45m"),
    "split sequences": _over(2, split(sp=2)),
    "split sequences, FSDP2, 4 ranks": _over(4, split(sp=2) | FSDP2),
    "split sequences, GRPO": _over(2, split(sp=2), method="grpo", rows=8, max_length=128, beta=0.04),
    "split layers": _over(2, split(tp=2)),
    "split layers, DPO": _over(2, split(tp=2), method="dpo"),
    "split layers, GRPO": _over(2, split(tp=2), method="grpo", rows=8, max_length=128, beta=0.04),
    "FSDP2, GRPO": _over(2, FSDP2, method="grpo", rows=8, max_length=128, beta=0.04),
    "ZeRO-1": _over(2, zero(1)),
    "ZeRO-1, offload": _over(2, zero(1, offload_optimizer=ON_HOST)),
    "ZeRO-2": _over(2, zero(2)),
    "ZeRO-2, accumulation, 4 ranks": _over(4, zero(2), gradient_accumulation_steps=2),
    "ZeRO-2, 96M": _over(2, zero(2), model="llama-96m"),
    "ZeRO-3": _over(2, zero(3)),
    "ZeRO-3, 4 ranks": _over(4, zero(3)),
    "ZeRO-3, DPO": _over(2, zero(3), method="dpo"),
    "ZeRO-3, lets go": _over(2, zero(3, stage3_max_live_parameters=0, stage3_max_reuse_distance=0)),
    "ZeRO-3, offload": _over(2, zero(3, offload_optimizer=ON_HOST, offload_param=ON_HOST)),
    "ZeRO-3, LoRA, 96M": _over(2, zero(3), model="llama-96m", lora=True),
}
"""By name."""
