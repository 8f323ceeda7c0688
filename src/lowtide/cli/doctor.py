"""`lowtide doctor`: what is installed and what this machine has; what is missing, and what that would be good for.

It trains nothing, loads no model and asks no network, so that its answer can be pasted into an issue.
"""

from __future__ import annotations

import argparse
import importlib.metadata as metadata
import json
import os
import platform
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec

import lowtide
from lowtide.cli.endings import NOT_READY
from lowtide.compat.argparse import Subparsers
from lowtide.process.versions import version_of

WITHOUT_BF16 = "float32, or --fp16 true, with what is trained stored in float32 (as it is by default)"
"""How to compute on a GPU that has no bfloat16: all weights or an adapter."""
HUB_SWITCHES = ("HF_HUB_OFFLINE", "HF_HOME", "HF_ENDPOINT")


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    name: str
    found: str | None
    """What there is; None where it is missing."""
    remark: str = ""
    """What a missing thing would be good for and how to get it, or what is wrong with one that is there."""
    wrong: bool = False
    """Whether something that lowtide requires is missing or broken, or is of a version that no test has seen."""


@dataclass(frozen=True)
class Optional:
    """A package that lowtide uses where it is installed."""

    module: str
    package: str
    use: str
    install: str


OPTIONAL = (
    Optional("bitsandbytes", "bitsandbytes", "bases in 4 and 8 bits, 8-bit optimizers", "lowtide[bnb]"),
    Optional("torchao", "torchao", "optimizers in 8 and 4 bits, quantized bases", "lowtide[ao]"),
    Optional("galore_torch", "galore-torch", "the GaLore optimizer", "lowtide[low-rank]"),
    Optional("apollo_torch", "apollo-torch", "the APOLLO optimizer", "lowtide[low-rank]"),
    Optional("liger_kernel", "liger-kernel", "Liger's kernels (use_liger_kernel), on a GPU", "lowtide[liger]"),
    Optional("deepspeed", "deepspeed", "ZeRO by a DeepSpeed config", "lowtide[deepspeed]"),
    Optional(
        "flash_attn", "flash-attn", "attention on a GPU by flash-attn 2; torch's own serves too", "lowtide[flash]"
    ),
    Optional("fla", "flash-linear-attention", "recurrent layers on a GPU, in 16 bits", "flash-linear-attention"),
    Optional("causal_conv1d", "causal-conv1d", "short convolutions on a GPU, in 16 bits", "causal-conv1d"),
    Optional("lm_eval", "lm-eval", "lm-eval's tasks in lowtide evaluate", "lowtide[eval]"),
    Optional("gguf", "gguf", "files for llama.cpp (lowtide export)", "lowtide[gguf]"),
    Optional("vllm", "vllm", "completions of online methods by vLLM, in an environment of its own", "vllm"),
    Optional("math_verify", "math-verify", "the rewards accuracy_reward and reasoning_accuracy_reward", "math-verify"),
    Optional("tensorboard", "tensorboard", "report_to: tensorboard", "tensorboard"),
    Optional("wandb", "wandb", "report_to: wandb", "wandb"),
    Optional("trackio", "trackio", "report_to: trackio", "trackio"),
    Optional("mlflow", "mlflow", "report_to: mlflow", "mlflow"),
)


