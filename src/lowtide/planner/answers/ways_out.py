"""What to do where a run does not fit: every way out that the command line has for it, with what it would leave of the
weights.

The bytes are arithmetic on those of the whole weights, and no trace: 16 bits in place of 32 are half, 4 bits with their
scales (QLoRA, arXiv 2305.14314: a float32 scale for each 64 weights) 4.5 of 32.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import Any

from torch import Tensor, nn

from lowtide.memory.allocators.measure import bytes_text
from lowtide.memory.options import TWO_PASS
from lowtide.ops.layers.stacks import expert_stacks, plain_stacks
from lowtide.planner.answers.assumptions import files_dtype, stored_dtype
from lowtide.planner.candidate import PlannedRun
from lowtide.planner.tracing.described_model import DescribedModel
from lowtide.run.engine import computed_in
from lowtide.run.optimizers import OPTIMIZERS

FOUR_BITS = 4.5
"""Of a weight, its share of a scale included."""
PRECOMPUTED = "precompute_ref_log_probs"
REFERENCE = "ref_model_storage"


def ways_out(run: PlannedRun) -> tuple[str, ...]:
    """What a user may write for a run that does not fit, each with what it does; what trains the same model first."""
    found = []
    if run.exact:
        found.append("--lossy lets the plan choose among settings that change the numbers, and names what they change")
    if run.cluster is None and (run.peft_config is None or run.teacher is not None):
        found += _of_references(run)
    found += _of_adapters(run) if run.peft_config is not None else _of_all_weights(run)
    if run.device.kind == "cuda" and run.cluster is None:
        name = run.device.name if run.device.listed else "NAME"
        found.append(f"--devices 2x{name} shares it between GPUs, or between GPUs and their host's memory")
    if "max_length" in vars(run.config({})):
        found.append("--max_length or fewer tokens in a row, where activations are most")
    found.append(f"lowtide gpus {run.method.name} --model ... shows which devices this run fits")
    return tuple(found)


def is_taken(way: str, settings: Mapping[str, Any]) -> bool:
    """Whether a way out is one of the settings that do not fit."""
    return any(way.startswith(f"--{name} ") for name in settings)


def _in_bits(run: PlannedRun, bits: float) -> str:
    """What the whole weights take with so many bits each."""
    return bytes_text(int(sum(each.numel() for each in _weights(run).values()) * bits / 8))


def _in_four_bits(run: PlannedRun) -> str:
    """What they take in 4 bits; stacks of experts' weights that are not multiplied in groups stay in 16."""
    model = _model(run)
    quantized = {id(getattr(experts, name)) for experts, name in plain_stacks(model)}
    weights = dict(model.named_parameters())
    whole = [name for name in expert_stacks(weights) if id(weights[name]) not in quantized]
    left = sum(weights.pop(name).numel() for name in whole)
    found = bytes_text(int(sum(each.numel() for each in weights.values()) * FOUR_BITS / 8) + 2 * left)
    return f"some {found}" + ", routed experts in 16 bits" * bool(whole)


def _weights(run: PlannedRun) -> dict[str, Tensor]:
    """The model's, without memory."""
    return dict(_model(run).named_parameters())


def _model(run: PlannedRun) -> nn.Module:
    made = DescribedModel(run.described, stored_dtype(run), run.method.head)
    return made.on_meta(made.layers)


def _of_adapters(run: PlannedRun) -> Iterator[str]:
    """Where the weights are frozen."""
    quantized, fp16 = run.quantization_config is not None, run.requested.get("fp16")
    if stored_dtype(run).itemsize > 2 and not quantized and not fp16:
        yield f"--dtype bfloat16 stores the frozen weights in 16 bits ({_in_bits(run, 16)})"
    if not quantized:
        yield f"--load_in_4bit stores them in 4 bits (QLoRA, {_in_four_bits(run)})"
    if run.cluster is not None or run.requested.get("base_weights"):
        return
    if quantized:
        where = "a temporary file" if run.device.kind == "cpu" else "host memory"
        yield f"--base_weights stream brings in a layer of them at a time, from {where}"
    elif (dtype := _streamed_in(run)) is not None:
        yield f"--base_weights stream{dtype} brings in a layer of them at a time, in the dtype of the model's files"


