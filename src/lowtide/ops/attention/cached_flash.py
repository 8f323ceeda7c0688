"""Attention to the keys that are held, by torch's flash attention on CUDA: one kernel, no mask, and no key is read that
is not used.

torch's operation takes how many keys each segment uses off the device (`seqused_k`), so that a step may be replayed
while keys come in. The idea is that of vLLM's and SGLang's decoding. A stack (`cached_attention`) is a segment of one
head here: its queries read its keys once, however many heads share them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import NamedTuple

import torch
from jaxtyping import Float, Int32
from torch import Tensor

from lowtide.compat.torch import cuda_flash_of_used
from lowtide.ops.attention.attention_flash import why_not
from lowtide.ops.attention.attention_plan import Rules, Sight
from lowtide.ops.attention.cached_attention import gather_from
from lowtide.ops.target import target_of, without_autocast
from lowtide.ops.trials import is_right

TOLERANCE = 0.05
"""Of outputs and log-sum-exps of bfloat16, from numbers of a normal distribution: some five times what it rounds."""


class Starts(NamedTuple):
    """Where the queries and the keys of each stack begin, and where the last ends."""

    queries: Int32[Tensor, " stacks+1"]
    keys: Int32[Tensor, " stacks+1"]


def starts_of(stacks: int, queries: int, keys: int, device: torch.device) -> Starts:
    """Those of stacks that have so many queries and places for keys each."""
    numbers = torch.arange(stacks + 1, dtype=torch.int32, device=device)
    return Starts(numbers * queries, numbers * keys)


def gather_used(
    query: Float[Tensor, "stacks 1 queries dim"],
    key: Float[Tensor, "stacks 1 keys dim"],
    value: Float[Tensor, "stacks 1 keys dim"],
    starts: Starts,
    used: Int32[Tensor, " stacks"],
    scale: float,
) -> tuple[Float[Tensor, "stacks 1 queries dim"], Float[Tensor, "stacks 1 queries"]]:
    """What `gather_from` gives where each stack sees the first `used` of its keys, at least one."""
    longest = query.shape[2], key.shape[2]
    queries, keys, values = (each.flatten(0, 2)[:, None] for each in (query, key, value))
    out, lse = cuda_flash_of_used(queries, keys, values, starts, longest, used, scale)
    return out.view_as(query), lse.view(query.shape[:3])


def serves(query: Tensor, value: Tensor, rules: Rules) -> bool:
    """Whether `gather_used` computes what a layer asks for, on the device that tensors [.., dim] lie on.

    A GPU is tried once on numbers of its own. It waits for the device then.
    """
    dim, target = query.shape[-1], target_of(query)
    if why_not(query, value, rules._replace(sinks=None)) or rules.softcap is not None or rules.sight != Sight():
        return False
    return value.shape[-1] == dim and (target.planned or right_on(query.device, query.dtype, dim))


@functools.cache
def right_on(device: torch.device, dtype: torch.dtype, dim: int) -> bool:
    """Whether the kernel gives what written-out scores give; says so if not."""
    stacks, queries, keys = 5, 6, 300
    generator = torch.Generator().manual_seed(0)
    numbers = [torch.randn(stacks, 1, n, dim, generator=generator) for n in (queries, keys, keys)]
    query, key, value = (each.to(device, dtype) for each in numbers)
    used = torch.tensor([1, keys, 129, 64, 17], dtype=torch.int32, device=device)
    hidden = (torch.arange(keys, device=device) >= used[:, None])[:, None]
    key, value = (each.masked_fill(hidden[..., None], 100.0) for each in (key, value))
    bias = torch.zeros(hidden.shape, device=device).masked_fill_(hidden, torch.finfo(torch.float32).min / 4)[:, None]
    rules = Rules(dim**-0.5)

    def trial() -> Iterable[tuple[Tensor, Tensor]]:
        with torch.no_grad(), without_autocast(device):
            found = gather_used(query, key, value, starts_of(stacks, queries, keys, device), used, rules.scale)
            return zip(found, gather_from(query.float(), key.float(), value.float(), bias, rules), strict=True)

    return is_right(trial, TOLERANCE, f"generation attends by written-out scores on {device}, which is slower")
