"""NEFTune (arXiv 2310.05914): uniform noise on the embeddings of a model in training, scaled by the length of a row.

The paper draws uniformly from [-1, 1] and multiplies by alpha / sqrt(L d): L is the number of tokens of a row, d the
width of the embeddings. Its code takes L from the attention mask. transformers takes L from the padded shape instead,
so that a short row beside a long one gets less noise there; both agree where a batch has rows of one length. Here L
is the row's own number of tokens on the ragged path and on the padded one.

A prompt that several completions share is computed once, with one draw, and L of the longest row that it begins. The
tokens of a completion have L of the prompt and the completion together.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lowtide.ragged import RaggedBatch, sent

ALPHA = "_lowtide_noise_alpha"
"""The attribute of a transformers model that says how much noise `engine.forward.score` puts on its embeddings."""

LENGTHS = "_lowtide_noise_lengths"
"""The attribute in which the lengths of rows stand while a forward runs: one for each token, or for each padded row."""


def set_noise(inner: nn.Module, alpha: float | None) -> None:
    """Has `engine.forward.score` add noise while the model is in training mode; None ends it.

    Args:
        inner: the transformers model, not wrapped.
        alpha: of the paper, which takes 5 to 15.
    """
    vars(inner)[ALPHA] = alpha


@contextlib.contextmanager
def noisy_embeddings(
    inner: Any, batch: RaggedBatch, attention_mask: Tensor | None = None, *, own: slice = slice(None)
) -> Iterator[None]:
    """Adds the noise in the forward that runs while the context lasts, if there is noise and the model is in training.

    Args:
        batch: whose tokens are embedded, end to end.
        attention_mask: [rows, longest] where it runs padded.
        own: those of its tokens that are run here.
    """
    alpha = vars(inner).get(ALPHA)
    if not alpha or not inner.training:
        yield
        return
    lengths = row_lengths(batch)[None, own] if attention_mask is None else attention_mask.sum(1, keepdim=True)
    before = vars(inner).get(LENGTHS)
    vars(inner)[LENGTHS] = lengths
    handle = None if before is not None else _hook(inner, alpha)
    try:
        yield
    finally:
        vars(inner)[LENGTHS] = before
        if handle is not None:
            handle.remove()


def _hook(inner: Any, alpha: float) -> Any:
    """Adds noise to what comes out of the embedding; contexts within one another share it."""

    def add_noise(module: nn.Module, inputs: Any, embedded: Tensor) -> Tensor:
        scale = alpha * (vars(inner)[LENGTHS] * embedded.shape[-1]).float().rsqrt()
        noise = torch.empty_like(embedded).uniform_(-1, 1)
        return embedded + noise * scale[..., None].to(embedded)

    return inner.get_input_embeddings().register_forward_hook(add_noise)


def row_lengths(batch: RaggedBatch) -> Float[Tensor, " tokens"]:
    """For each token, the tokens of its segment with the prefix; for a prefix those of the longest segment after it."""
    segments, piece = batch.segments, batch.piece
    if piece is not None:
        whole = [piece.way_tokens if piece.keeps else piece.start + part.length for part in segments]
        return _of_tokens(batch, whole)
    whole = [part.length + part.after(segments) for part in segments]
    for part, length in zip(segments, list(whole), strict=True):
        if part.prefix >= 0:
            whole[part.prefix] = max(whole[part.prefix], length)
    return _of_tokens(batch, whole)


def _of_tokens(batch: RaggedBatch, whole: Sequence[int]) -> Float[Tensor, " tokens"]:
    """For each token the number of its segment."""
    parts = torch.tensor([part.length for part in batch.segments])
    lengths = torch.repeat_interleave(torch.tensor(whole, dtype=torch.float32), parts, output_size=batch.tokens)
    return sent(lengths, batch.token_ids.device)
