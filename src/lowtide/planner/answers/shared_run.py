"""One run as a line of JSON that its owner can make public: what was predicted, what was measured, of which shapes.

Nothing private is in it, by construction: it is made of fields that are listed here, which are numbers, names of
devices, versions and options of memory. A model is named only where its shape is one that is published
(`known_models`); paths, data, texts and names of private models have no field. A line that somebody else wrote is read
only if each of its values is a number in range, a switch, a word of a list or a version: no field takes any text.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from datetime import date
from typing import Any

from lowtide.memory.options import TWO_PASS
from lowtide.methods import METHODS
from lowtide.option_values import options_of as declared_options
from lowtide.planner.answers.known_models import known_config, known_models
from lowtide.planner.tracing.trace import PHASES
from lowtide.run.options.configs import config_class

SHAPE = (
    "model_type", "vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size", "num_hidden_layers",
    "num_attention_heads", "num_key_value_heads", "head_dim", "num_experts", "num_local_experts",
    "num_experts_per_tok", "tie_word_embeddings",
)  # fmt: skip
"""Of a model's config."""
OPTIONS = (
    "per_device_train_batch_size", "gradient_accumulation_steps", "tokens_per_microbatch", "max_length", "packing",
    "padding_free", "prefix_sharing", "gradient_checkpointing", "checkpointing_policy", "checkpointing_every",
    "activation_offloading", "mlp_tile_tokens", "optimizer_in_backward", "optimizer_states_on_host", "optim", "bf16",
    "fp16", "max_grad_norm", "precompute_ref_log_probs", "use_liger_kernel", "torch_compile", "rehearsal",
)  # fmt: skip
"""Of a method's config: numbers, switches, and names from lists."""
PACKAGES = ("lowtide", "torch", "transformers", "peft", "bitsandbytes", "torchao")
"""Of which the versions are made public, beside Python's."""
OTHER = "other"
"""In place of a name that is not a public one."""
VERSION = re.compile(r"[0-9]{1,4}(\.[0-9]{1,4}){1,3}((a|b|rc)[0-9]{1,3})?(\.(post|dev)[0-9]{1,8})?")
BUILD = re.compile(r"\+(cpu|xpu|cu[0-9]{2,3}|rocm[0-9]{1,2}(\.[0-9]{1,2}){0,2}|(git)?[0-9a-f]{6,40})")
"""Behind a version: for which processor it was built, or from which commit."""
STORED = re.compile(r"(b?float|u?int)[0-9]{1,2}(_e[0-9]m[0-9](fn|fnuz)?)?")
"""Names of torch's dtypes."""
PROCESSOR = re.compile(r"cpu (x86_64|AMD64|i[36]86|aarch64|arm64|armv[0-9][a-z]?|ppc64le|s390x|riscv64|loongarch64)")
MAKERS = ("NVIDIA", "AMD", "Intel", "Tesla", "Quadro", "GeForce", "TITAN", "Radeon")
GPU_WORDS = {
    "GeForce", "Tesla", "Quadro", "TITAN", "RTX", "GTX", "GT", "PRO", "Pro", "Ti", "SUPER", "Super", "Ada",
    "Generation", "Laptop", "Mobile", "GPU", "Blackwell", "Max-Q", "Workstation", "Server", "Edition", "Design", "PCIe",
    "NVL", "SXM", "MIG", "D", "V", "X", "Xp", "Instinct", "Radeon", "XT", "XTX", "GRE", "OAM", "Graphics", "Arc",
    "Data", "Center", "Max", "RX", "with",
}  # fmt: skip
"""Words in names of GPUs, beside those with a number."""
NUMBERED = re.compile(r"(?=[^ ]*[0-9])[A-Za-z0-9]{1,8}([-.][A-Za-z0-9]{1,6}){0,3}")
"""A word with a number: H100, A100-SXM4-80GB, 1g.10gb."""
MOST = 1 << 60
"""Above any number of bytes and tokens."""


