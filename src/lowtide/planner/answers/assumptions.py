"""What a prediction takes for granted, in words: precision, optimizer, the tokens of a micro-batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from lowtide.engine.weights.model_init import model_init
from lowtide.memory.allocators.measure import bytes_text
from lowtide.memory.optimizers.states import optimizer_name
from lowtide.planner.candidate import PlannedRun
from lowtide.planner.estimate import Estimate
from lowtide.run.optimizers import OPTIMIZERS


def assumptions_of(run: PlannedRun, settings: Mapping[str, Any], found: Estimate) -> tuple[str, ...]:
    """In a line each.

    Args:
        run: that is predicted.
        settings: that a plan chose beyond the user's own.
        found: what is predicted of it.
    """
    config = run.config(settings)
    adapters = run.adapters(settings)
    in_few_bytes = adapters is None and optimizer_name(config) in OPTIMIZERS  # which keep weights in bfloat16
    stored = "bfloat16" if in_few_bytes else str(stored_dtype(run, settings)).removeprefix("torch.")
    computes = "bfloat16" if config.bf16 else "float16" if config.fp16 else stored
    if run.quantization_config is not None:
        stored = f"{4 if run.quantization_config.load_in_4bit else 8} bits, the rest {stored}"
    if config.base_dtype is not None:
        stored = f"{config.base_dtype} in frozen layers, the rest {stored}"
    trained = "all weights" if adapters is None else f"adapters ({type(adapters).__name__.removesuffix('Config')})"
    if (rank := getattr(adapters, "r", None)) is not None:
        trained = f"adapters of rank {rank}"
    checkpointing = "with" if config.gradient_checkpointing else "without"
    return (
        f"Assumed: {_heaviest(found.heaviest_tokens, config.tokens_per_microbatch)}{trained} trained by "
        f"{optimizer_name(config)}; weights stored in {stored}, computed in {computes}; {checkpointing} gradient "
        "checkpointing; nothing else runs on the device.",
    )


def _heaviest(tokens: int | None, budget: int | None) -> str:
    """What there is to say of the heaviest micro-batch, of which one row may be longer than the budget."""
    if tokens is None:
        return ""
    pieces = f", run in pieces of at most {budget:,}" if budget is not None and tokens > budget else ""
    return f"{tokens:,} tokens in the heaviest micro-batch{pieces}; "


def stored_dtype(run: PlannedRun, settings: Mapping[str, Any] | None = None) -> torch.dtype:
    """In which the weights lie that are not quantized."""
    name = model_init(run.config(settings or {}).model_init_kwargs).get("dtype") or "float32"
    if name == "auto":
        name = getattr(run.described, "dtype", None) or "float32"
    return getattr(torch, str(name).removeprefix("torch."))


def files_dtype(run: PlannedRun, computed: torch.dtype | None) -> str:
    """The dtype of the model's files, as its config says it, if frozen weights can be used as they are there; else
    empty."""
    if not run.from_files:
        return ""
    if run.quantization_config is not None:  # quantized weights are made as they are loaded, of files in any dtype
        return str(stored_dtype(run)).removeprefix("torch.")
    dtype = str(getattr(run.described, "dtype", None) or "").removeprefix("torch.")
    return dtype if computed is None or str(computed).removeprefix("torch.") == dtype else ""


def in_bfloat16(run: PlannedRun, settings: Mapping[str, Any]) -> str | None:
    """What there is to say of frozen weights that are float32; None where there are none."""
    frozen = run.adapters(settings) is not None and run.quantization_config is None
    if not frozen or stored_dtype(run, settings) != torch.float32:
        return None
    published = str(getattr(run.described, "dtype", None)).removeprefix("torch.")  # a config may have it in words
    rounds = "rounds none of them, as the model was published in it" if published == "bfloat16" else "rounds them"
    return (
        "The frozen weights are stored in float32. --dtype bfloat16 stores them in half the memory, which "
        f"{rounds}; layers then pass bfloat16 on."
    )


def with_it(proposed: str, peak: float, now: float) -> tuple[str, ...]:
    """A proposal with the peak that it would have; empty where that is no smaller.

    Args:
        proposed: in a sentence.
        peak: bytes with it.
        now: bytes without.
    """
    peaks = [bytes_text(int(each)) for each in (peak, now)]
    return (
        ()
        if peak >= now or peaks[0] == peaks[1]
        else (f"{proposed} With it the peak is {' in place of '.join(peaks)}.",)
    )
