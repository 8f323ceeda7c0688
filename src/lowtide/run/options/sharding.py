"""How a run is spread over ranks, from where users say it: transformers' `fsdp` and `fsdp_config`, accelerate's
`ParallelismConfig`, `deepspeed`, and the environment that `accelerate launch` makes of its config file.

The engines are started by lowtide, so that ragged batches, recovery and checkpoints hold on them: transformers and
accelerate see ranks with whole copies (`engines_hidden`).
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

from accelerate import ParallelismConfig

from lowtide.parsing import parse_json
from lowtide.ranks.sharding import Sharding, loaded, read_config, read_words
from lowtide.ranks.world import is_first, is_on, launched
from lowtide.run.options.deepspeed import SWITCH, given_config
from lowtide.spelling import nearest

OF_ENGINES = ("fsdp", "parallelism_config", "deepspeed")
"""The options of `TrainingArguments` that turn an engine on, whose values are of many kinds."""
FIELDS = (*OF_ENGINES, "fsdp_config")
"""All that say how a run is spread."""
SAY_HOW: Mapping[str, Any] = {**dict.fromkeys(FIELDS), "fsdp_split_vocabulary": False, "pipeline_parallel_size": 1}
"""All options that `sharding_of` reads, with their defaults."""
SWITCHES = ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_PARALLELISM_CONFIG", SWITCH)
"""The variables by which `accelerate launch` turns an engine on."""
OF_ENVIRONMENT = "accelerate's parallelism_config"
"""What messages call the sizes that `accelerate launch` says."""
SIZES = ("dp_replicate", "dp_shard", "tp", "cp", "sp")
OF_PARALLELISM = tuple(each.name for each in fields(ParallelismConfig) if each.init)
OF_FSDP = {
    "version": "",
    "reshard_after_forward": "",
    "cpu_offload": "",
    "offload_params": "",
    "state_dict_type": "",
    "activation_checkpointing": "set `gradient_checkpointing`, which is on unless you turn it off",
    "auto_wrap_policy": "each layer is a unit, and so are the embedding and the head",
    "transformer_layer_cls_to_wrap": "each layer is a unit, and so are the embedding and the head",
    "min_num_params": "each layer is a unit, and so are the embedding and the head",
    "cpu_ram_efficient_loading": "weights that differ from the first rank's are sent from there in any case",
    "sync_module_states": "weights that differ from the first rank's are sent from there in any case",
    "use_orig_params": "of FSDP 1",
    "forward_prefetch": "of FSDP 1",
    "backward_prefetch": "of FSDP 1",
    "backward_prefetch_policy": "of FSDP 1",
    "limit_all_gathers": "of FSDP 1",
    "sharding_strategy": "of FSDP 1",
    "xla": "",
    "xla_fsdp_v2": "",
    "xla_fsdp_grad_ckpt": "",
}
"""The keys of an `fsdp_config`, and why one of them changes nothing here."""

logger = logging.getLogger(__name__)


def sharding_of(config: Any, ranks: int | None = None) -> Sharding:
    """How the run of a config is spread over ranks.

    Args:
        ranks: by default the processes that a launcher has started.

    Raises:
        ValueError: it is said twice and differently, or what is said cannot be done; with both values, or the key.
    """
    ranks, sizes = launched() if ranks is None else ranks, _sizes(config.parallelism_config)
    said = {
        "fsdp": _from_fields(config.fsdp, config.fsdp_config, ranks),
        "parallelism_config": _of_sizes(sizes["parallelism_config"], "parallelism_config", ranks),
        "accelerate's config": _from_environment(sizes[OF_ENVIRONMENT], ranks),
    }
    if (zero := given_config(config)) is not None:
        said[zero[0]] = Sharding.read(zero[1], devices=ranks)
    found = {name: sharding for name, sharding in said.items() if sharding is not None}
    if len({*found.values()}) > 1:
        (first, one), (second, other), *_ = found.items()
        raise ValueError(f"{first} says {one}, and {second} says {other}: leave one of them out")
    sequence, tensor = _sequence_of(sizes), _tensor_of(sizes)
    sharding = next(iter(found.values()), Sharding.read(None, devices=ranks))
    if ranks == 1 and (sharding.kind != "none" or sequence > 1 or tensor > 1):
        split, over = ("layers", tensor) if tensor > 1 else ("sequences", sequence)
        what = f"{next(iter(found))} shards" if found else f"{split} are to be split over {over} processes, not"
        _warn(
            f"{what} over 1 process, which has all of them: start several, `torchrun --nproc_per_node N` say"
            + ("; optimizer_states_on_host=True offloads without sharding" if sharding.offload_optimizer else "")
        )
        return Sharding.read(None, devices=1)
    if tensor > 1:
        sharding = _with_tensor_parallel(sharding, tensor, sequence)
    rows = sharding.kind == "fsdp2" and config.fsdp_split_vocabulary
    sharding = replace(sharding, sequence_parallel=sequence, split_vocabulary=rows)
    return _in_stages(sharding, config.pipeline_parallel_size)


def _in_stages(sharding: Sharding, stages: int) -> Sharding:
    """With the layers split between so many ranks; with copies of such pipelines where there are more ranks."""
    ranks, asked = sharding.devices, f"pipeline_parallel_size={stages}"
    if stages == 1:
        return sharding
    if ranks == 1:
        _warn(f"{asked}, and 1 process has all layers: start several, `torchrun --nproc_per_node {stages}` say")
        return sharding
    if sharding.kind != "ddp" or sharding.same_rows > 1:
        raise ValueError(f"{asked} does not go with {sharding}: leave one of them out")
    if ranks % stages:
        raise ValueError(f"{asked} does not divide the {ranks} processes: start a multiple of {stages}")
    return replace(sharding, pipeline_parallel=stages)


def _with_tensor_parallel(sharding: Sharding, tensor: int, sequence: int) -> Sharding:
    """The same, with the matrices of each layer split between so many ranks.

    Raises:
        ValueError: it does not go with what else is split.
    """
    if sharding.tensor_parallel not in (1, tensor):
        raise ValueError(f"tp_size={tensor} and autotp_size={sharding.tensor_parallel}: leave one of them out")
    other = f"sp_size or cp_size={sequence}" if sequence > 1 else "deepspeed" if sharding.by_deepspeed else None
    if other is None and sharding.offload_weights:
        other = "weights in the host's memory"
    if other is not None:
        raise ValueError(
            f"tp_size={tensor} does not go with {other}: leave one of them out; with tp_size weights can be sharded by "
            "dp_shard_size or fsdp=True"
        )
    kind = "none" if sharding.kind == "ddp" and sharding.devices == tensor else sharding.kind
    return replace(sharding, kind=kind, tensor_parallel=tensor)


def sharding_said(values: Mapping[str, Any], ranks: int) -> Sharding:
    """How a run with some options is spread over ranks; options that are left out have their defaults.

    Raises:
        ValueError: see `sharding_of`.
    """
    given = {name: value for name, value in values.items() if name in SAY_HOW}
    return sharding_of(SimpleNamespace(**{**SAY_HOW, **given}), ranks)


@contextlib.contextmanager
def engines_hidden(config: Any) -> Iterator[None]:
    """While it lasts, transformers and accelerate see nothing that would have them start an engine."""
    fields = {name: getattr(config, name) for name in FIELDS}
    switches = {name: os.environ.pop(name) for name in SWITCHES if name in os.environ}
    for name in FIELDS:
        setattr(config, name, None)
    try:
        yield
    finally:
        os.environ.update(switches)
        for name, value in fields.items():
            setattr(config, name, value)


def _from_fields(fsdp: Any, fsdp_config: Any, ranks: int) -> Sharding | None:
    if not fsdp or str(fsdp).lower() == "false":
        if fsdp_config:
            _warn("fsdp_config has no effect without fsdp=True")
        return None
    words = " ".join(map(str, fsdp)) if isinstance(fsdp, list | tuple) else fsdp
    words = True if str(words).lower() == "true" else words
    config = loaded(os.fspath(fsdp_config)) if isinstance(fsdp_config, str | os.PathLike) else dict(fsdp_config or {})
    config = {str(key).removeprefix("fsdp_"): value for key, value in config.items()}
    _check_keys(config)
    return _read(words, config, ranks)


def _read(words: Any, config: Mapping[str, Any], ranks: int) -> Sharding:
    """Of the words of `fsdp` and the keys of its config; the keys have the last word."""
    if int(config.get("version") or 2) == 1:
        _warn("FSDP 1 was asked for, and FSDP 2 runs in its place: the shards are the same")
    named = read_words("fsdp2" if words is True else str(words))
    if named.get("kind") not in (None, "fsdp2"):
        return Sharding.read(str(words), devices=ranks)
    strategy = str(config.get("sharding_strategy", config.get("reshard_after_forward", "")))
    stages = {"full_shard": "true", "1": "true", "shard_grad_op": "false", "2": "false"}
    keys = {"reshard_after_forward": stages.get(strategy.lower(), strategy or True)}
    found = read_config({**config, "version": 2, **keys})
    if "reshard_after_forward" not in config and "sharding_strategy" not in config:
        found.pop("reshard")
    offloads = {name: True for name in ("offload_weights", "offload_optimizer") if found.pop(name) or named.get(name)}
    return Sharding(**{"devices": ranks, **found, **{k: v for k, v in named.items() if k not in found}, **offloads})


def _check_keys(config: Mapping[str, Any]) -> None:
    for key, value in config.items():
        if key not in OF_FSDP:
            raise ValueError(f"fsdp_config has no key {key!r}{nearest(key, OF_FSDP)}")
        if key.startswith("xla") and str(value).lower() == "true":
            raise ValueError(f"fsdp_config: {key}=True is for TPUs, which lowtide does not run on: leave it out")
        if OF_FSDP[key] and value not in (None, False, 0, "false"):
            logger.info(f"fsdp_config: {key} changes nothing: {OF_FSDP[key]}")


def _sizes(given: Any) -> dict[str, dict[str, int]]:
    """The sizes of accelerate's `ParallelismConfig`, by where they are said; empty where they are not."""
    if isinstance(given, str):
        with contextlib.suppress(ValueError):
            given = parse_json(given)
    if given is not None and not isinstance(given, Mapping | ParallelismConfig):
        raise ValueError(f"parallelism_config={given!r} is no ParallelismConfig: give its sizes, {{'sp_size': 2}} say")
    known = given if isinstance(given, Mapping) else {} if given is None else vars(given)
    for key in known:
        if isinstance(given, Mapping) and key not in OF_PARALLELISM:
            raise ValueError(f"parallelism_config has no key {key!r}{nearest(key, OF_PARALLELISM)}")
    try:
        found = {"parallelism_config": {name: int(known.get(f"{name}_size") or 1) for name in SIZES if known}}
    except (TypeError, ValueError):
        raise ValueError(f"parallelism_config={given!r}: sizes are whole numbers, {{'sp_size': 2}} say") from None
    by_launcher = is_on("ACCELERATE_USE_PARALLELISM_CONFIG")
    variables = {name: os.environ.get(f"PARALLELISM_CONFIG_{name.upper()}_SIZE") for name in SIZES if by_launcher}
    return {**found, OF_ENVIRONMENT: {name: int(size or 1) for name, size in variables.items()}}