@dataclass(frozen=True)
class SharedRun:
    """What is made public of a run."""

    date: str
    versions: Mapping[str, str]
    method: str
    model: str | None
    """A published one of the same shape."""
    shape: Mapping[str, Any]
    trained: Mapping[str, Any]
    """Whether adapters are trained, of which rank, and how the rest is stored."""
    options: Mapping[str, Any]
    rows: Mapping[str, int]
    """How many a batch has, and the tokens of the longest one and of the heaviest micro-batch."""
    device: str
    device_bytes: int
    steps: int
    predicted_bytes: int
    measured_bytes: int
    phase: str
    """In which the peak is predicted to fall."""

    @property
    def error(self) -> float:
        """By which share of what was measured the prediction is above it."""
        return self.predicted_bytes / self.measured_bytes - 1

    def line(self) -> str:
        """As JSON in one line."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def read(cls, line: str) -> SharedRun:
        """From a line.

        Raises:
            ValueError: it is no such line, has fields that are none of these, or a value that may be private; names it.
        """
        found = json.loads(line, object_pairs_hook=_without_repetition)
        names = {each.name for each in fields(cls)}
        if not isinstance(found, dict) or found.keys() != names:
            wrong = sorted(found.keys() ^ names) if isinstance(found, dict) else "no mapping"
            raise ValueError(f"a measured run has exactly the fields {', '.join(sorted(names))}; differing: {wrong}")
        _check(found)
        return cls(**found)


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A mapping of JSON; of a key that is there twice one value would be read, and the other one hidden."""
    made = dict(pairs)
    if len(made) < len(pairs):
        raise ValueError("a field is there twice, and would be read once")
    return made


def _check(found: Mapping[str, Any]) -> None:
    """Refuses values that are not numbers, switches, versions or public names.

    Raises:
        ValueError: naming the field.
    """
    _known_keys("versions", found["versions"], ("python", *PACKAGES))
    _known_keys("shape", found["shape"], SHAPE)
    _known_keys("options", found["options"], OPTIONS)
    _known_keys("trained", found["trained"], ("adapters", "rank", "stored", "bits"), all_of_them=True)
    _known_keys("rows", found["rows"], ("rows", "longest", "tokens"), all_of_them=True)
    if found["model"] is not None and (not isinstance(found["model"], str) or found["model"] not in known_models()):
        raise ValueError(f"model {found['model']!r} is none that is known here: its shape alone is made public")
    allowed = {
        "date": _is_date(found["date"]),
        "method": isinstance(found["method"], str) and found["method"] in METHODS.rows,
        "phase": found["phase"] in PHASES,
        "device": isinstance(found["device"], str) and public_device(found["device"]) == found["device"],
    }
    allowed |= {f"versions: {name}": _is_version(version) for name, version in found["versions"].items()}
    allowed |= {f"shape: {name}": _is_of_a_shape(name, value) for name, value in found["shape"].items()}
    allowed |= {f"rows: {name}": _is_count(value) for name, value in found["rows"].items()}
    trained = found["trained"]
    allowed |= {
        "trained: adapters": isinstance(trained["adapters"], bool),
        "trained: rank": _is_count(trained["rank"]),
        "trained: stored": _matches(STORED, trained["stored"]),
        "trained: bits": _is_count(trained["bits"]) and trained["bits"] in (0, 4, 8),
    }
    for name in ("device_bytes", "steps", "predicted_bytes", "measured_bytes"):
        allowed[name] = _is_count(found[name]) and found[name] > 0
    for name, good in allowed.items():
        if not good:
            raise ValueError(f"{name} has a value that is not made public: {_value_of(found, name)!r}")
    for name, value in found["options"].items():
        if not _is_of_an_option(found["method"], name, value):
            raise ValueError(f"options: {name} has a value that is not made public: {value!r}")


