"""Drawing one entry of each row of a distribution, and the cuts that are made to it before.

On CUDA one Triton kernel draws (`drawing_triton`). The cuts are those of transformers' `LogitsProcessor`s. Top-k and
top-p look at so many of the likeliest entries, and sort all only where these do not settle them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lowtide.ops.counter_random import uniforms
from lowtide.ops.layers import layer_kernels
from lowtide.ops.layers.layer_kernels import next_power
from lowtide.ops.trials import computes, is_right

BLOCK = 256
"""Entries that are summed before the blocks are searched: about the root of a vocabulary."""
SPARE = 32
"""Candidates beyond the k likeliest, so that entries as likely as the last of them are among them."""
CANDIDATES = 256
"""Candidates that top-p looks at before it sorts all."""
COLUMNS = 4096
"""Of a row that a program of the kernel reads at a time."""
TOLERANCE = 1e-4
"""Of log-probabilities, and of sums of probabilities."""


class Picked(NamedTuple):
    """An entry of each row."""

    places: Int[Tensor, " rows"]
    logprobs: Float[Tensor, " rows"]
    """Under the softmax of the row."""


def drawn(scores: Float[Tensor, "rows entries"], keys: Int[Tensor, " rows"], counters: Int[Tensor, " rows"]) -> Picked:
    """An entry of each row, drawn by the softmax of its scores; a score of -inf is never drawn.

    Args:
        keys: of the streams of random numbers (`ops.counter_random`), likewise `counters`.
    """
    return (_pick if serves(scores) else _drawn_by_torch)(scores, keys, counters)


def likeliest(scores: Float[Tensor, "rows entries"]) -> Picked:
    """The first of the largest scores of each row, which are used up."""
    return _pick(scores) if serves(scores) else _likeliest_by_torch(scores)


def _drawn_by_torch(scores: Tensor, keys: Tensor, counters: Tensor) -> Picked:
    probabilities = torch.softmax(scores, -1)
    places = draw(probabilities, uniforms(keys, counters))
    return Picked(places, probabilities.gather(1, places[:, None]).log_()[:, 0])


def _likeliest_by_torch(scores: Tensor) -> Picked:
    top, places = _largest(scores)
    return Picked(places[:, 0], scores.sub_(top).exp_().sum(-1).log_().neg_())


def _largest(scores: Tensor) -> tuple[Tensor, Tensor]:
    """`scores.max(-1, keepdim=True)`, of which torch finds the place entry by entry: here in one block alone."""
    rows, entries = scores.shape
    if entries % BLOCK or rows == 0:
        return scores.max(-1, keepdim=True)
    blocks = scores.view(rows, -1, BLOCK)
    top, block = blocks.amax(-1).max(-1, keepdim=True)
    inside = blocks.gather(1, block[..., None].expand(-1, 1, BLOCK)).argmax(-1)
    return top, block * BLOCK + inside


def _pick(scores: Tensor, keys: Tensor | None = None, counters: Tensor | None = None) -> Picked:
    """Without keys the likeliest."""
    rows, entries = scores.shape
    places = torch.empty(rows, dtype=torch.long, device=scores.device)
    picked = Picked(places, scores.new_empty(rows, dtype=torch.float32))
    read = (scores, places, places) if keys is None or counters is None else (scores, keys, counters)
    layer_kernels.launch("pick", (rows,), read, picked, module="lowtide.ops.logits.drawing_triton", entries=entries,
                         DRAWS=keys is not None, BLOCK=min(COLUMNS, next_power(entries)), num_warps=8)  # fmt: skip
    return picked


def serves(scores: Tensor) -> bool:
    """Whether a kernel picks: see `trials.computes`."""
    return computes(scores, right_on)


@functools.cache
def right_on(device: torch.device) -> bool:
    """Whether the kernel picks what it should; says so if not."""
    return is_right(
        lambda: _tried(device), TOLERANCE, f"generation draws by torch's operations on {device}, which is slower"
    )


def _tried(device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Of a few rows, what is picked, and what should be: drawn entries are those up to which the probabilities pass a
    number, to rounding."""
    rows, generator = 64, torch.Generator().manual_seed(0)
    scores = (3 * torch.randn(rows, 2 * COLUMNS + 77, generator=generator)).to(device)
    numbers = torch.arange(rows, device=device)
    keys, probabilities = numbers * 977, torch.softmax(scores.double(), -1)
    picked = _pick(scores, keys, numbers)
    inside = picked.places.clamp(0, scores.shape[1] - 1)
    own, upto = (each.gather(1, inside[:, None])[:, 0] for each in (probabilities, probabilities.cumsum(-1)))
    uniform = uniforms(keys, numbers).double()
    yield picked.places, inside
    yield uniform, uniform.clamp(upto - own, upto)
    yield picked.logprobs, own.log()
    yield from zip(_pick(scores), _likeliest_by_torch(scores.clone()), strict=True)