def _of_sizes(sizes: Mapping[str, int], where: str, ranks: int) -> Sharding | None:
    """How weights are spread where some sizes shard them; sequences are split within their ranks."""
    if not sizes:
        return None
    if sizes["sp"] > 1 and sizes["cp"] > 1:
        raise ValueError(
            f"{where}: sp_size={sizes['sp']} and cp_size={sizes['cp']} both split sequences: leave one of them out"
        )
    named = {f"{name}_size": size for name, size in sizes.items() if size > 1 or name.startswith("dp_")}
    replicas, shards, total = sizes["dp_replicate"], sizes["dp_shard"], math.prod(sizes.values())
    if replicas == total:
        return None
    if ranks not in (1, total) and (replicas * shards > 1 or ranks % total):
        product = " times ".join(f"{name}={size}" for name, size in named.items())
        raise ValueError(
            f"{where}: {product} is {total}, and there are {ranks} processes: make the sizes multiply to it, or start "
            f"{total}"
        )
    if shards == 1:
        return None
    return Sharding(kind="fsdp2", devices=ranks, nodes=replicas if ranks > 1 else 1, hybrid=replicas > 1)


def _tensor_of(sizes: Mapping[str, Mapping[str, int]]) -> int:
    """Between how many ranks the matrices of each layer are split."""
    return _agreed({f"{where}: tp_size": size["tp"] for where, size in sizes.items() if size})