def _known_keys(part: str, value: Any, known: tuple[str, ...], *, all_of_them: bool = False) -> None:
    if not isinstance(value, dict):
        raise ValueError(f"{part} must be a mapping, and is {value!r}")
    if unknown := value.keys() - set(known):
        raise ValueError(f"{part} has {min(unknown)!r}, which is not made public")
    if all_of_them and value.keys() != set(known):
        raise ValueError(f"{part} must have all of {', '.join(known)}")


def _value_of(found: Mapping[str, Any], name: str) -> Any:
    part, _, key = name.partition(": ")
    return found[part][key] if key else found[part]


def _matches(pattern: re.Pattern, value: Any) -> bool:
    return isinstance(value, str) and pattern.fullmatch(value) is not None


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < MOST


def _is_date(value: Any) -> bool:
    if not isinstance(value, str) or re.fullmatch(r"[0-9]{4}-[0-9]{2}-[0-9]{2}", value) is None:
        return False
    try:
        return date.fromisoformat(value).isoformat() == value
    except ValueError:
        return False


def _is_version(value: Any) -> bool:
    return isinstance(value, str) and public_version(value) == value != ""


def _is_of_a_shape(name: str, value: Any) -> bool:
    if name == "model_type":
        return isinstance(value, str) and public_type(value) == value
    return isinstance(value, bool) if name == "tie_word_embeddings" else _is_count(value)


def _is_of_an_option(method: str, name: str, value: Any) -> bool:
    """Whether a value is one that the option takes: of texts, the words of its list alone."""
    option = declared_options(config_class(METHODS[method])).get(name)
    if option is None:
        return False
    if isinstance(value, str):
        return value in ((TWO_PASS,) if name == "optimizer_in_backward" else option.choices)
    if isinstance(value, bool):
        return bool in option.kinds
    number = isinstance(value, int | float) and math.isfinite(value) and abs(value) < MOST
    return number and (float in option.kinds or (int in option.kinds and isinstance(value, int)))


def public_version(version: str) -> str:
    """A version without what a private build calls itself; empty where it is none."""
    found = VERSION.match(version)
    if found is None:
        return ""
    build = BUILD.fullmatch(version, found.end())
    return found.group() + (build.group() if build else "")


def public_device(name: str) -> str:
    """The name of a GPU or a processor, as its maker calls it; else that it is another one."""
    if PROCESSOR.fullmatch(name) or name in (f"cpu {OTHER}", f"{OTHER} GPU"):
        return name
    if name.startswith("cpu"):
        return f"cpu {OTHER}"
    maker, *words = name.split(" ")
    known = maker in MAKERS and all(word in GPU_WORDS or NUMBERED.fullmatch(word) for word in words)
    return name if known and 0 < len(words) <= 8 else f"{OTHER} GPU"


def public_type(model_type: str) -> str:
    """The type of a model that Transformers has; else that it is another one."""
    from transformers import CONFIG_MAPPING

    return model_type if model_type in CONFIG_MAPPING else OTHER


def shape_of(config: Any) -> dict[str, Any]:
    """What of a model's config is made public."""
    text = config.get_text_config()
    found = {name: getattr(text, name, None) for name in SHAPE}
    found["model_type"] = public_type(text.model_type)
    return {name: value for name, value in found.items() if _is_of_a_shape(name, value)}


def published_name(shape: Mapping[str, Any]) -> str | None:
    """The well-known model of a shape."""
    for name in known_models():
        known = known_config(name)
        if known is not None and shape_of(known) == shape:
            return name
    return None


def options_of(config: Any, method: str) -> dict[str, Any]:
    """What of a method's config is made public."""
    found = {name: getattr(config, name, None) for name in OPTIONS}
    values = {name: getattr(value, "value", value) for name, value in found.items()}
    return {name: value for name, value in values.items() if _is_of_an_option(method, name, value)}
