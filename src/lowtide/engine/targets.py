"""Targets that an encoder-decoder writes for the sources of a batch, by transformers' `generate`."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from lowtide.engine.encoder_decoder import padded_pairs
from lowtide.engine.forward import computing, embedding_weight
from lowtide.ragged import RaggedBatch


@torch.no_grad()
def write_targets(model: nn.Module, batch: RaggedBatch, **options: Any) -> Int[Tensor, "targets longest"]:
    """What a model in evaluation mode writes for the source of each target, which is not read.

    The random state is put back, so that training goes on as if nothing had been written.

    Args:
        options: of `generate`, in place of the model's generation config.

    Returns:
        the tokens, the one that starts a target included; what comes after an end is padding.
    """
    inputs, _ = padded_pairs(batch)
    writer: Any = model
    device = embedding_weight(model).device
    with computing(model), torch.random.fork_rng([device] if device.type == "cuda" else []):
        return writer.generate(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], **options)
