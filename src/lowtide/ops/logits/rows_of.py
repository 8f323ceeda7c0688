"""Which form of the rows of logits serves a call: plain torch, or the Triton kernels."""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor

from lowtide.ops.logits.logit_rows import Projection, TorchRows, Want
from lowtide.ops.logits.triton_rows import TritonRows
from lowtide.ops.target import has_triton, target_of

Rows: TypeAlias = TorchRows | TritonRows


def rows_of(
    logits: Tensor,
    target: Tensor,
    projection: Projection,
    want: Want,
    scratch: Tensor | None = None,
    vocab: int | None = None,
) -> Rows:
    """The rows of `logits` [rows, vocab], on the kernels where they can serve: CUDA, at most float32, Triton there.

    The kernels take a mean over the columns that they are given, and so not where these are a part of `vocab`.
    """
    target_device = target_of(logits)
    there = target_device.kind == "cuda" and (target_device.planned or has_triton())
    serves = not want.collisions and not (want.mean_logprobs and vocab is not None)
    if there and logits.dtype != torch.float64 and serves:
        return TritonRows(logits, target, projection, split=vocab is not None)
    return TorchRows(logits, target, projection, scratch, vocab)
