"""`--num_processes` and `--accelerate_config`: the same command on several processes, by `accelerate launch`.

The process becomes the launcher, so that signals reach it. Under a launcher already (torchrun, or our own) the two
options have been carried out. `env:` of a run file is set here too: before torch is imported, which reads some
variables once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lowtide.cli.endings import UsageError
from lowtide.parsing import parse_yaml
from lowtide.process.environment import set_environment
from lowtide.python_process import forget_safe_path, keep_current_folder_off_the_path

OF_PROCESSES = {
    "num_processes": ("N", "run on so many processes: one for each GPU, or several on a CPU"),
    "accelerate_config": (
        "FILE",
        "an `accelerate config` file that says how many processes there are, and where; or `fsdp2`, which shards "
        "weights, gradients and states over --num_processes",
    ),
}
"""The launcher's options, on the command line and in a run file, with their help."""
ENVIRONMENT = "env"
"""The key of a run file for environment variables."""
OF_LAUNCHER = {*OF_PROCESSES, ENVIRONMENT}
"""The keys of a run file that are no options of a run."""
PLAIN = ("--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0")
"""What `accelerate launch` would otherwise warn of having chosen."""
FSDP = ("fsdp1", "fsdp2")
ZERO = ("zero1", "zero2", "zero3")
"""TRL's names of config files."""
FEW = 64
"""Processes that may start on a machine with fewer cores."""
CHOSEN = "LOWTIDE_ACCELERATE_CONFIG"
"""The variable by which the processes know which config started them."""


def prepare(words: Sequence[str]) -> list[str]:
    """Sets the environment that a run file asks for, and becomes a launcher where several processes are wanted.

    Returns:
        the command line without the launcher's options, where this process is to carry it out.

    Raises:
        UsageError: the number is none, or the file is not there or not of accelerate.
    """
    forget_safe_path()
    rest, given = split(words)
    file = _keys_of_file(rest)
    try:
        set_environment(file.get(ENVIRONMENT), _config_of(rest))
    except ValueError as error:
        raise UsageError(str(error)) from None
    wanted = {name: file[name] for name in OF_PROCESSES if file.get(name) is not None} | given
    if not wanted or "LOCAL_RANK" in os.environ:
        return rest
    command = launch_command(rest, wanted)
    if command is None:
        return rest
    sys.stdout.flush()
    keep_current_folder_off_the_path()
    os.execv(command[0], command)  # never comes back


def split(words: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """A command line without the launcher's options, and these."""
    rest, given = [], {}
    left = iter(words)
    for word in left:
        name, equals, value = word.partition("=")
        if word.startswith("--") and name[2:] in OF_PROCESSES:
            found = value if equals else next(left, "")
            if not found or found.startswith("--"):
                raise UsageError(f"{name} needs a value: {OF_PROCESSES[name[2:]][1]}")
            given[name[2:]] = found
        else:
            rest.append(word)
    return rest, given


def launch_command(words: Sequence[str], wanted: Mapping[str, Any]) -> list[str] | None:
    """What runs a command line on several processes; None where one is enough.

    Raises:
        UsageError: see `prepare`.
    """
    file = wanted.get("accelerate_config")
    config = {} if file is None else _accelerate_config(str(file))
    if config:
        os.environ[CHOSEN] = str(file)
    count = wanted.get("num_processes", config.get("num_processes"))
    on_one_machine = file is None or file in FSDP
    most = max(FEW, os.cpu_count() or 1) if on_one_machine else 10**6
    digits = str(count).isdecimal() and len(str(count)) < 10
    if count is not None and not (digits and 1 <= int(count) <= most):
        raise UsageError(f"num_processes is {str(count)!r:.30}; it must be a whole number from 1 to {most}")
    start = [sys.executable, "-m", "lowtide.compat.launching"]
    number = [] if count is None else ["--num_processes", str(count)]
    if file in FSDP and count is None:
        raise UsageError(f"accelerate_config={file} needs the number of processes to shard over: add --num_processes N")
    if config.get("distributed_type") == "FSDP":
        _set_fsdp(config)
    if config.get("use_cpu"):  # accelerate would start one process and say nothing
        os.environ["ACCELERATE_USE_CPU"] = "true"
    elif config and file not in FSDP:
        return [*start, "--config_file", str(file), *number, "-m", "lowtide", *words]
    if count is None or int(count) == 1:
        return None
    return [*start, "--multi_gpu", *number, *PLAIN, "-m", "lowtide", *words]


def _accelerate_config(file: str) -> dict[str, Any]:
    """The mapping of an accelerate config file, or of one of TRL's names.

    Raises:
        UsageError: there is no such file, it is none of accelerate's, or it splits layers.
    """
    import yaml

    if file in FSDP:
        return {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": int(file[-1])}}
    if file in ZERO:
        raise UsageError(
            f"accelerate_config is {file!r}, which is no file: take --num_processes N with --deepspeed FILE, a "
            "DeepSpeed config"
        )
    if not os.path.isfile(file):
        raise UsageError(f"accelerate_config: there is no file {file!r}. `accelerate config` writes one, or {_REMEDY}")
    try:
        config = parse_yaml(Path(file).read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"accelerate_config: {file} is not YAML: {error}") from error
    if not isinstance(config, dict) or "distributed_type" not in config:
        raise UsageError(f"accelerate_config: {file} has no `distributed_type`, so it is not of `accelerate config`")
    if (kind := config["distributed_type"]) in ("MEGATRON_LM", "TP"):
        raise UsageError(f"accelerate_config: {file} is for {kind}, which is not built: {_REMEDY}")
    return config


def _set_fsdp(config: Mapping[str, Any]) -> None:
    """Sets what `accelerate launch` would set of an FSDP config, which is read in `lowtide.run.options.sharding`."""
    os.environ["ACCELERATE_USE_FSDP"] = "true"
    given = {str(key).removeprefix("fsdp_"): value for key, value in (config.get("fsdp_config") or {}).items()}
    for key, value in {"version": 2, **given}.items():
        if value is not None:
            os.environ[f"FSDP_{key.upper()}"] = str(value).lower() if isinstance(value, bool) else str(value)


_REMEDY = "take --num_processes N, with --deepspeed or --fsdp where a model is too large for one GPU"


def _config_of(words: Sequence[str]) -> str | None:
    """The run file that a command line names."""
    for word, after in zip(words, [*words[1:], None], strict=True):
        if word == "--config":
            return after
        if word.startswith("--config="):
            return word.partition("=")[2]
    return None


def _keys_of_file(words: Sequence[str]) -> dict[str, Any]:
    """What a run file says to the launcher; nothing of one that cannot be read, which is said when its options are."""
    path = _config_of(words)
    if path is None or not os.path.isfile(path):
        return {}
    import yaml

    try:
        found = parse_yaml(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return {}
    return {name: found[name] for name in OF_LAUNCHER if name in found} if isinstance(found, dict) else {}
