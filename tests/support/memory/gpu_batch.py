"""A batch on a GPU, whose layers keep enough to be seen in its peak."""

import torch

from lowtide.ragged import RaggedBatch


def batch() -> RaggedBatch:
    """Five segments of up to 3,000 tokens, two of which share a prefix."""
    generator = torch.Generator().manual_seed(1)
    lengths = (3000, 1, 500, 2000, 900)
    rows = [torch.randint(0, 500, (length,), generator=generator).tolist() for length in lengths]
    return RaggedBatch.from_segments(rows, prefix=[-1, -1, -1, 2, 2], row=[0, 1, 2, 2, 2]).to(torch.device("cuda"))