def _sequence_of(sizes: Mapping[str, Mapping[str, int]]) -> int:
    """Over how many ranks sequences are split."""
    said = {f"{where}: {name}_size": size[name] for where, size in sizes.items() for name in ("sp", "cp") if size}
    over = _agreed(said)
    for name, size in said.items():
        if name.endswith("cp_size") and size > 1:
            logger.info(
                f"{name}={size}: attention heads are exchanged (Ulysses) in place of ring attention; same numbers"
            )
    return over


def _agreed(said: Mapping[str, int]) -> int:
    """The size that those above 1 have, 1 if there is none.

    Raises:
        ValueError: two of them differ; with both.
    """
    found = {name: size for name, size in said.items() if size > 1}
    if len({*found.values()}) > 1:
        (first, one), (second, other), *_ = found.items()
        raise ValueError(f"{first}={one}, and {second}={other}: leave one of them out")
    return max(found.values(), default=1)


def _from_environment(sizes: Mapping[str, int], ranks: int) -> Sharding | None:
    if (found := _of_sizes(sizes, OF_ENVIRONMENT, ranks)) is not None:
        return found
    if not is_on("ACCELERATE_USE_FSDP"):
        return None
    names = ("reshard_after_forward", "offload_params", "state_dict_type", "version")
    config = {name: os.environ[key] for name in names if (key := f"FSDP_{name.upper()}") in os.environ}
    return _read(True, config, ranks)


def _warn(text: str) -> None:
    """Once, whatever the number of ranks."""
    if is_first():
        logger.warning(text)
