"""What a training process holds on a CPU beside tensors: the interpreter, libraries, threads, the data's pipeline.

It differs from machine to machine and from version to version, and no trace sees it. So it is measured, once: a small
model is trained in a process of its own (`lowtide.calibration`), or by two ranks where a run is spread over several,
and what its trace predicts is taken from its peak.
The result is kept in the user's cache folder, under the versions that it is of.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

from lowtide.memory.allocators.settings import MALLOC
from lowtide.own_files import writing
from lowtide.planner.tracing_process import OF_A_LAUNCHER
from lowtide.process.versions import version_of
from lowtide.python_process import python_calling
from lowtide.ranks.sharding import Sharding

PACKAGES = (
    "lowtide", "torch", "transformers", "accelerate", "datasets", "peft", "numpy", "pyarrow", "bitsandbytes", "torchao",
    "deepspeed",
)  # fmt: skip
ALONE = Sharding()
SECONDS = 300
"""After which a measurement is given up."""


def process_bytes(adapters: bool = False, sharding: Sharding = ALONE) -> int:
    """Resident bytes of a training process without its tensors; the first call for some versions takes ten seconds, and
    a minute where ranks have to meet.

    Args:
        adapters: whether it trains adapters, for which it imports PEFT.
        sharding: how it is spread: what brings ranks together takes threads, buffers and libraries.

    Raises:
        RuntimeError: the small model could not be trained; says what its process printed last.
    """
    engine = _engine(sharding)
    known = known_process_bytes(adapters, sharding)
    if known is not None:
        return known
    kept, found = _kept(adapters, engine), _measured(adapters, engine)
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        with writing(kept) as beside:
            beside.write_text(json.dumps({"bytes": found}))
    except OSError:
        pass  # it is measured again next time
    return found


def known_process_bytes(adapters: bool = False, sharding: Sharding = ALONE) -> int | None:
    """The same, where it was measured before; None where it was not."""
    try:
        return int(json.loads(_kept(adapters, _engine(sharding)).read_text())["bytes"])
    except (OSError, ValueError, KeyError):
        return None


def _kept(adapters: bool, engine: str) -> Path:
    return _folder() / f"process-{_key(adapters, engine)}.json"


def _engine(sharding: Sharding) -> str:
    """Of `calibration.ENGINES`; empty for one process."""
    if sharding.devices == 1:
        return ""
    return "deepspeed" if sharding.by_deepspeed else "fsdp2" if sharding.cuts_weights else "ddp"


def _measured(adapters: bool, engine: str) -> int:
    given = [*(["--adapters"] if adapters else []), *(["--engine", engine] if engine else [])]
    command = python_calling("lowtide.calibration", "tell", *given)
    quiet = {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    kept = {name: value for name, value in os.environ.items() if not name.startswith(OF_A_LAUNCHER)}
    done = subprocess.run(command, env=kept | quiet, capture_output=True, text=True, timeout=SECONDS)
    if done.returncode:
        raise RuntimeError(f"the small run that shows what a process takes failed: {done.stderr.strip()[-300:]}")
    return int(done.stdout.split()[-1])


def _key(adapters: bool, engine: str) -> str:
    versions = [f"{name} {version_of(name)}" for name in PACKAGES]
    surroundings = [os.environ.get(name, "") for name in ("OMP_NUM_THREADS", MALLOC)]
    facts = [sys.version, platform.machine(), *surroundings, adapters, engine, *versions]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def _folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lowtide"
