"""Rotary embeddings whose frequencies depend on the length of the row (`longrope`, dynamic NTK), each row by its own.

transformers takes the longest position of a forward for the length of all of its rows, so that a short row beside a
long one has other numbers than by itself, padded or not; and dynamic NTK keeps the frequencies of the longest row of
all forwards before. Here a row's tokens have the tables that the row alone would have: a model's rotary module is run
for the tokens of each length by themselves. A row is a segment with its prefix.

A prefix that completions share is computed once, so it has one table. Completions whose rows need different ones are
refused; a run that may have such rows repeats its prompts (`rows_alike`).

While `score` runs a model, the lengths stand in a context, for models make these tables once, ahead of their layers. A
call without it, of a user say, computes what transformers does.
"""

from __future__ import annotations

import contextlib
import itertools
import types
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lowtide.compat.transformers import (
    checkpointed_layers,
    rotary_kinds,
    rotary_limit,
    rotary_of_length,
    rotary_table,
)
from lowtide.ops.attention.attention_plan import AttentionPlan


class Run(NamedTuple):
    """Neighbouring tokens of one row."""

    tokens: int
    lengths: tuple[int, ...]
    """Of the row; of several rows, where they share the tokens."""


_running: ContextVar[Callable[[], Sequence[Run]] | None] = ContextVar("running", default=None)


@contextlib.contextmanager
def rows_of(runs: Callable[[], Sequence[Run]] | None) -> Iterator[None]:
    """Around a forward of rows of known lengths.

    Args:
        runs: gives all tokens of the forward, padding included, row after row, where a module asks for them; None for a
            forward of rows that are not known.
    """
    token = _running.set(runs)
    try:
        yield
    finally:
        _running.reset(token)


def runs_of(plan: AttentionPlan, own: slice = slice(None)) -> list[Run]:
    """The runs of a ragged batch.

    Args:
        own: those of its tokens that are run here.
    """
    lengths: list[set[int]] = [set() for _ in plan.segments]
    for number, part in enumerate(plan.segments):
        lengths[number].add(plan.keys(part))
        if part.prefix >= 0:
            lengths[part.prefix].add(plan.keys(part))
    start, stop, _ = own.indices(plan.tokens)
    runs = []
    for part, found in zip(plan.segments, lengths, strict=True):
        only_seen = part.score_start == part.score_stop and len(found) > 1
        whole = found - {part.length} if only_seen and part.prefix < 0 else found
        tokens = min(part.stop, stop) - max(part.start, start)
        if tokens > 0:
            runs.append(Run(tokens, tuple(sorted(whole))))
    return runs


def install_rotary(model: nn.Module) -> None:
    """Has a model's rotary modules look at the length of each row, where their frequencies depend on it.

    Raises:
        ValueError: it is built in a way that this is not known for; names the model type and the kind.
    """
    config: Any = model.config
    made = [module for module in model.modules() if rotary_kinds(module)]
    inside = {part for layer in checkpointed_layers(model) for part in layer.modules()} if made else set()
    for module in made:
        if module in inside or config.is_encoder_decoder:
            raise ValueError(
                f"model type {config.model_type} has rotary embeddings ({kinds_by_length(module)[0]}) that depend on "
                f"the length of the row, and makes them {'in its layers' if module in inside else 'for two texts'}, "
                "where the length of each row is not known: take a model with another kind of rotary embeddings"
            )
        module.forward = types.MethodType(_forward, module)


def kinds_by_length(model: nn.Module) -> list[str]:
    """The kinds of a model's rotary embeddings that depend on the length of the row."""
    return sorted({kind for module in model.modules() for kind in rotary_kinds(module).values()})


def rows_alike(model: nn.Module) -> int | None:
    """The longest row up to which all rows have one table; None of a model whose tables do not depend on it."""
    limits = [rotary_limit(module, layers) for module in model.modules() for layers in rotary_kinds(module)]
    return min(limits, default=None)


def _forward(self: Any, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> Any:
    """What a class's forward makes, each row's by its own length. Positions are [.., rows, tokens]."""
    known = _running.get()
    given = () if layer_type is None else (layer_type,)
    if known is None or layer_type not in rotary_kinds(self):
        return type(self).forward(self, x, position_ids, *given)
    runs = known()
    tokens = position_ids.shape[-1]
    rows, rest = divmod(sum(run.tokens for run in runs), tokens)
    assert not rest, f"positions of {tokens} tokens a row do not make those of the batch"
    by_table = [(_table(self, run, layer_type), run.tokens) for run in runs]
    parts = [(key, sum(each for _, each in part)) for key, part in itertools.groupby(by_table, key=lambda run: run[0])]
    if len(parts) > 1:  # models give all rows one line of positions
        wide = position_ids.expand(*position_ids.shape[:-2], rows, tokens)
        position_ids = wide.reshape(*wide.shape[:-2], 1, rows * tokens)
        found = [
            _of_length(self, key, x, piece, layer_type)
            for (key, _), piece in zip(parts, position_ids.split([each for _, each in parts], -1), strict=True)
        ]
    else:
        found = [_of_length(self, parts[0][0], x, position_ids, layer_type)]
    if isinstance(found[0], Tensor):
        return _joined(found, rows)
    return tuple(_joined(each, rows) for each in zip(*found, strict=True))


def _joined(parts: Sequence[Tensor], rows: int) -> Tensor:
    """[rows, tokens, dim] of parts [1, some, dim]; a part alone as it is."""
    if len(parts) == 1:
        return parts[0]
    return torch.cat(list(parts), -2).unflatten(-2, (rows, -1)).squeeze(-4)


def _of_length(module: Any, length: int, x: Tensor, position_ids: Tensor, layers: str | None) -> Any:
    """As `rotary_of_length`. The last position of the row comes last, for families that look for it themselves."""
    if length <= rotary_limit(module, layers):  # padding behind a short row has positions of a long one
        position_ids = position_ids.clamp(max=length - 1)
    last = position_ids.new_full((*position_ids.shape[:-1], 1), length - 1)
    found = rotary_of_length(module, length, x, torch.cat([position_ids, last], -1), layers)
    return found[..., :-1, :] if isinstance(found, Tensor) else tuple(each[..., :-1, :] for each in found)


def _table(module: Any, run: Run, layers: str | None) -> int:
    """The length that stands for all rows with the table of a run.

    Raises:
        ValueError: it is of rows that need different ones.
    """
    tables = {rotary_table(module, length, layers): length for length in run.lengths}
    if len(tables) > 1:
        first, second = list(tables.values())[:2]
        kind, limit = rotary_kinds(module)[layers], rotary_limit(module, layers)
        raise ValueError(
            f"a prompt is shared by rows of {first:,} and {second:,} tokens, for which the model's rotary embeddings "
            f"({kind}) differ above {limit:,} tokens: set prefix_sharing=False, or cut rows to {limit:,} tokens"
        )
    return next(iter(tables))
