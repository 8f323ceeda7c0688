"""Which activations gradient checkpointing keeps, over transformers' own mechanism.

transformers checkpoints whole layers: `activation_checkpointing_enable` gives each of its layers a flag and a function
that runs it. `set_checkpointing` sets both anew, after it, so that a layer keeps some of what is dear to compute again,
or only some layers are checkpointed. What is kept is chosen by operation, as in selective activation checkpointing
(arXiv 2205.05198). Deviations from PyTorch's `create_selective_checkpoint_contexts`: where activations are offloaded,
what is kept goes where they go; and of what is not kept, the recomputation need not repeat the same operations, since a
compiled layer may run another of its graphs by then.

Exact: what is computed again comes out with the same bits, wherever the model's operations are deterministic. Under
autocast the policies that keep something do without its cache of cast weights. That shows in the last bits only where
one autocast spans several forwards: the gradients of a weight from each are then added in its own dtype.
"""

from __future__ import annotations

import contextlib
import functools
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lowtide.compat.torch import (
    FUSED_ATTENTION,
    VARLEN_ATTENTION,
    LayerMode,
    TreeSpec,
    seeing_changes_in_place,
    tree_flatten,
    tree_unflatten,
)
from lowtide.compat.transformers import checkpoint_by, checkpointed_layers
from lowtide.memory.activations.computed_again import are_parts
from lowtide.memory.activations.offloading import ChangedInPlace, Held, hold
from lowtide.ops.attention.attention_blocks import computing_blocks
from lowtide.ops.recurrence.recurrence import RECOMPUTED

ATTENTION = FUSED_ATTENTION | frozenset(
    {
        VARLEN_ATTENTION,
        "flash_attn::_flash_attn_forward",
        "flash_attn::_flash_attn_varlen_forward",
        "flash_attn_3::fwd",
        "flash_attn_3::_flash_attn_forward",
        "flex_attention",
    }
)
"""Fused attention, by the operation's name. What is computed in the open (soft-caps and sinks on a CPU) or inside a
compiled kernel is not among them, and is computed again."""
PRODUCTS = frozenset(
    {"lowtide::adapted_experts", *(f"aten::{name}" for name in ("mm", "addmm", "linear", "_scaled_mm", "_grouped_mm"))}
)
"""Products of activations with weights. Batched products (`bmm`) are none: open attention makes its scores by them,
[tokens, keys] for each head, and those are the last thing to keep."""

POLICIES: dict[str, frozenset[str]] = {
    "full": frozenset(),
    "attention": ATTENTION,
    "matmul": ATTENTION | PRODUCTS,
}
"""By name, the operations whose results a checkpointed layer keeps; it computes everything else again. The later ones
keep more and compute less again."""

OUTSIDE_RECURRENCES = "outside_recurrences"
"""The policy by which a layer keeps all but what recurrences compute inside: they alone are computed again."""

PERIOD = 16
"""Layers after which those that are checkpointed recur at the latest, where they are a fraction of all."""


def checkpointed_share(every: float) -> Fraction:
    """The layers that are checkpointed, as a share of all: of 1.33 three in four, of 2 one in two."""
    if every == int(every) or every > PERIOD:
        return Fraction(1, int(every))
    return Fraction(1 / every).limit_denominator(PERIOD)


