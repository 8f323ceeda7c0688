"""The runs of `bench.streamed`, and what is to be reached."""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from bench.measuring.measure import GIGABYTE

STREAM = {"base_weights": "stream"}
TWO_LAYERS = 2 * 14_912_384 * 2
"""Bytes of two of the model's layers in bfloat16."""


@dataclass(frozen=True)
class StreamedCase:
    """One run."""

    options: Mapping[str, Any] = field(default_factory=dict)
    method: str = "SFT"
    lora: bool = True
    own_reference: bool = False
    """Whether a reference is passed, though the policy without its adapters would be one."""
    dtype: str = "bfloat16"
    four_bit: bool = False
    """The base weights in 4 bits (QLoRA, arXiv 2305.14314), by bitsandbytes."""


CASES: dict[str, StreamedCase] = {
    "LoRA, resident": StreamedCase(),
    "LoRA, streamed": StreamedCase(STREAM),
    "QLoRA, resident": StreamedCase(four_bit=True),
    "QLoRA, streamed": StreamedCase(STREAM, four_bit=True),
    "LoRA over float32, resident": StreamedCase(dtype="float32"),
    "LoRA over float32, streamed": StreamedCase(STREAM, dtype="float32"),
    "DPO with LoRA, resident, without a reference of its own": StreamedCase({}, "DPO"),
    "DPO with LoRA, streamed, without a reference of its own": StreamedCase(STREAM, "DPO"),
    "DPO with LoRA, streamed, and a streamed reference": StreamedCase(STREAM, "DPO", own_reference=True),
    "all weights, resident": StreamedCase({}, lora=False, dtype="float32"),
    "all weights, streamed": StreamedCase(
        {"trained_weights": "stream", "optimizer_in_backward": "two_pass"}, lora=False, dtype="float32"
    ),
    "all weights, streamed, not clipped": StreamedCase(
        {"trained_weights": "stream", "optimizer_in_backward": True, "max_grad_norm": 0.0}, lora=False, dtype="float32"
    ),
}


@dataclass(frozen=True)
class Target:
    """What is to be reached."""

    what: str
    of: str
    unit: str
    """Of the peak, or of its distance to another run's, in GB; or times another's seconds of the cores a step."""
    most: float
    against: str | None = None

    def verdict(self, found: Mapping[str, Any]) -> tuple[str, bool]:
        """Measured beside target, and whether it is reached."""
        run = found[self.of]
        other = found[self.against] if self.against else None
        if self.unit == "x":
            assert other is not None
            if not run["step_cpu_seconds"]:
                return f"{self.what}: not measured", False
            value = statistics.median(run["step_cpu_seconds"]) / statistics.median(other["step_cpu_seconds"])
        else:
            value = (run["peak_bytes"] - (other["peak_bytes"] if other else 0)) / GIGABYTE
        verdict = "reached" if value <= self.most else "MISSED"
        return f"{self.what}: {value:.2f} {self.unit} (at most {self.most:.2f}): {verdict}", value <= self.most


TARGETS = (
    Target("all weights, streamed and clipped exactly, peak", "all weights, streamed", "GB", 2.0),
    Target("LoRA with a streamed base, peak", "LoRA, streamed", "GB", 0.7),
    Target("LoRA with a streamed base, time", "LoRA, streamed", "x", 1.3, "LoRA, resident"),
    Target(
        "a streamed reference adds to DPO",
        "DPO with LoRA, streamed, and a streamed reference",
        "GB",
        TWO_LAYERS / GIGABYTE,
        "DPO with LoRA, streamed, without a reference of its own",
    ),
)
