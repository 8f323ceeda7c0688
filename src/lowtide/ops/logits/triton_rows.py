"""The passes of `logit_rows.TorchRows` as two Triton kernels: one that reads a row, one that overwrites it.

Both work in float32 on logits of any smaller dtype; no float32 copy of the logits exists. This module allocates what
they fill; the kernels are in `ops.logits.triton_kernels`, which needs Triton (it comes with the CUDA builds of torch)
and is imported when the first one is launched. A plan of memory launches none.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowtide.compat.torch import FakeTensor
from lowtide.ops.logits.logit_rows import Projection, RowStats, Slopes, TorchRows, Want

BLOCK = 4096
"""Columns that a program holds at a time: 16 a thread."""
WARPS = 8


class TritonRows:
    """Some rows of logits; left as they are until the gradient overwrites them."""

    def __init__(self, logits: Tensor, target: Tensor, projection: Projection, *, split: bool = False):
        """`logits` [rows, vocab], contiguous along the vocabulary; `target` [rows], -1 for one among columns elsewhere,
        of which there are some if `split`."""
        assert logits.stride(1) == 1
        self.logits, self.target, self.projection = logits, target.contiguous(), projection
        self.within = self.target.clamp(min=0) if split else self.target
        """What can be read: the gradient kernel compares a target with its columns, the other one reads there."""

    def ends(self) -> tuple[Tensor, Tensor]:
        """The logit of the target, any where that is elsewhere, and the largest of each row."""
        raw = torch.stack([self.logits.gather(1, self.within[:, None])[:, 0], self.logits.amax(1)], 1)
        chosen, top = TorchRows(raw, self.within, self.projection).x.unbind(1)
        return chosen, top

    def settle(self, lse: Tensor) -> None:
        """After `stats`: the log-sum-exp [rows] is another, since there are further columns elsewhere."""
        self.lse = lse.contiguous()

    def stats(self, want: Want, keep: bool) -> RowStats:
        """The statistics. `keep` is there for the sake of `TorchRows`."""
        rows = self.logits.shape[0]

        def column(wanted: bool = True, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(rows if wanted else 0, dtype=dtype, device=self.logits.device)

        stats = RowStats(
            column(),
            column(want.entropies),
            column(want.mean_logprobs),
            column(want.top1, torch.uint8),
            column(),
            column(False),
            column(False),
            column(False),
        )
        self.launch(
            "stats", (rows,), self.within, *stats[:5], ENTROPY=want.entropies, MEAN=want.mean_logprobs, TOP1=want.top1
        )
        self.lse = stats.lse
        return stats._replace(top1=stats.top1.view(torch.bool))

    def restore(self, lse: Tensor, keep: bool) -> None:
        """The state after `stats`, from a log-sum-exp [rows] that is known already."""
        self.lse = lse.contiguous()

    def gradient(self, slopes: Slopes, entropies: Tensor) -> None:
        """Overwrites the logits with the gradient at the raw ones; `entropies` are those that `stats` gave."""
        self.launch(
            "gradient",
            (self.logits.shape[0], -(-self.logits.shape[1] // self._block)),
            self.target,
            self.lse,
            entropies.contiguous(),
            *((slopes.logprobs if slope is None else slope).contiguous() for slope in slopes[:3]),
            ENTROPY=slopes.entropies is not None,
            MEAN=slopes.mean_logprobs is not None,
        )

    @property
    def _block(self) -> int:
        return min(BLOCK, 1 << (self.logits.shape[1] - 1).bit_length())  # a power of two

    def launch(self, kernel: str, grid: tuple[int, ...], *columns: Tensor, **flags: bool) -> None:
        if isinstance(self.logits, FakeTensor):
            return  # a plan of memory: what was allocated is all there is to see
        from lowtide.ops.logits import triton_kernels

        scale, softcap, temperature = self.projection
        with torch.cuda.device_of(self.logits):
            getattr(triton_kernels, kernel)[grid](
                self.logits,
                *columns,
                self.logits.stride(0),
                self.logits.shape[1],
                scale,
                softcap or 1.0,
                temperature,
                CAPPED=softcap is not None,
                BLOCK=self._block,
                num_warps=WARPS,
                **flags,
            )
