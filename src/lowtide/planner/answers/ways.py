"""The ways to train a model that a device table compares, each with its settings from the fastest to the smallest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from lowtide.memory.options import TWO_PASS
from lowtide.memory.table import EIGHT, TECHNIQUES
from lowtide.planner.candidate import PlannedRun
from lowtide.planner.choices import FROZEN_BFLOAT16

FULL, SIXTEEN, LORA, QLORA = "full", "full, 16 bits", "LoRA", "QLoRA"
PLAIN, SAVING = "plain", "checkpointing"
SMALL = {"activation_offloading": True, "mlp_tile_tokens": 8192}
ROUNDED = "adamw_stochastic_8bit"
STATES = 16
"""Bytes of a parameter that AdamW trains in float32: weight, gradient, two moments."""
OTHER_STATES = {"optim", "dtype", "model_init_kwargs", "optimizer_in_backward", "optimizer_states_on_host"}
"""Options with which there are fewer."""
ROUNDING = "bfloat16 AdamW with stochastic rounding"


@dataclass(frozen=True)
class FourBits:
    """Weights in 4 bits, as `BitsAndBytesConfig` says it, which asks for bitsandbytes."""

    load_in_4bit: bool = True
    bnb_4bit_use_double_quant: bool = False
    bnb_4bit_compute_dtype: torch.dtype = torch.bfloat16


@dataclass(frozen=True)
class Stage:
    """Settings of one way."""

    way: str
    options: Mapping[str, Any]
    """Of the method's config and of the command."""
    whole: bool = False
    """Whether they do something only where a batch is one micro-batch."""
    begins_with: str = ""
    """The stage of the same way that takes at least as much for short rows, and need not be traced there."""
    name: str = ""
    grows_like: tuple[str, str] | None = None
    """The way and stage that grow at least as much with the tokens, so that long rows need not be traced here."""
    long: bool = True
    """Whether it is also asked for the longest row."""
    least: float = 0
    """Bytes that it holds for each of the model's parameters at least, whatever the rows."""


@dataclass(frozen=True)
class Way:
    """A way to train, with its settings from the fastest to the smallest."""

    name: str
    stages: tuple[Stage, ...]
    written: Mapping[str, Any] = field(default_factory=dict)
    """What a user writes for all of them."""
    changes: str | None = None
    """What it changes in the numbers of the method."""


def ways_of(run: PlannedRun) -> list[Way]:
    """Those that agree with what a user asked for; adapters leave out what trains all weights."""
    found = [_full(run), *([_sixteen()] if run.device.has_bf16 else [])] if run.peft_config is None else []
    found += [_adapters(run, four_bits=False)] if run.quantization_config is None else []
    found.append(_adapters(run, four_bits=True))
    kept = [replace(way, stages=tuple(each for each in way.stages if _agrees(each, run))) for way in found]
    return [way for way in kept if way.stages]


def older(run: PlannedRun) -> bool:
    """Whether it is on a GPU without bfloat16, where float16 takes its place, and not all ways are compared."""
    return run.device.kind == "cuda" and not run.device.has_bf16


def _mixed(run: PlannedRun, *, adapters: bool) -> dict[str, Any]:
    """The mixed precision that a user writes: bfloat16 is the default of a GPU that has it, and on a CPU all weights
    are trained in float32."""
    if "bf16" in run.requested or "fp16" in run.requested or run.device.has_bf16:
        return {}
    return {"fp16": True} if older(run) else {"bf16": True} if adapters else {}


def run_of(run: PlannedRun, way: Way) -> PlannedRun:
    """The run that a way makes of what was asked for."""
    if way.name not in (LORA, QLORA):
        return run
    adapters = run.adapters({"use_peft": True})
    four_bits = FourBits(bnb_4bit_compute_dtype=getattr(torch, _sixteen_bits(run)))
    quantized = (run.quantization_config or four_bits) if way.name == QLORA else run.quantization_config
    return replace(run, peft_config=adapters, quantization_config=quantized)


def _full(run: PlannedRun) -> Way:
    """In a second stage on a GPU nothing but weights and the gradient of one of them is there at a time."""
    options = {**_mixed(run, adapters=False), "gradient_checkpointing": True}
    stages = [Stage(FULL, options, name=SAVING, least=0 if run.requested.keys() & OTHER_STATES else STATES)]
    if run.device.has_bf16:
        small = {"gradient_checkpointing": True, "optimizer_in_backward": TWO_PASS, "optimizer_states_on_host": True}
        offloaded = {**small, "activation_offloading": True}
        stages.append(Stage(FULL, offloaded, whole=True, name="smallest", grows_like=(FULL, SAVING)))
    return Way(FULL, tuple(stages))


def _sixteen() -> Way:
    options = {"gradient_checkpointing": True, "optim": ROUNDED}
    stages = (Stage(SIXTEEN, options, name=SAVING, grows_like=(FULL, SAVING)),)
    return Way(SIXTEEN, stages, changes=f"{TECHNIQUES[ROUNDING].changes}; {EIGHT}")


def _adapters(run: PlannedRun, *, four_bits: bool) -> Way:
    name, half = QLORA if four_bits else LORA, {} if _dtype_of(run) else {"dtype": _sixteen_bits(run)}
    saving = {**_mixed(run, adapters=True), **half, "gradient_checkpointing": True}
    stages = [Stage(name, saving, name=SAVING, least=0.5 if four_bits else 2 if half else 0)]
    if run.device.has_bf16:
        stages.insert(0, Stage(name, {**saving, "gradient_checkpointing": False}, name=PLAIN, long=False))
        stages.append(Stage(name, {**saving, **SMALL}, name="smallest", begins_with=SAVING))
    written = {"use_peft": True, **({"load_in_4bit": True} if four_bits else {})}
    changes = "an adapter is trained in place of the weights"
    if four_bits:
        changes += ", which are rounded to 4 bits"
    elif half:
        changes += f"; {FROZEN_BFLOAT16}"
    return Way(name, tuple(stages), written, changes)


def _sixteen_bits(run: PlannedRun) -> str:
    return "float16" if older(run) else "bfloat16"


def _dtype_of(run: PlannedRun) -> Any:
    return (run.requested.get("model_init_kwargs") or {}).get("dtype") or run.requested.get("dtype")


def _agrees(stage: Stage, run: PlannedRun) -> bool:
    return all(run.requested.get(name, value) == value for name, value in stage.options.items())
