"""The rows of the table of memory techniques: plain AdamW, each technique alone, the best combinations, and TRL.

Every lowtide row has gradient checkpointing, and a token budget of one dataset row where a step may have several
micro-batches: it keeps activations small and, as micro-batches are summed exactly, changes no number. What steps in
backward needs the whole batch in one micro-batch, so there the budget is left out.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from lowtide import SFTConfig
from lowtide.memory.table import TECHNIQUES, Technique

BATCH, QUICK_BATCH = 8, 2
IN_BACKWARD = {"optimizer_in_backward": True, "max_grad_norm": 0.0}
LEAN = {"activation_offloading": True, "mlp_tile_tokens": 256}
"""What keeps the activations of a whole batch small, where there are no smaller micro-batches."""
LEAN_ROW = {"activation_offloading": True, "mlp_tile_tokens": 128}
"""The same for micro-batches of one row, which adapters are trained in."""
DEFAULTS = {"gradient_checkpointing", "padding_free", "prefix_sharing", "rehearsal", "tokens_per_microbatch"}
"""Options of techniques that are on in every row."""
OF_FILES = {"base_weights", "trained_weights"}
"""Options of techniques that need a model on disk, which `bench.streamed` measures."""
TILE = 512


@dataclass(frozen=True)
class MemoryCase:
    """One row of the table."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    package: str = "lowtide"
    dtype: str = "float32"
    """Of the weights that the trainer is given."""
    lora: bool = False
    """Rank 16 on all linear layers; else all weights are trained."""
    four_bit: bool = False
    """The base weights in 4 bits (QLoRA, arXiv 2305.14314), by bitsandbytes."""
    exact: bool = True
    """Whether the numbers are those of float32 AdamW on all weights."""
    target_gb: float | None = None
    """The most that a run of 8 rows of 1,024 tokens should take on a CPU, less what the imports hold."""
    needs: tuple[str, ...] = ()

    @property
    def whole_batch(self) -> bool:
        """Whether a step is one micro-batch."""
        return bool(self.options.get("optimizer_in_backward"))


TARGETS_GB = {"compressed AdamW": 7.3}
LOW_RANK = {"optim_target_modules": "all-linear"}
MORE: dict[str, dict[str, Any]] = {
    "tiled MLP": {"mlp_tile_tokens": TILE},  # the table's own value is for tests
    "GaLore": LOW_RANK,
    "APOLLO": LOW_RANK,
}
"""What a technique is given here beside, or in place of, its own options."""


def _alone(technique: Technique) -> MemoryCase:
    return MemoryCase(
        technique.name,
        {**technique.options, **MORE.get(technique.name, {})},
        exact=technique.changes is None,
        target_gb=TARGETS_GB.get(technique.name),
        lora=technique.name == "LoRA-FA",
        needs=technique.needs,
    )


def _is_measured(technique: Technique) -> bool:
    """Whether a technique can be switched on in this benchmark, whose model has no recurrences, and is not on."""
    known = {each.name for each in fields(SFTConfig)}
    names = technique.options.keys()
    if technique.name == "checkpointing of recurrences alone":
        return False
    return bool(names) and names <= known and not names <= DEFAULTS and not names & OF_FILES


FLASH = {"optim": "adamw_flash"}
STOCHASTIC_8BIT = {"optim": "adamw_stochastic_8bit"}
COMBINATIONS = (
    MemoryCase("AdamW, offloaded and tiled", LEAN, target_gb=8.2),
    MemoryCase("best exact: in backward, offloaded and tiled", {**IN_BACKWARD, **LEAN}, target_gb=6.8),
    MemoryCase(
        "compressed AdamW, in backward, offloaded and tiled",
        {**IN_BACKWARD, **LEAN, "optim": "adamw_compressed"},
        exact=False,
    ),
    MemoryCase("FlashAdamW, in backward", {**IN_BACKWARD, **FLASH}, exact=False),
    MemoryCase("FlashAdamW, in backward, offloaded and tiled", {**IN_BACKWARD, **LEAN, **FLASH}, exact=False),
    MemoryCase(
        "best lossy: bfloat16, 8-bit moments, in backward, offloaded and tiled",
        {**IN_BACKWARD, **LEAN, **STOCHASTIC_8BIT},
        dtype="bfloat16", exact=False, target_gb=3.2,
    ),
    MemoryCase(
        "bfloat16, Adafactor, in backward, offloaded and tiled",
        {**IN_BACKWARD, **LEAN, "optim": "adafactor"},
        dtype="bfloat16", exact=False, target_gb=3.2,
    ),
    MemoryCase("LoRA", lora=True, exact=False),
    MemoryCase("LoRA, offloaded and tiled", LEAN_ROW, lora=True, exact=False, target_gb=2.5),
    MemoryCase("LoRA, bfloat16 base", lora=True, dtype="bfloat16", exact=False),
    MemoryCase(
        "LoRA, bfloat16 base, offloaded and tiled", LEAN_ROW, lora=True, dtype="bfloat16", exact=False, target_gb=1.3
    ),
    MemoryCase("QLoRA", lora=True, four_bit=True, dtype="bfloat16", exact=False, needs=("bitsandbytes",)),
    MemoryCase(
        "QLoRA, offloaded and tiled", LEAN_ROW,
        lora=True, four_bit=True, dtype="bfloat16", exact=False, target_gb=0.85, needs=("bitsandbytes",)
    ),
)  # fmt: skip

CASES: dict[str, MemoryCase] = {
    each.name: each
    for each in (
        MemoryCase("plain"),
        *(_alone(technique) for technique in TECHNIQUES.values() if _is_measured(technique)),
        *COMBINATIONS,
        MemoryCase("trl", package="trl"),
        MemoryCase(
            "trl, one row at a time",
            {"per_device_train_batch_size": 1, "gradient_accumulation_steps": "batch"},
            package="trl",
        ),
    )
}
"""By name."""


def flags(case: MemoryCase, batch: int, length: int) -> dict[str, Any]:
    """What a row's trainer is given beside precision, device and number of steps."""
    options = {
        "per_device_train_batch_size": batch,
        "max_length": length,
        "gradient_checkpointing": True,
        **({"tokens_per_microbatch": length} if case.package == "lowtide" and not case.whole_batch else {}),
        **case.options,
    }
    return {name: batch if value == "batch" else value for name, value in options.items()}