def set_checkpointing(
    model: nn.Module, policy: str = "full", every: float = 1, kwargs: dict[str, Any] | None = None
) -> int:
    """Sets what each layer keeps; for a model whose checkpointing transformers has enabled.

    Args:
        model: of transformers, wrapped or not.
        policy: one of `POLICIES`, or `OUTSIDE_RECURRENCES`.
        every: one layer in so many is checkpointed, evenly spread and the first among them; the others keep all that
            they compute.
        kwargs: of `torch.utils.checkpoint.checkpoint`; by default `{"use_reentrant": False}`.

    Returns:
        How many layers are checkpointed.

    Raises:
        ValueError: an unknown policy; one that reentrant checkpointing cannot follow; a model without layers that
            transformers can checkpoint, or without recurrences where these are to be computed again.
    """
    options = {"use_reentrant": False, **(kwargs or {})}
    by_operation = POLICIES.get(policy, frozenset())
    if policy not in (*POLICIES, OUTSIDE_RECURRENCES):
        names = ", ".join((*POLICIES, OUTSIDE_RECURRENCES))
        raise ValueError(f"unknown checkpointing policy {policy!r}: choose one of {names}")
    if every < 1:
        raise ValueError(
            f"one layer in {every:g} cannot be checkpointed: give 1 for all, 1.5 for two of three, 2 for every second"
        )
    if by_operation and options["use_reentrant"]:
        raise ValueError(
            f"the checkpointing policy {policy!r} keeps some results, which reentrant checkpointing cannot: set "
            "`use_reentrant` to False in `gradient_checkpointing_kwargs`, or use the policy 'full'"
        )
    layers = checkpointed_layers(model)
    if not layers:
        kind = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
        raise ValueError(
            f"transformers knows no layers to checkpoint in this model (model type {kind}): leave checkpointing "
            "policies off"
        )
    if by_operation:
        options["context_fn"] = functools.partial(_contexts, by_operation)
    inside, share = policy == OUTSIDE_RECURRENCES, checkpointed_share(every)
    chosen = [number * share.numerator % share.denominator < share.numerator for number in range(len(layers))]
    if not _compute_recurrences_again(layers, [inside and each for each in chosen]) and inside:
        raise ValueError(
            f"the checkpointing policy {policy!r} computes recurrences again, and the layers that it is for have none "
            "that lowtide computes: take the policy 'full'"
        )
    for layer, each in zip(layers, chosen, strict=True):
        layer.gradient_checkpointing = each and not inside
        checkpoint_by(layer, functools.partial(checkpoint, **options))
        vars(layer)["checkpointing_policy"] = "full" if inside else policy
    return sum(chosen)


def _compute_recurrences_again(layers: Sequence[nn.Module], chosen: Sequence[bool]) -> int:
    """Says of each layer whether its recurrences are computed again in backward; returns how many modules do so."""
    found = 0
    for layer, again in zip(layers, chosen, strict=True):
        for module in layer.modules():
            if RECOMPUTED in vars(module):
                vars(module)[RECOMPUTED] = again
                found += again
    return found


def checkpointing_policy(layer: nn.Module) -> str:
    """What a layer that is checkpointed keeps: the name of a policy."""
    return getattr(layer, "checkpointing_policy", "full")


def _contexts(kept: frozenset[str]) -> tuple[contextlib.AbstractContextManager, contextlib.AbstractContextManager]:
    """For the forward of a layer and for its recomputation."""
    results: Results = defaultdict(deque)
    return _without_cached_casts(_Keeping(kept, results)), _Giving(kept, results)


Results = defaultdict[Any, deque[tuple[list[Any], TreeSpec]]]
"""By operation, what its calls gave, one after the other."""


class _Watching(LayerMode):
    """Sees a layer's operations, around compiled graphs too."""

    def __init__(self, kept: frozenset[str], results: Results) -> None:
        super().__init__()
        self.kept, self.results = kept, results

    def _is_kept(self, operation: Any) -> bool:
        # A backward of their own computes parts again, and asks for none of their products; what attention gives in
        # parts, the layer's recomputation asks for.
        # Of attention to the blocks of a long row all parts would be kept, in place of their sum.
        if computing_blocks():
            return False
        return operation.name() in self.kept and (operation.name() in ATTENTION or not are_parts())


class _Keeping(_Watching):
    """Forward: what the policy says is kept."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if self._is_kept(func):
            leaves, tree = tree_flatten(out)
            with seeing_changes_in_place():
                held = [hold(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]  # sees changes in place
            self.results[func].append((held, tree))
        return out


class _Giving(_Watching):
    """Recomputation: what was kept takes the place of its computation."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self._is_kept(func):
            return func(*args, **(kwargs or {}))
        if not self.results[func]:
            raise RuntimeError(
                f"a layer has kept fewer results of {func} than its recomputation asks for: it was computed in another "
                "way than in forward, or is gone through backward twice; use the checkpointing policy 'full'"
            )
        held, tree = self.results[func].popleft()
        try:
            leaves = [leaf.tensor() if isinstance(leaf, Held) else leaf for leaf in held]
        except ChangedInPlace:  # the layer wrote over it, as experts add their biases to a product
            return func(*args, **(kwargs or {}))
        return tree_unflatten(leaves, tree)


@contextlib.contextmanager
def _without_cached_casts(inner: contextlib.AbstractContextManager) -> Iterator[None]:
    """Under autocast a weight's cast is computed in forward as it will be in backward, where no cache has it yet."""
    enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        with inner:
            yield
    finally:
        torch.set_autocast_cache_enabled(enabled)
