"""Direct preference optimization and its relatives (arXiv 2305.18290): pairs, a reference, one of many losses."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from lowtide.methods.method import Method, RowObjective
from lowtide.methods.shared.options import (
    CompletionOptions,
    ReferenceOptions,
    VisionOptions,
    check_read,
    flipped_labels,
    zeros,
)
from lowtide.methods.shared.paper import Paper
from lowtide.methods.shared.preference import ReadPairs, pair_metrics, pair_objective, read_pairs
from lowtide.methods.shared.rows import Pairs
from lowtide.objectives.outcome import Counts, Outcome
from lowtide.objectives.preference import DIVERGENCES, LOSSES
from lowtide.option import FINITE, NOT_NEGATIVE, PATH, POSITIVE, SHARE, option

SFT_LOSS = "sft"
"""The loss type that is the negative log-likelihood a token of the chosen completions."""


@dataclass(kw_only=True)
class DPOOptions(CompletionOptions, ReferenceOptions, VisionOptions):
    """The options of direct preference optimization, under TRL's names and with its defaults."""

    loss_type: list[str] | str = option(
        ["sigmoid"], "One loss, or several whose weighted sum is taken.", choices=[*LOSSES, SFT_LOSS, PATH]
    )
    loss_weights: list[float] | None = option(None, "Weight of each of several losses. None: 1 each.", NOT_NEGATIVE)
    beta: float = option(0.1, "How closely the policy keeps to the reference; tau of IPO.", NOT_NEGATIVE)
    label_smoothing: float = option(0.0, "Share of flipped labels (robust), or epsilon (exo_pair, aot).", SHARE)
    f_divergence_type: str = option("reverse_kl", "What keeps the policy to the reference.", choices=[*DIVERGENCES])
    f_alpha_divergence_coef: float = option(0.5, "Alpha of f_divergence_type='alpha_divergence'.", FINITE)
    ld_alpha: float | None = option(
        None, "Weight of tokens beyond the shorter completion's length (LD-DPO). None leaves them whole.", SHARE
    )
    use_weighting: bool = option(False, "Weight each pair by how likely its completions are to the policy (WPO).")
    discopop_tau: float = option(0.05, "Temperature of loss_type='discopop'.", POSITIVE)

    @property
    def loss_types(self) -> list[str]:
        return [self.loss_type] if isinstance(self.loss_type, str) else list(self.loss_type)

    @property
    def advice(self) -> list[str]:
        """What is unwise in these options, or has another name."""
        alpha = self.f_alpha_divergence_coef if self.f_divergence_type == "alpha_divergence" else None
        same = None if alpha is None else {0.0: "forward_kl", 1.0: "reverse_kl"}.get(alpha)
        said = f"f_alpha_divergence_coef={alpha} makes the divergence that of f_divergence_type={same!r}"
        return [*flipped_labels(self), *([said] if same else [])]

    def without_gradient(self) -> list[set[str]]:
        """As `TrainingConfig.without_gradient`: a term for each loss, of which `sft` does not read `beta`."""
        weights = self.loss_weights or [1.0] * len(self.loss_types)
        return [
            (set() if weight else {f"loss_weights={self.loss_weights}"})
            | (set() if name == SFT_LOSS else zeros(self, "beta"))
            for name, weight in zip(self.loss_types, weights, strict=True)
        ]

    def check(self) -> None:
        """Refuses what cannot work, naming the option and the way out.

        Raises:
            ValueError: an option has no such value, or two options exclude each other.
        """
        self.check_reference()
        self.check_turns()
        chosen = set(self.loss_types)
        if not chosen:
            raise ValueError("loss_type is empty: name at least one loss")
        if self.loss_weights is not None and len(self.loss_weights) != len(self.loss_types):
            raise ValueError(
                f"loss_weights has {len(self.loss_weights)} weights for the {len(self.loss_types)} losses of "
                f"loss_type={self.loss_types}: give one for each"
            )
        divergent = {
            name for name, loss in {**LOSSES, **LOSSES.chosen(chosen)}.items() if "f_divergence_type" in loss.reads
        }
        if self.f_divergence_type != "reverse_kl" and not chosen <= divergent | {SFT_LOSS}:
            raise ValueError(
                f"f_divergence_type={self.f_divergence_type!r} would have no effect on loss_type="
                f"{', '.join(sorted(chosen - divergent - {SFT_LOSS}))}, which does not read it: choose among "
                f"{', '.join(sorted(divergent))}, or set it back to 'reverse_kl'"
            )
        check_read(self, ("label_smoothing", "discopop_tau"), LOSSES, self.loss_types)
        dividing = sorted(name for name in chosen - {SFT_LOSS} if LOSSES[name].divides_by_beta)
        if self.beta == 0 and dividing:
            raise ValueError(f"beta=0 must be above 0 for loss_type={dividing[0]!r}, which divides by it")
        if "robust" in chosen and self.label_smoothing >= 0.5:
            raise ValueError(f"label_smoothing={self.label_smoothing} must be below 0.5 for loss_type='robust'")
        if "exo_pair" in chosen and not 0 < self.label_smoothing < 1:
            raise ValueError(
                f"label_smoothing={self.label_smoothing} must lie between 0 and 1 for loss_type='exo_pair'; its paper "
                "takes 0.001"
            )
        unweighted = {name for name in chosen if name == SFT_LOSS or LOSSES[name].whole}
        if self.use_weighting and unweighted:
            raise ValueError(
                f"use_weighting=True weights the loss of each pair, which {', '.join(sorted(unweighted))} has not: "
                "leave one out"
            )


def loss(pairs: ReadPairs, counts: Counts, *, options: DPOOptions) -> Outcome:
    """The weighted sum of the losses, each a mean over its pairs, or tokens, in the whole batch."""
    total = pairs.chosen.new_zeros(())
    weights = options.loss_weights or [1.0] * len(options.loss_types)
    for name, weight in zip(options.loss_types, weights, strict=True):
        if name == SFT_LOSS:
            total = total + weight * pairs.nll.sum() / counts["nll_tokens"]
        else:
            losses = LOSSES[name].fn(pairs, options)
            losses = losses if pairs.weights is None else losses * pairs.weights
            total = total + weight * losses.sum() / counts["pairs"]
    return Outcome(total, pair_metrics(pairs, options.beta * pairs.chosen_ratio, options.beta * pairs.rejected_ratio))


def objective(options: DPOOptions, *, aux_coefficient: float = 0.0) -> RowObjective:
    """The losses of the options over pairs."""
    return pair_objective(
        loss,
        options,
        aux_coefficient,
        read=functools.partial(read_pairs, ld_alpha=options.ld_alpha, weighted=options.use_weighting),
        collisions=options.use_weighting,
        needs_reference=True,
        whole=any(LOSSES[name].whole for name in options.loss_types if name != SFT_LOSS),
    )


PAPER = Paper(
    "rafailov2023direct",
    "Direct Preference Optimization: Your Language Model is Secretly a Reward Model",
    ("Rafael Rafailov", "Archit Sharma", "Eric Mitchell", "Stefano Ermon", "Christopher D. Manning", "Chelsea Finn"),
    2023,
    "2305.18290",
)
METHOD = Method("dpo", "direct preference optimization", DPOOptions, Pairs(), objective, PAPER, own_loss=True)
