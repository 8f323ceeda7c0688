"""Ten steps over ranks beside the same ten on one rank, in each way to spread a run: see `python -m tests.ranks`."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tests.support import matrix
from tests.support.heap import leave_out
from tests.support.processes import run_ranks
from tests.support.sharded_training import meeting_place, on_one_rank, rank_of, trained

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
    **{kind: {"kind": kind} for kind in matrix.ONLINE},
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
    print("| | ranks | trainings | losses | weights | refused |\n|---|---:|---:|---:|---:|---|")
    for way in options.ways:
        for ranks in (4,) if way in ON_FOUR_ALONE else (2, 4):
            found = over_ranks({name: {**case, **WAYS[way]} for name, case in cases.items()}, ranks)
            refused = [name for name, each in found.items() if isinstance(each, str)]
            distances = {name: distance(each, cases[name]) for name, each in found.items() if name not in refused}
            losses, weights = (max(distances, key=lambda name: distances[name][n]) for n in (0, 1))
            cells = (f"{distances[name][n]:.1e} ({name})" for n, name in enumerate((losses, weights)))
            print(f"| {way} | {ranks} | {len(distances)} | {' | '.join(cells)} | {', '.join(refused)} |", flush=True)
            for name in refused:
                print(f"{name}: {found[name]}", file=sys.stderr)
            far |= max(max(each) for each in distances.values()) > WITHIN
    return int(far)


def over_ranks(cases: Mapping[str, Mapping[str, Any]], ranks: int) -> dict[str, Any]:
    """What came of each case on so many ranks, or why it was refused."""
    with tempfile.TemporaryDirectory() as folder:
        place = meeting_place(Path(folder))
        (place / "cases.json").write_text(json.dumps(cases))
        run_ranks(_rank, folder, ranks, ranks=ranks)
        return torch.load(place / "found.pt")


def _rank(rank: int, folder: str, ranks: int) -> None:
    place, found = Path(folder), {}
    with rank_of(place, rank, ranks), contextlib.redirect_stdout(io.StringIO()):
        for name, case in json.loads((place / "cases.json").read_text()).items():
            try:
                found[name] = trained(folder=place / name, ranks=ranks, **case)
            except ValueError as refusal:  # as the trainer is made, on all ranks alike
                found[name] = str(refusal)
            if len(found) == 1:
                leave_out()
    if rank == 0:
        torch.save(found, place / "found.pt")


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
