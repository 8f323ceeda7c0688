"""What to change first in a run that takes too much: from the bytes at its peak to the techniques that lower them.

Nothing is known here of the techniques but what their table says: which bytes each one lowers, whether it changes a
number, whether it is on, refused or idle. What a change would do is asked of an estimate, where there is one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

from lowtide.memory.optimizers.states import IN_BFLOAT16
from lowtide.memory.table import TECHNIQUES
from lowtide.memory.technique import Site, Technique

WORTH = 0.1
"""The share of the peak from which a category is worth lowering."""
FELT = 0.03
"""The share of the peak from which a prediction counts as lower."""
MOST = 5
"""Pieces of advice."""
TILES = 8
"""Into how many tiles the heaviest micro-batch is cut for its MLPs."""


@dataclass(frozen=True)
class Advice:
    """One thing to change."""

    name: str
    settings: Mapping[str, Any]
    """Options and their values."""
    category: str
    """The bytes that it lowers."""
    saves: str
    changes: str | None = None
    """What it changes in the numbers; None where it is exact."""
    peak_bytes: int | None = None
    """Of tensors, as predicted with it; None where nobody predicted it."""

    @property
    def text(self) -> str:
        """The settings as a user writes them."""
        return ", ".join(f"{name}={value!r}" for name, value in self.settings.items())


ADAPTERS = Advice(
    "adapters",
    {"use_peft": True},
    "optimizer",
    "gradients and moments of the weights, which are frozen beneath the adapters",
    "adapters are trained in place of the weights",
)
PRECOMPUTED = Advice(
    "precomputed reference",
    {"precompute_ref_log_probs": True},
    "reference",
    "the reference: its log-probabilities are computed before training",
)


def advise(
    site: Site,
    bytes: Mapping[str, int],
    row_tokens: tuple[int, ...],
    predict: Callable[[Sequence[Mapping[str, Any]]], Sequence[int | None]] | None = None,
    each: int = 2,
) -> list[Advice]:
    """What would lower the peak: for the largest category first; of one category those that are exact first.

    Args:
        site: where the run works.
        bytes: by category, at the peak.
        row_tokens: of each row of the heaviest micro-batch.
        predict: for each of several changes of options, the first of them none, the predicted peak of tensors; None
            where it cannot be told. With it, what would lower nothing is left out, and of those that are alike what
            lowers most comes first.
        each: how many are considered of each category.
    """
    found = _considered(site, bytes, row_tokens, each)
    now, *peaks = [None] if predict is None else predict([{}, *(advice.settings for advice in found)])
    if now is None:
        return found[:MOST]
    told = [replace(advice, peak_bytes=peak) for advice, peak in zip(found, peaks, strict=True)]
    kept = [advice for advice in told if (advice.peak_bytes or 0) <= (1 - FELT) * now]
    held = {name: -size for name, size in bytes.items()}
    kept.sort(key=lambda each: (held[each.category], each.changes is not None, each.peak_bytes or now))
    return kept[:MOST]


def _considered(site: Site, bytes: Mapping[str, int], row_tokens: tuple[int, ...], most: int) -> list[Advice]:
    """So many of each category that is worth it, the largest first."""
    total = sum(bytes.values())
    found: dict[str, Advice] = {}
    for category in sorted(bytes, key=lambda name: -bytes[name]):
        if bytes[category] >= WORTH * total:
            possible = sorted(_for(category, site, row_tokens), key=lambda each: each.changes is not None)
            found |= {each.name: each for each in possible[:most] if each.name not in found}
    return list(found.values())


def with_settings(options: Any, settings: Mapping[str, Any]) -> Any:
    """A copy of a config with some options set.

    Raises:
        ValueError: they cannot work together.
    """
    changed = copy.copy(options)
    for name, value in settings.items():
        setattr(changed, name, value)
    changed.check_memory(changed.max_grad_norm)
    return changed


def _for(category: str, site: Site, row_tokens: tuple[int, ...]) -> list[Advice]:
    found = []
    for technique in TECHNIQUES.values():
        settings = _settings(technique, row_tokens)
        if category in technique.lowers and settings is not None and _possible(technique, settings, site):
            found.append(Advice(technique.name, settings, category, technique.saves, technique.changes))
    adapted = any(not p.requires_grad for p in site.model.parameters())
    if category in ("gradients", "optimizer") and not adapted:
        found.insert(0, replace(ADAPTERS, category=category))
    if category == "reference" and getattr(site.options, "precompute_ref_log_probs", None) is False:
        found.append(PRECOMPUTED)
    return found


def _settings(technique: Technique, row_tokens: tuple[int, ...]) -> dict[str, Any] | None:
    """What switches a technique on for micro-batches like this one; None where it would do nothing."""
    settings, tokens, longest = dict(technique.options), sum(row_tokens), max(row_tokens, default=0)
    if "tokens_per_microbatch" in settings:
        settings["tokens_per_microbatch"] = budget = max(tokens // 2, longest)
        return settings if 0 < budget < tokens else None
    if "mlp_tile_tokens" in settings:
        settings["mlp_tile_tokens"] = max(tokens // TILES, 1)
    return settings


def _possible(technique: Technique, settings: Mapping[str, Any], site: Site) -> bool:
    options = site.options
    if not all(hasattr(options, name) for name in settings):  # an option of other methods
        return False
    norm = getattr(options, "max_grad_norm", 0)
    if technique.on(options) or settings.get("max_grad_norm", norm) != norm:  # clipping is not ours to switch off
        return False
    if "optimizer_in_backward" in settings and (
        options.gradient_accumulation_steps > 1 or options.tokens_per_microbatch
    ):
        return False  # steps of several micro-batches keep their gradients
    if settings.get("optim") in IN_BFLOAT16 and any(not p.requires_grad for p in site.model.parameters()):
        return False
    if any(find_spec(package) is None for package in technique.needs):
        return False
    try:
        there = replace(site, options=with_settings(options, settings))
    except ValueError:
        return False
    return technique.refused(there) is None and technique.idle(there) is None
