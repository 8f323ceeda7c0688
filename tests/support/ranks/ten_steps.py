"""Ten steps over ranks beside the same ten on one rank, in each way to spread a run: see `python -m tests.ranks`."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tests.support.matrix import matrix_models
from tests.support.ranks.sharded_training import on_one_rank, on_ranks

STEPS = 10
WITHIN = 1e-5
CASES: dict[str, dict[str, Any]] = {
    "SFT, ragged": {"kind": "SFT"},
    "SFT, packed": {"kind": "SFT", "packing": True, "max_length": 52, "rows": 4},
    "SFT, answers alone scored": {"kind": "SFT", "scored": "answers"},
    "SFT, accumulated": {"kind": "SFT", "gradient_accumulation_steps": 2, "tokens_per_microbatch": 64},
    "SFT, LoRA": {"kind": "SFT", "lora": True},
    "DPO, shared prefixes": {"kind": "DPO", "prefix_sharing": True},
    "DPO, LoRA, accumulated": {"kind": "DPO", "lora": True, "gradient_accumulation_steps": 2},
    **{kind: {"kind": kind} for kind in ("KTO", "Reward", "ORPO", "CPO", "BCO", "GKD", "Pretrain")},
    **{kind: {"kind": kind} for kind in matrix_models.ONLINE},
}
ZERO: dict[str, Any] = {"reduce_bucket_size": 20_000, "stage3_param_persistence_threshold": 100}
WAYS: dict[str, dict[str, Any]] = {
    "whole copies": {},
    "FSDP2": {"fsdp": True},
    "FSDP2, rows of the vocabulary": {"fsdp": True, "fsdp_split_vocabulary": True},
    "HSDP": {"parallelism_config": {"dp_replicate_size": 2, "dp_shard_size": 2}},
    **{f"ZeRO-{stage}": {"deepspeed": {"zero_optimization": {"stage": stage, **ZERO}}} for stage in (1, 2, 3)},
    "sequences split in two": {"sequence": 2},
    "layers split in two": {"tensor": 2},
    "two stages": {"stages": 2},
}
"""With four ranks, what is split in two is there twice, each for half of the rows."""
ON_FOUR_ALONE = ("HSDP",)


def compare(argv: list[str] | None, description: str | None) -> int:
    """Prints a row for each way; returns 1 where something is further away than `WITHIN`."""
    parser = argparse.ArgumentParser(prog="python -m tests.ranks", description=description)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    options, far = parser.parse_args(argv), False
    cases = {name: {**CASES[name], "max_steps": STEPS} for name in options.cases}
    print("| | ranks | losses | weights |\n|---|---:|---:|---:|")
    for way in options.ways:
        for ranks in (4,) if way in ON_FOUR_ALONE else (2, 4):
            with tempfile.TemporaryDirectory() as folder:
                on_ranks(Path(folder), {name: {**case, **WAYS[way]} for name, case in cases.items()}, ranks)
                found = {name: torch.load(Path(folder) / f"{name}.pt") for name in cases}
            distances = {name: distance(found[name], cases[name]) for name in cases}
            losses, weights = (max(distances, key=lambda name: distances[name][n]) for n in (0, 1))
            cells = (f"{distances[name][n]:.1e} ({name})" for n, name in enumerate((losses, weights)))
            print(f"| {way} | {ranks} | {' | '.join(cells)} |", flush=True)
            far |= max(max(each) for each in distances.values()) > WITHIN
    return int(far)


def distance(found: Any, case: Mapping[str, Any]) -> tuple[float, float]:
    """Relative, of the loss of any step, and of the norm of any weight."""
    losses, weights, _ = found
    with contextlib.redirect_stdout(io.StringIO()):
        expected_losses, expected, _ = on_one_rank(json.dumps(case, sort_keys=True))
    assert len(losses) == len(expected_losses) == STEPS
    assert weights.keys() == expected.keys()
    scale = max(map(abs, expected_losses))  # a loss may pass zero
    return (
        max(abs(ours - theirs) for ours, theirs in zip(losses, expected_losses, strict=True)) / scale,
        max(float((weights[name] - value).norm() / value.norm()) for name, value in expected.items()),
    )