def draw(probabilities: Float[Tensor, "rows entries"], uniform: Float[Tensor, " rows"]) -> Int[Tensor, " rows"]:
    """The entry at which the sum of the probabilities up to it passes `uniform` times their sum, in each row.

    An entry of probability 0 is never drawn.
    """
    entries = probabilities.shape[1]
    if entries <= 4 * BLOCK:
        return _search(probabilities, uniform * probabilities.sum(-1).to(uniform.dtype))
    whole = entries // BLOCK * BLOCK
    sums = probabilities[:, :whole].unflatten(1, (-1, BLOCK)).sum(-1)
    if whole < entries:
        sums = torch.cat([sums, probabilities[:, whole:].sum(-1, keepdim=True)], dim=1)
    ends = sums.to(uniform.dtype).cumsum(-1)
    wanted = uniform * ends[:, -1]
    block = _search(sums, wanted)[:, None]
    start = ends.gather(1, block) - sums.gather(1, block)
    place = block * BLOCK + torch.arange(BLOCK, device=block.device)
    inside = probabilities.gather(1, place.clamp(max=entries - 1)).masked_fill(place >= entries, 0)
    return block[:, 0] * BLOCK + _search(inside, wanted - start[:, 0])


def _search(weights: Tensor, wanted: Tensor) -> Tensor:
    """The first entry of each row at which the sum so far is above `wanted`; the last that is above 0 if none is."""
    ends = weights.to(wanted.dtype).cumsum(-1)
    # A sum that was rounded elsewhere may be as large as the whole; below it, something is always found.
    wanted = torch.minimum(wanted, ends[:, -1] * (1 - torch.finfo(wanted.dtype).eps))
    return torch.searchsorted(ends, wanted[:, None].clamp(min=0), right=True)[:, 0].clamp(max=weights.shape[1] - 1)


def penalize(scores: Float[Tensor, "rows entries"], used: Int[Tensor, "rows ids"], penalty: float) -> Tensor:
    """The scores, of which those of used entries are divided by the penalty if positive, and multiplied if not."""
    own = scores.gather(1, used)
    return scores.scatter(1, used, torch.where(own < 0, own * penalty, own / penalty))


def cut_below(scores: Float[Tensor, "rows entries"], share: float) -> Float[Tensor, "rows entries"]:
    """The scores, -inf where an entry is less than `share` times as likely as the likeliest."""
    return scores.masked_fill(scores < scores.amax(-1, keepdim=True) + math.log(share), float("-inf"))


class Candidates(NamedTuple):
    """What cuts leave of a distribution, among so many of its likeliest entries."""

    scores: Float[Tensor, "rows likeliest"]
    """In falling order; -inf where an entry is cut."""
    ids: Int[Tensor, "rows likeliest"]
    """The entries."""
    settled: Bool[Tensor, " rows"] | None
    """Whether entries beyond these change nothing; None where that is so for all rows."""


def candidates(
    scores: Float[Tensor, "rows entries"], top_k: int, top_p: float, *, look: bool = True, whole: bool = False
) -> Candidates:
    """The scores that top-k, then top-p leave.

    Args:
        top_k: 0 for all; entries as likely as the last one stay, too.
        top_p: 1 for all.
        look: the host waits for what is found, and looks at all entries if that does not settle the cuts. Otherwise it
            is told which rows are settled.
        whole: look at all entries from the start.
    """
    entries = scores.shape[1]
    count = entries if whole else min(entries, top_k + SPARE if top_k else CANDIDATES)
    found = _cut(scores, count, top_k, top_p)
    if look and found.settled is not None and not bool(found.settled.all()):
        return _cut(scores, entries, top_k, top_p)
    return found._replace(settled=None) if look else found


def _cut(scores: Tensor, count: int, top_k: int, top_p: float) -> Candidates:
    """`candidates` among so many of the likeliest."""
    whole, settled = count == scores.shape[1], None
    found, ids = scores.sort(dim=-1, descending=True) if whole else scores.topk(count, dim=-1)
    if top_k and top_k < count:
        beyond = found < found[:, top_k - 1, None]
        settled = None if whole else beyond[:, -1]
        found = found.masked_fill(beyond, float("-inf"))
    if top_p < 1:
        all_of_row = found if top_k or whole else scores
        shares = (found - all_of_row.logsumexp(-1, keepdim=True)).exp_()
        sums = shares.cumsum(-1)
        if not top_k and not whole:
            settled = sums[:, -1] >= top_p
        above = sums - shares
        above[:, 0] = 0  # the likeliest always stays
        found = found.masked_fill(above >= top_p, float("-inf"))
    return Candidates(found, ids, settled)