def add_parser(subparsers: Subparsers) -> None:
    """Add the subcommand to `lowtide`'s parser."""
    parser = subparsers.add_parser(
        "doctor",
        help="what is installed, what this machine has, and what is missing",
        description="Show versions, devices, attention backends, optional packages and memory: what is there, what is "
        "missing, and what that would be good for. Nothing is trained or downloaded.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Look, and show what was found; the exit status, which is 1 where something that training needs is wrong."""
    report = examined()
    wrong = [each.name for findings in report.values() for each in findings if each.wrong]
    if arguments.json:
        print(json.dumps({group: [vars(each) for each in found] for group, found in report.items()}, indent=2))
    else:
        _show(report, wrong)
    return NOT_READY if wrong else 0


def _show(report: Mapping[str, Sequence[Finding]], wrong: Sequence[str]) -> None:
    from rich.table import Table
    from rich.text import Text

    from lowtide.terminal import Console

    console = Console()
    for group, findings in report.items():
        table = Table(
            title=group, title_justify="left", title_style="bold", show_header=False, box=None, pad_edge=False
        )
        table.add_column(min_width=18, no_wrap=True)
        table.add_column(overflow="fold")
        for each in findings:
            style = "red" if each.wrong else "dim" if each.found is None else ""
            table.add_row(each.name, Text(": ".join(filter(None, (each.found or "missing", each.remark))), style))
        console.print(table)
        console.print()
    console.print(f"To mend: {', '.join(wrong)}." if wrong else "Nothing that lowtide requires is missing.")


def examined() -> dict[str, list[Finding]]:
    """What was found, in groups; without those that torch tells where it cannot be imported."""
    by_torch = {} if _import_error("torch") else {"machine": machine(), "devices": devices(), "attention": attention()}
    return {
        "versions": versions(),
        **by_torch,
        "optional": [optional(each) for each in OPTIONAL],
        "hub": [Finding(name, os.environ.get(name, "not set")) for name in HUB_SWITCHES],
    }


def versions() -> list[Finding]:
    """Python, lowtide, and the packages that it requires."""
    own = [Finding("Python", platform.python_version()), Finding("lowtide", lowtide.__version__)]
    return own + [_required(line) for line in _requirements()]


def _requirements() -> list[str]:
    try:
        return [line for line in metadata.requires("lowtide") or [] if "extra ==" not in line]
    except metadata.PackageNotFoundError:
        return []  # sources on the path that nobody installed


def _required(line: str) -> Finding:
    """Whether a required package is there, in a version that the tests have seen."""
    from packaging.requirements import Requirement

    asked = Requirement(line)
    version = version_of(asked.name)
    if not version:
        return Finding(asked.name, None, f'pip install "{asked}"', wrong=True)
    if asked.name == "torch" and (reason := _import_error(asked.name)):
        return Finding(asked.name, version, f"it cannot be imported ({reason}): install it again", wrong=True)
    if asked.specifier.contains(version, prereleases=True):
        return Finding(asked.name, version)
    return Finding(asked.name, version, f'lowtide requires {asked.specifier}: pip install "{asked}"', wrong=True)


def _import_error(module: str) -> str:
    """Why a module cannot be imported; empty where it can."""
    try:
        import_module(module)
    except (ImportError, OSError) as error:  # OSError: of a shared library
        return str(error) or type(error).__name__
    return ""


def machine() -> list[Finding]:
    """System, cores, memory, disk."""
    import torch

    from lowtide.memory.allocators.measure import bytes_text
    from lowtide.planner.budget import free_bytes
    from lowtide.planner.devices import device_named

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    here = device_named("cpu")
    return [
        Finding("system", f"{platform.system()} {platform.release()}, {platform.machine()}"),
        Finding("cores", f"{cores}, torch uses {torch.get_num_threads()}"),
        Finding("memory", f"{bytes_text(here.memory_bytes)}, {bytes_text(free_bytes(here))} free"),
        Finding("disk here", f"{bytes_text(shutil.disk_usage('.').free)} free"),
    ]


def devices() -> list[Finding]:
    """GPUs, and what the processor computes in."""
    import torch

    from lowtide.compat.torch import cpu_has_bf16

    found = [_gpu(index) for index in range(torch.cuda.device_count())]
    if not found:
        built = torch.version.cuda or torch.version.hip
        why = "torch finds none" if built else f"this torch ({torch.__version__}) is built without CUDA"
        found = [Finding("CUDA", None, f"{why}. Training and planning work on the CPU")]
    if torch.backends.mps.is_available():
        found.append(Finding("MPS", "Apple's GPU"))
    half = "has instructions for it: --bf16 true --use_cpu true computes faster" if cpu_has_bf16() else None
    return [*found, Finding("bfloat16 on the CPU", half, "" if half else "float32 is the faster one there")]


def _gpu(index: int) -> Finding:
    import torch

    from lowtide.memory.allocators.measure import bytes_text

    found = torch.cuda.get_device_properties(index)
    bf16 = "" if found.major >= 8 else f", no bfloat16: {WITHOUT_BF16}"
    size = bytes_text(found.total_memory)
    return Finding(f"cuda:{index}", f"{found.name}, {size}, compute capability {found.major}.{found.minor}{bf16}")


def attention() -> list[Finding]:
    """Which backends can serve plain attention here, the preferred one first, and Triton."""
    import torch

    from lowtide.ops.attention.varlen_attention import BACKENDS, rules_of
    from lowtide.ops.target import has_triton

    device = "cuda" if torch.cuda.is_available() else "cpu"
    tensor = torch.zeros(8, 2, 64, dtype=torch.bfloat16, device=device)
    rules = rules_of({}, 64, 8)
    found: list[Finding] = []
    for name, backend in BACKENDS.items():
        reason = backend.why_not(tensor, tensor, tensor, rules)
        used = "" if any(each.found for each in found) else "used for plain attention in 16 bits"
        found.append(Finding(name, None if reason else backend.title, reason or used))
    kernels = "the head and flex attention on a GPU (it comes with CUDA builds of torch)"
    triton = Finding("Triton", version_of("triton") or None) if has_triton() else Finding("Triton", None, kernels)
    return [*found, triton]


def optional(package: Optional) -> Finding:
    """Whether an optional package is there."""
    if find_spec(package.module) is None:
        return Finding(package.package, None, f'{package.use}; pip install "{package.install}"')
    return Finding(package.package, version_of(package.package, "there"), package.use)