def _streamed_in(run: PlannedRun) -> str | None:
    """What says the dtype in which weights can be streamed from their files; None where they cannot be."""
    files = files_dtype(run, computed_in(run.config({})))
    if files == str(stored_dtype(run)).removeprefix("torch."):
        return ""
    return " --dtype bfloat16" if files == "bfloat16" else None


def _of_all_weights(run: PlannedRun) -> Iterator[str]:
    """Where all weights are trained."""
    half, four = _in_bits(run, 16), _in_four_bits(run)
    if run.cluster is None:
        yield from _in_backward(run)
    resident = "--trained_weights resident " if run.requested.get("trained_weights") == "stream" else ""
    if stored_dtype(run).itemsize > 2 and not run.requested.get("fp16"):
        if not resident:  # streamed ones are stepped in the dtype in which they were loaded
            yield f"--optim adamw_compressed or adamw_stochastic trains weights in 16 bits ({half})"
            yield "--optim adamw_stochastic_8bit, its moments in 8 bits too"
        yield "--dtype bfloat16 alone, in which small updates are lost"
    if not run.requested.get("fp16"):
        yield f"{resident}--use_peft --dtype bfloat16 trains a LoRA adapter on frozen weights in 16 bits ({half})"
    yield f"{resident}--use_peft --load_in_4bit trains one on weights in 4 bits (QLoRA, {four})"


def _of_references(run: PlannedRun) -> Iterator[str]:
    """Of a method that keeps a frozen copy of the model, or a teacher."""
    config = run.config({})
    if not getattr(config, "compares", False) or config.follows or getattr(config, PRECOMPUTED, False):
        return
    if _precomputes(run, config):
        yield f"--{PRECOMPUTED} true computes what the reference says before training, and keeps no reference"
    if REFERENCE in run.requested or run.requested.get("base_weights") == "stream":
        return
    if run.device.kind == "cuda":
        yield f"--{REFERENCE} cpu keeps the reference in host memory"
    bits = {8: "torchao", 4: "bitsandbytes"}
    stored = [f"{each}bit" for each, package in bits.items() if find_spec(package)]
    if stored:
        yield f"--{REFERENCE} {' or '.join(stored)} rounds the reference's weights to so many bits"
    if run.peft_config is None and config.optim not in OPTIMIZERS and _streamed_in(run) == "":
        yield "--base_weights stream brings in a layer of the reference at a time, from its files"


def _precomputes(run: PlannedRun, config: Any) -> bool:
    """Whether what a reference says can be computed before training."""
    return hasattr(config, PRECOMPUTED) and not run.streamed and config.optim not in OPTIMIZERS


def _in_backward(run: PlannedRun) -> Iterator[str]:
    """What steps each weight as its gradient arrives."""
    config = run.config({})
    if config.fp16 or config.gradient_accumulation_steps > 1:
        return
    clips = config.max_grad_norm
    option = f"--optimizer_in_backward {TWO_PASS if clips else 'true'}"
    if not config.optimizer_in_backward:
        yield f"{option} frees each gradient as it arrives{', at twice the time' if clips else ''}"
    if config.trained_weights == "stream" or config.optim == "adamw_compressed":
        return
    beside = "" if config.optimizer_in_backward else f" {option}"
    if getattr(config, "compares", False) and not getattr(config, PRECOMPUTED, False):
        if config.follows or REFERENCE in run.requested or not _precomputes(run, config):
            return  # a reference would be a resident copy
        beside += f" --{PRECOMPUTED} true"
    where = "a file" if run.device.kind == "cpu" else "host memory"
    yield f"--trained_weights stream{beside} keeps weights and states in {where}, and brings in a layer at a time"
