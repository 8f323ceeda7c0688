"""Whether there are other ranks."""

from __future__ import annotations

import torch.distributed as dist


def distributed() -> bool:
    """Whether several ranks train together."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
