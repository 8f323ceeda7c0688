"""How a run is spread over devices, in words: `"zero3"`, `"fsdp2"`, `"tp2+fsdp2"`, `"sp2+ddp"`, a DeepSpeed config,
transformers' `fsdp` and its config.

The options are the ones that change memory or traffic, with the defaults of DeepSpeed 0.19 (`runtime/zero/config.py`)
and of `torch.distributed.fsdp.fully_shard`. ZeRO's buffers go by the model unless a number is given: DeepSpeed's own
defaults are larger than a whole small model.
What they cost is in `planner.sharding.sharded`. lowtide's trainers run all of them, but for some combinations that are
predicted for those who choose machines, and `Sharding.runs` says so.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lowtide.parsing import parse_json
from lowtide.spelling import nearest

AUTO = -1
"""A size that goes by the model."""
KINDS = ("none", "ddp", "zero1", "zero2", "zero3", "fsdp2")
ALIASES: dict[str, dict[str, Any]] = {
    **{kind: {"kind": kind} for kind in KINDS},
    "zero0": {"kind": "ddp"},
    "fsdp": {"kind": "fsdp2"},
    "full_shard": {"kind": "fsdp2"},
    "shard_grad_op": {"kind": "fsdp2", "reshard": False},
    "no_shard": {"kind": "ddp"},
    "hsdp": {"kind": "fsdp2", "hybrid": True},
    "hybrid_shard": {"kind": "fsdp2", "hybrid": True},
    "hybrid_shard_zero2": {"kind": "fsdp2", "hybrid": True, "reshard": False},
    "offload": {"offload_optimizer": True, "offload_weights": True},
    "auto_wrap": {},
}
"""What each word of a short text sets; those in capitals or with dashes are the same."""
ZERO_FIELDS = {
    "reduce_bucket_size": "reduce_bucket",
    "stage3_prefetch_bucket_size": "prefetch",
    "prefetch_bucket_size": "prefetch",
    "stage3_param_persistence_threshold": "persistence",
    "param_persistence_threshold": "persistence",
    "stage3_max_live_parameters": "max_live",
    "max_live_parameters": "max_live",
    "stage3_max_reuse_distance": "max_reuse",
    "max_reuse_distance": "max_reuse",
    "sub_group_size": "sub_group",
    "overlap_comm": "overlap",
}
"""Keys of DeepSpeed's `zero_optimization`, and where they go."""


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """What is split between devices. Sizes of DeepSpeed's buffers are in elements, as there."""

    kind: str = "none"
    """Of `KINDS`: whole copies, or ZeRO's stages, or torch's fully_shard."""
    devices: int = 1
    """Of the whole run."""
    nodes: int = 1
    """Machines that they are in, equally many in each."""
    tensor_parallel: int = 1
    """Devices that each layer's matrices are split between; the rest of the run is `kind` over groups of them."""
    sequence_parallel: int = 1
    """Devices that hold the same rows, of which each computes a slice of the tokens (see `ranks.sequence`)."""
    pipeline_parallel: int = 1
    """Devices that hold the same rows, of which each has some layers of the model (see `ranks.pipeline`)."""
    hybrid: bool = False
    """Shards inside a node and whole copies across nodes (HSDP)."""
    reshard: bool = True
    """Layers are let go after forward and gathered again for backward (FSDP2)."""
    split_vocabulary: bool = False
    """Head and embedding are never gathered: each rank keeps its rows (FSDP2)."""
    reduce_each: bool = True
    """Gradients are reduced after each micro-batch. Else FSDP2 keeps whole ones until the last."""
    compute_width: int | None = None
    """Bytes of an element while computing: 2 for bf16, as DeepSpeed's `bf16` or FSDP2's mixed precision; None: as
    stored."""
    reduce_width: int | None = None
    """Bytes of an element of gradients on their way (FSDP2); None: as computed."""
    offload_optimizer: bool = False
    """Optimizer states, and ZeRO's masters, are in the host's memory."""
    offload_weights: bool = False
    """Shards are in the host's memory (ZeRO-3, FSDP2)."""
    gather_on_save: bool = True
    """Whole weights are put together for saving; else each rank writes its own part of them."""
    reduce_bucket: int = AUTO
    """Elements of ZeRO's gradient buffer; AUTO: the square of the model's hidden size, as transformers' `"auto"`."""
    prefetch: int = AUTO
    """Elements that ZeRO-3 gathers ahead; AUTO: 0.9 of the hidden size's square."""
    persistence: int = AUTO
    """Parameters of fewer elements are never let go by ZeRO-3; AUTO: ten times the hidden size."""
    max_live: int = int(1e9)
    """Elements beyond which ZeRO-3 gathers nothing ahead."""
    max_reuse: int = int(1e9)
    """ZeRO-3 keeps what it wants again within so many elements: a whole model of half as many, therefore."""
    sub_group: int = int(1e9)
    """Elements that ZeRO-3 steps at a time."""
    overlap: bool | None = None
    """ZeRO-1 and 2 hold two gradient buffers."""
    backend: str = "nccl"
    """What carries the bytes; over `"gloo"` what another rank sends of a sum is held beside it."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"sharding {self.kind!r} is none of {', '.join(KINDS)}{nearest(self.kind, KINDS)}")
        for name in ("devices", "nodes", "tensor_parallel", "sequence_parallel", "pipeline_parallel"):
            if getattr(self, name) < 1:
                raise ValueError(f"sharding: `{name}` is {getattr(self, name)}; give at least 1")
        if self.devices % self.nodes:
            raise ValueError(f"sharding: {self.devices} devices are not equally many in each of {self.nodes} nodes")
        if self.devices // self.nodes % self.tensor_parallel:
            raise ValueError(
                f"sharding: tensor parallelism over {self.tensor_parallel} does not divide the "
                f"{self.devices // self.nodes} devices of a node; give a divisor, tp{self._divisor()} say"
            )
        if self.replicas % self.sequence_parallel:
            raise ValueError(
                f"sharding: sequences cannot be split over {self.sequence_parallel} of {self.replicas} devices: give a "
                f"divisor of {self.replicas}"
            )
        if self.kind == "none" and self.replicas > 1:
            raise ValueError(f"sharding 'none' is of one device, not {self.devices}; 'ddp' keeps a whole copy on each")
        if self.offload_weights and self.kind not in ("zero3", "fsdp2"):
            raise ValueError(f"sharding {self.kind!r} cannot offload weights; zero3 and fsdp2 can")
        if self.offload_optimizer and self.kind in ("none", "ddp"):
            raise ValueError(
                f"sharding {self.kind!r} offloads nothing; zero1, zero2, zero3 and fsdp2 can, and in lowtide "
                "`optimizer_states_on_host=True` does it"
            )

    def _divisor(self) -> int:
        local = self.devices // self.nodes
        return max(d for d in range(1, local + 1) if local % d == 0 and d <= self.tensor_parallel)

    @property
    def replicas(self) -> int:
        """Ranks whose gradients are averaged."""
        return self.devices // self.tensor_parallel

    @property
    def data_ranks(self) -> int:
        """Ranks that see different rows; those that split sequences or layers count as one."""
        return self.devices // self.same_rows

    @property
    def same_rows(self) -> int:
        """Ranks that hold the same rows and compute them together."""
        return self.tensor_parallel * self.sequence_parallel * self.pipeline_parallel

    @property
    def shards(self) -> int:
        """Ranks that the states are split between."""
        if self.kind in ("none", "ddp"):
            return 1
        return self.replicas // self.nodes if self.hybrid else self.replicas

    @property
    def runs(self) -> bool:
        """Whether lowtide's own trainers can run it."""
        return self.tensor_parallel == 1 or not (self.by_deepspeed or self.sequence_parallel > 1)

    @property
    def by_deepspeed(self) -> bool:
        """Whether DeepSpeed's engine steps."""
        return self.kind in ("zero1", "zero2", "zero3") and self.devices > 1

    @property
    def cuts_weights(self) -> bool:
        """Whether weights themselves lie in parts, each on another rank."""
        return self.tensor_parallel > 1 or (self.kind in ("zero3", "fsdp2") and self.shards > 1)

    @property
    def cuts_files(self) -> bool:
        """Whether ranks can cut their parts from the files of a model, a layer at a time, and load none whole."""
        return self.kind == "fsdp2" and self.shards > 1 and self.tensor_parallel == self.pipeline_parallel == 1

    @classmethod
    def read(cls, given: Any, *, devices: int, nodes: int = 1, **more: Any) -> Sharding:
        """From what people write.

        Args:
            given: a short text, its words joined by `+` or blanks: those of `ALIASES`, `tp2` for tensor parallelism
                over 2, and `sp2` for sequences that are split over 2; a DeepSpeed config, transformers' `fsdp_config`,
                or the path of either; True as `fsdp=True`; None for whole copies.
            devices: of the whole run.
            nodes: machines.
            more: fields that are known otherwise.

        Raises:
            ValueError: a word or key is unknown, or the fields do not go together.
        """
        if given is None or given is False:
            given = "none" if devices == 1 else "ddp"
        if given is True:
            given = "fsdp2"
        if isinstance(given, str) and given.endswith(".json"):
            given = loaded(given)
        found = read_config(given) if isinstance(given, Mapping) else read_words(str(given))
        if found.get("kind") is None:
            found["kind"] = "none" if devices == found.get("tensor_parallel", 1) else "ddp"
        return cls(**{"devices": devices, "nodes": nodes, **found, **more})

    def resolved(self, hidden_size: int) -> Sharding:
        """With the sizes that depend on the model."""
        filled = sizes_by_model(hidden_size)
        return replace(self, **{name: size for name, size in filled.items() if getattr(self, name) == AUTO})

    def __str__(self) -> str:
        split = {"tp": self.tensor_parallel, "sp": self.sequence_parallel, "pp": self.pipeline_parallel}
        groups = "".join(f"{name}{size}+" for name, size in split.items() if size > 1)
        words = "".join(
            f", {word}" for word in ("hybrid", "offload_optimizer", "offload_weights") if getattr(self, word)
        )
        nodes = f" in {self.nodes} nodes" if self.nodes > 1 else ""
        return f"{groups}{self.kind} on {self.devices} devices{nodes}{words}"


