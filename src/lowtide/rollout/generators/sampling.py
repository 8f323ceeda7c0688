"""How tokens are drawn from rows of logits, and their log-probabilities, for many rows at once.

The random number of a token is keyed by the request's seed, the completion's number and the token's place in it:
it does not depend on what else is generated beside it, nor on the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lowtide.ops.logits.drawing import candidates, cut_below, drawn, likeliest, penalize
from lowtide.rollout.generators.generator import Sampling


@dataclass(frozen=True)
class Streams:
    """What a draw depends on beside the logits."""

    keys: Int[Tensor, " rows"]
    """Of the random numbers of each row's completion (`ops.counter_random.stream_key` of seed and number)."""
    places: Int[Tensor, " rows"]
    """The place of the token in its completion."""
    used: Int[Tensor, "rows ids"] | None = None
    """Tokens that the repetition penalty counts as used, some of them several times; None without penalty."""

    never: Int[Tensor, " banned"] | None = None
    """Tokens that are not drawn; None where there are none."""

    def __getitem__(self, rows: slice) -> Streams:
        used = None if self.used is None else self.used[rows]
        return Streams(self.keys[rows], self.places[rows], used, self.never)


class Drawn(NamedTuple):
    """What was drawn, [rows] each."""

    tokens: Tensor
    logprobs: Tensor
    """Under the distribution that was drawn from; 0 where the likeliest was taken."""
    plain_logprobs: Tensor
    """Under the whole distribution at the temperature (at 1 where that is 0)."""
    settled: Tensor | None = None
    """Whether a token is what was asked for; None where all are. See `candidates`."""


def draw_tokens(
    logits: Float[Tensor, "rows vocab"],
    sampling: Sampling,
    streams: Streams,
    *,
    look: bool = True,
    whole: bool = False,
) -> Drawn:
    """A token for each row.

    Args:
        logits: at least in float32; used up. A row that is not finite gives log-probabilities that are not.
        look: as of `candidates`; likewise `whole`.
    """
    if sampling.temperature == 0:
        return _likeliest(logits, sampling, streams)
    if sampling.temperature != 1:
        logits.div_(sampling.temperature)
    cuts = sampling.top_k > 0 or sampling.top_p < 1
    if not cuts and sampling.min_p == 0 and streams.used is None and streams.never is None:
        tokens, logprobs = drawn(logits, streams.keys, streams.places)
        return Drawn(tokens, logprobs, logprobs)
    # The temperature has divided the logits already, which changes no sign: it commutes with the penalty.
    scores = _drawn_from(logits, sampling, streams)
    found, ids, settled = scores, None, None
    if cuts:
        found, ids, settled = candidates(scores, sampling.top_k, sampling.top_p, look=look, whole=whole)
    if sampling.min_p > 0:
        found = cut_below(found, sampling.min_p)
    place, logprobs = drawn(found, streams.keys, streams.places)
    tokens = place[:, None] if ids is None else ids.gather(1, place[:, None])
    return Drawn(tokens[:, 0], logprobs, _logprobs(logits, tokens), settled)


def _likeliest(logits: Tensor, sampling: Sampling, streams: Streams) -> Drawn:
    scores = _drawn_from(logits, sampling, streams)
    tokens, plain = likeliest(scores)
    if scores is not logits:
        plain = _logprobs(logits, tokens[:, None])
    return Drawn(tokens, torch.zeros_like(plain), plain)


def _drawn_from(logits: Tensor, sampling: Sampling, streams: Streams) -> Tensor:
    """The logits with the repetition penalty, without tokens that are never drawn; the same tensor without both."""
    scores = logits if streams.used is None else penalize(logits, streams.used, sampling.repetition_penalty)
    return scores if streams.never is None else scores.index_fill(1, streams.never, float("-inf"))


def _logprobs(logits: Tensor, tokens: Tensor) -> Tensor:
    return (logits.gather(1, tokens) - logits.logsumexp(-1, keepdim=True))[:, 0]
