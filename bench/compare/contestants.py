"""Who is compared with whom: a library and the flags that its users would give.

A contestant's flags come on top of `common_flags`, which both libraries get and which only fix what must be equal
(rows and their order, precision, number of steps). Everything else stays at the library's own defaults.
"""

from dataclasses import dataclass, field
from typing import Any

from bench.inputs.shapes import Shape

BATCH = 8
PACKED_BATCH = 2
"""Bins of 1,024 tokens a step: about as many real tokens as `BATCH` rows of the long-tailed case hold."""


@dataclass(frozen=True)
class Contestant:
    """One library with one set of flags."""

    package: str
    """The library, by the name that it is imported under."""
    flags: dict[str, Any] = field(default_factory=dict)
    fastest_attention: bool = False
    """The model's own choice, or FlashAttention 2 on CUDA where it is installed and sdpa elsewhere."""
    rows: int = BATCH
    against: str | None = None
    """The contestant that this one is set against, beside the baseline `trl`."""
    remark: str = ""
    """What its numbers leave out, for the page of results."""


COMMON = {
    "trl": Contestant("trl"),
    "lowtide": Contestant("lowtide"),
    "trl-no-recomputation": Contestant("trl", {"gradient_checkpointing": False}),
    "lowtide-auto": Contestant(
        "lowtide",
        {"memory_budget": "auto"},
        against="trl-no-recomputation",
        remark="recomputes only what memory has no room for",
    ),
}
"""Both libraries by their defaults, which recompute in backward, and where there is room for not doing so."""
UNFUSED = {
    "lowtide-unfused": Contestant(
        "lowtide", {"fused_layers": False}, remark="layers as transformers and PEFT have them"
    ),
}
"""Beside what the defaults are for models of Llama's form."""
LORA_CONTESTANTS = {**COMMON, **UNFUSED}
SFT_CONTESTANTS = {
    **COMMON,
    **UNFUSED,
    "lowtide": Contestant("lowtide", against="trl-best"),
    "trl-best": Contestant("trl", {"padding_free": True, "max_length": None}, fastest_attention=True),
    "trl-packing": Contestant("trl", {"packing": True}, rows=PACKED_BATCH),
    "lowtide-packing": Contestant("lowtide", {"packing": True}, rows=PACKED_BATCH, against="trl-packing"),
}

DPO_CONTESTANTS = {
    **COMMON,
    "lowtide-precompute": Contestant(
        "lowtide",
        {"precompute_ref_log_probs": True},
        remark="the reference's log-probs are computed before the first step, and that time is not counted",
    ),
}

ON_THE_DATA = {"lmbda": 0.0}
GKD_CONTESTANTS = {
    "trl": Contestant("trl.experimental.gkd", ON_THE_DATA),
    "lowtide": Contestant("lowtide", ON_THE_DATA),
}
"""Distillation on the data's completions: what is written differs from run to run, and so would the tokens."""


def common_flags(contestant: Contestant, shape: Shape, steps: int, output_dir: str) -> dict[str, Any]:
    """What both libraries are given: the same rows in the same order, precision and number of steps."""
    return {
        "output_dir": output_dir,
        "per_device_train_batch_size": contestant.rows,
        "train_sampling_strategy": "sequential",
        "max_steps": steps,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": shape.device == "cpu",
        "bf16": shape.dtype == "bfloat16",
        # The heaviest rows of the whole dataset are no part of the steps that are compared.
        **({"rehearsal": False} if contestant.package == "lowtide" else {}),
    }