def sizes_by_model(hidden_size: int) -> dict[str, int]:
    """Of ZeRO's buffers in elements, by the fields of `Sharding`: what transformers fills in for `"auto"`."""
    square = hidden_size * hidden_size
    return {"reduce_bucket": square, "prefetch": int(0.9 * square), "persistence": 10 * hidden_size}


def read_words(text: str) -> dict[str, Any]:
    """The fields of `Sharding` that a short text sets."""
    found: dict[str, Any] = {}
    for word in re.split(r"[+\s,]+", text.strip().lower().replace("-", "")):
        if match := re.fullmatch(r"(tp|sp)(\d+)", word):
            found["tensor_parallel" if match[1] == "tp" else "sequence_parallel"] = int(match[2])
        elif word in ALIASES:
            found |= ALIASES[word]
        else:
            raise ValueError(
                f"sharding {text!r}: {word!r} is none of {', '.join(KINDS)}, hsdp, offload, and tp2 or sp2, or another "
                f"number{nearest(word, (*ALIASES, 'tp2', 'sp2'))}"
            )
    return found


def read_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `Sharding` that a DeepSpeed config or an `fsdp_config` sets."""
    if "zero_optimization" in config:
        return _from_deepspeed(config)
    return _from_fsdp({key.removeprefix("fsdp_"): value for key, value in config.items()})


def _from_deepspeed(config: Mapping[str, Any]) -> dict[str, Any]:
    zero = config["zero_optimization"]
    stage = zero.get("stage", 0)
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"DeepSpeed's `zero_optimization.stage` is {stage!r}; 0, 1, 2 and 3 are known")
    found: dict[str, Any] = {"kind": f"zero{stage}" if stage else "ddp"}
    for key, name in ZERO_FIELDS.items():
        if zero.get(key, "auto") != "auto":
            found[name] = zero[key] if name == "overlap" else int(zero[key])
    for key, name in (("offload_optimizer", "offload_optimizer"), ("offload_param", "offload_weights")):
        found[name] = (zero.get(key) or {}).get("device", "none") != "none"
    saved = zero.get("stage3_gather_16bit_weights_on_model_save", zero.get("gather_16bit_weights_on_model_save", True))
    found["gather_on_save"] = stage != 3 or saved is not False  # where nothing is said, lowtide saves a whole model
    if any(config.get(name, {}).get("enabled") is True for name in ("bf16", "fp16")):
        found["compute_width"] = 2
    size = config.get("tensor_parallel", {}).get("autotp_size", 0)
    return found | ({"tensor_parallel": size} if size else {})


def _from_fsdp(config: Mapping[str, Any]) -> dict[str, Any]:
    if not set(config) & {"version", "reshard_after_forward", "cpu_offload", "offload_params", "auto_wrap_policy"}:
        raise ValueError(
            f"sharding config with the keys {', '.join(map(str, config)) or '(none)'} is neither DeepSpeed's, with "
            "`zero_optimization`, nor an `fsdp_config`, with `reshard_after_forward`"
        )
    if int(config.get("version", 2)) == 1:
        raise ValueError("FSDP 1 is gone from transformers; set `version: 2` in the `fsdp_config`")
    offload = str(config.get("cpu_offload", config.get("offload_params", False))).lower() == "true"
    return {
        "kind": "fsdp2",
        "reshard": str(config.get("reshard_after_forward", True)).lower() != "false",
        "offload_weights": offload,
        "offload_optimizer": offload,
        "gather_on_save": _gathers(config.get("state_dict_type")),
    }


def _gathers(state_dict_type: Any) -> bool:
    """Whether whole weights are put together for saving, by what transformers and accelerate call it."""
    named = str(state_dict_type or "FULL_STATE_DICT").rpartition(".")[2].upper()
    known = {"FULL_STATE_DICT": True, "1": True, "SHARDED_STATE_DICT": False, "3": False}  # torch's numbers
    if named not in known:
        raise ValueError(
            f"state_dict_type={state_dict_type!r} is not built for FSDP2: take FULL_STATE_DICT, which saves one model, "
            "or SHARDED_STATE_DICT, with which each rank saves its part"
        )
    return known[named]


def loaded(path: str) -> Any:
    """What a JSON file says.

    Raises:
        ValueError: it is not there, or is no JSON.
    """
    if not os.path.isfile(path):
        raise ValueError(f"sharding config {path!r} is not there; give a path, or a short text as 'zero3' or 'fsdp2'")
    try:
        return parse_json(Path(path).read_text())
    except ValueError as error:
        raise ValueError(f"sharding config {path!r} is not JSON: {error}") from error
