"""Lets CUDA's caching allocator grow its segments, in place of taking new ones.

Ragged batches ask for other sizes at each step. Segments of fixed sizes are left with holes that no later tensor fits;
a segment that maps further pages at its end has few. torch calls it `expandable_segments`, and reads the option from
the environment when it is first imported: `PYTORCH_ALLOC_CONF`, or its older name for CUDA alone.

Exact: no value is touched. Without CUDA it does nothing. This module imports nothing of torch.
"""

from __future__ import annotations

import os
import sys

NAME = "PYTORCH_ALLOC_CONF"
OLDER_NAMES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
SETTING = "expandable_segments:True"


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
