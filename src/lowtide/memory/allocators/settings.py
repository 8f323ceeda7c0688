"""What allocators read from the environment when a process starts: settings that leave fewer holes.

On CUDA, segments that grow. Ragged batches ask for other sizes at each step. Segments of fixed sizes are left with
holes that no later tensor fits; a segment that maps further pages at its end has few. torch calls it
`expandable_segments`, and reads the option when it is first imported: `PYTORCH_ALLOC_CONF`, or its older name for CUDA
alone.

On a CPU, a heap without the cache that glibc has for each thread. torch asks for tensors at multiples of 64 bytes, so
glibc cuts a sliver of 48 bytes off each. The cache hands it to the next small object, one of the autograd graph say,
and from then on the hole that the tensor leaves is too short for another of its size: the heap grows by a tenth of the
process. Without the cache (and without fastbins, see `host_heap`) a sliver is part of the hole again at once.

Exact: no value is touched. This module imports nothing of torch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

NAME = "PYTORCH_ALLOC_CONF"
OLDER_NAMES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
SETTING = "expandable_segments:True"
MALLOC, CACHE = "GLIBC_TUNABLES", "glibc.malloc.tcache_count"
DRIVERS = ("/dev/nvidiactl", "/dev/kfd")
"""One of them is there where a GPU is."""


def expand_segments() -> bool:
    """Asks for segments that grow, unless the environment says something of the allocator already.

    Returns:
        whether torch will read it: on Linux, and before it is imported.
    """
    said = any(name in os.environ for name in (NAME, *OLDER_NAMES))
    if said or "torch" in sys.modules or sys.platform != "linux":
        return False
    os.environ[NAME] = SETTING
    return True


def steady_malloc(environment: Mapping[str, str]) -> dict[str, str]:
    """The variable that leaves the cache out, beside what it says already."""
    said = environment.get(MALLOC)
    return {MALLOC: f"{said}:{CACHE}=0" if said else f"{CACHE}=0"}


def has_thread_cache() -> bool:
    """Whether this process's heap has the cache."""
    return f"{CACHE}=0" not in os.environ.get(MALLOC, "").split(":")


def starts_over() -> bool:
    """Whether `without_thread_cache` would: with glibc, without a GPU, and where nothing is said of the cache."""
    said = CACHE in os.environ.get(MALLOC, "")
    return not said and sys.platform == "linux" and _has_glibc() and not any(Path(each).exists() for each in DRIVERS)


def without_thread_cache() -> None:
    """Starts the command of this process over, with a heap that has no cache; does not return if it does.

    glibc reads its settings before any code of a program runs, so there is no other way.
    """
    if starts_over():
        sys.stdout.flush()
        sys.stderr.flush()
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | steady_malloc(os.environ))


def _has_glibc() -> bool:
    try:
        return bool(os.confstr("CS_GNU_LIBC_VERSION"))
    except (ValueError, OSError):
        return False
