"""Whether the whole loss has no gradient under a run's options, which is unwise and said aloud."""

from __future__ import annotations

from typing import Any

from lowtide.methods.options import zeros


def why_nothing_is_learned(
    args: Any, *, aux_coefficient: float = 0.0, adapters: Any = None, given: bool = False
) -> str:
    """Which options leave the whole loss without gradient, or its steps without length; empty where none do.

    Args:
        args: a method's config, whose `without_gradient` says so for each term of the loss.
        aux_coefficient: weight of the load-balancing loss of a mixture of experts, a term beside.
        adapters: those that are trained, by name.
        given: whether an optimizer came, which has learning rates of its own.
    """
    everywhere = set() if given else zeros(args, "learning_rate")
    scales = [getattr(each, "lora_alpha", None) for each in (adapters or {}).values() if not _trains_more(each)]
    if scales and all(scale == 0 for scale in scales):
        everywhere.add("lora_alpha=0")
    terms = [everywhere | term for term in args.without_gradient()]
    if aux_coefficient:
        terms.append(everywhere)
    if not all(terms):
        return ""
    names = sorted(set().union(*terms))
    return (
        f"nothing is learned with {', '.join(names)}: no term of the loss moves a weight. Change "
        f"{'it' if len(names) == 1 else 'one of them'}, unless this is a test run"
    )


def _trains_more(adapter: Any) -> bool:
    """Whether weights are trained beside an adapter's matrices."""
    return bool(getattr(adapter, "modules_to_save", None)) or getattr(adapter, "bias", "none") != "none"
