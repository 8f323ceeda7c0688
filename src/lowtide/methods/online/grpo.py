"""Group relative policy optimization (arXiv 2402.03300) and its relatives: completions of a prompt compared."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lowtide.methods.method import Method, RowObjective
from lowtide.methods.online.ahead import AheadOptions
from lowtide.methods.online.clipped import ComparedOptions
from lowtide.methods.online.learning import ByAdvantage
from lowtide.methods.online.policy import completion_counts, read_written
from lowtide.methods.online.rollouts import Prompts
from lowtide.methods.shared.options import VisionOptions, check_read
from lowtide.methods.shared.paper import Paper
from lowtide.objectives.outcome import Counts, Mean, Outcome
from lowtide.objectives.policy_gradient import (
    LOSSES,
    Scale,
    Written,
    clip_metrics,
    divergence,
    gamma_weights,
    near_policy,
    over_tokens,
    ratios,
    shares,
)
from lowtide.ops.float64 import to_float64
from lowtide.ops.logits.logit_rows import Want
from lowtide.option import FINITE, NOT_NEGATIVE, PATH, POSITIVE, SHARE, option
from lowtide.ranks.world import gathered

READ = (
    *("epsilon_high", "delta", "sapo_temperature_neg", "sapo_temperature_pos"),
    *("vespo_k_pos", "vespo_k_neg", "vespo_lambda_pos", "vespo_lambda_neg"),
)
"""Options that only some losses read."""


@dataclass(kw_only=True)
class GRPOOptions(AheadOptions, VisionOptions, ComparedOptions):
    """The options of group relative policy optimization, under TRL's names and with its defaults."""

    beta: float = option(0.0, "Weight of the divergence from the reference; 0 goes without one.", NOT_NEGATIVE)
    epsilon_high: float | None = option(
        None, "How far it may rise. None: `epsilon`; the bound itself in cispo.", NOT_NEGATIVE
    )
    delta: float | None = option(None, "The largest ratio of a completion that lost (two-sided clipping).", POSITIVE)
    loss_type: str = option("dapo", "What is added up, and what it is divided by.", choices=[*LOSSES, PATH])
    importance_sampling_level: str = option(
        "token", "Ratios of tokens, or of whole completions (GSPO).", choices=["token", "sequence"]
    )
    sapo_temperature_neg: float = option(1.05, "Of the gate of tokens with negative advantages.", POSITIVE)
    sapo_temperature_pos: float = option(1.0, "Of the gate of tokens with positive advantages.", POSITIVE)
    vespo_k_pos: float = option(2.0, "Power of the weight where the advantage is positive.", NOT_NEGATIVE)
    vespo_lambda_pos: float = option(3.0, "Decay of the weight where the advantage is positive.", NOT_NEGATIVE)
    vespo_k_neg: float = option(3.0, "Power of the weight where the advantage is negative.", NOT_NEGATIVE)
    vespo_lambda_neg: float = option(2.0, "Decay of the weight where the advantage is negative.", NOT_NEGATIVE)
    multi_objective_aggregation: str = option(
        "sum_then_normalize",
        "Add up the rewards of several functions before they are normalized, or after.",
        choices=["sum_then_normalize", "normalize_then_sum"],
    )
    dynamic_sampling_rounds: int = option(
        0,
        "How often the prompts of a window whose completions are all rewarded alike are replaced by others, before it "
        "is learned from (arXiv 2503.14476); those that are left then stay. 0: never.",
        NOT_NEGATIVE,
    )
    replay_buffer_size: int = option(
        0,
        "Groups with spread in their rewards that are kept, to take the places of later groups without. 0: none.",
        NOT_NEGATIVE,
    )
    top_entropy_quantile: float = option(1.0, "The share of tokens, by entropy, that is learned from.", SHARE)
    entropy_coef: float = option(0.0, "Weight of the mean entropy, which is rewarded.", FINITE)
    use_adaptive_entropy: bool = option(False, "Change that weight to keep entropy at `entropy_target`.")
    entropy_coef_min: float = option(0.0, "The smallest weight that it may take.", FINITE)
    entropy_coef_max: float = option(1.0, "The largest weight that it may take.", FINITE)
    entropy_coef_delta: float = option(0.005, "By how much it changes in a step.", NOT_NEGATIVE)
    entropy_target: float = option(0.2, "Nats a token; above it entropy is not rewarded.", NOT_NEGATIVE)
    off_policy_mask_threshold: float | None = option(
        None, "Learn nothing from lost completions whose mean log-ratio is above it, in nats a token.", POSITIVE
    )
    use_bias_correction_kl: bool = option(True, "Weigh the divergence by the ratio (arXiv 2512.02556).")
    vllm_importance_sampling_mode: str = option(
        "sequence_mask",
        "Ratios of tokens or completions, cut at the bounds or left out beyond them.",
        choices=["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"],
    )
    vllm_importance_sampling_clip_max: float | None = option(3.0, "The largest such ratio.", POSITIVE)
    vllm_importance_sampling_clip_min: float | None = option(None, "The smallest such ratio.", NOT_NEGATIVE)
    vllm_importance_sampling_cap: float | None = option(None, "The older name of the largest.", POSITIVE)
    log_completions_hub_repo: str | None = option(None, "Hub dataset that completions are pushed to.")

    @property
    def rewards_entropy(self) -> bool:
        return self.use_adaptive_entropy or self.entropy_coef != 0.0

    @property
    def advice(self) -> list[str]:
        """What is unwise in these options."""
        summed = LOSSES[self.loss_type].scale is not Scale.COMPLETION and self.loss_type not in ("luspo", "vespo")
        if self.importance_sampling_level != "sequence" or not summed:
            return super().advice
        return [
            *super().advice,
            f"importance_sampling_level='sequence' with loss_type={self.loss_type!r} weights each sequence by its "
            "completion length, since that loss sums over tokens: the paper (arXiv 2507.18071) is loss_type='grpo'",
        ]

    def check(self) -> None:
        """Refuses what cannot work, naming the option and the way out.

        Raises:
            ValueError: an option has no such value, or two options exclude each other.
        """
        self.check_scale()
        self.check_rollouts()
        if self.num_generations < 2:
            raise ValueError(
                f"num_generations={self.num_generations} leaves a completion nothing to be compared with: at least 2"
            )
        check_read(self, READ, LOSSES, [self.loss_type])
        self._check_correction()
        if self.importance_sampling_level == "sequence" and LOSSES[self.loss_type].of_tokens:
            raise ValueError(
                f"importance_sampling_level='sequence' would have no effect, since loss_type={self.loss_type!r} takes "
                "the geometric mean of a completion's ratios by itself: leave it out"
            )
        if self.sync_ref_model and not self.compares:
            raise ValueError("sync_ref_model=True moves a reference, and beta=0 has none: set beta above 0")
        if self.dynamic_sampling_rounds and self.max_staleness:
            raise ValueError(
                f"dynamic_sampling_rounds={self.dynamic_sampling_rounds} has prompts replaced by what the rewards of "
                f"all ranks say, and max_staleness={self.max_staleness} has windows rewarded beside training: set one "
                "of them to 0"
            )
        if self.entropy_coef_min > self.entropy_coef_max:
            raise ValueError(
                f"entropy_coef_min={self.entropy_coef_min} is above entropy_coef_max={self.entropy_coef_max}"
            )
        if self.log_completions_hub_repo is not None and not self.log_completions:
            raise ValueError("log_completions_hub_repo pushes what log_completions=True keeps: set that too")

    def _check_correction(self) -> None:
        if self.vllm_importance_sampling_cap is not None:
            self.vllm_importance_sampling_clip_max = self.vllm_importance_sampling_cap
            self.vllm_importance_sampling_cap = None
        low, high = self.vllm_importance_sampling_clip_min, self.vllm_importance_sampling_clip_max
        if low is not None and high is not None and low >= high:
            raise ValueError(
                f"vllm_importance_sampling_clip_min={low} must be below vllm_importance_sampling_clip_max={high}"
            )
        if low is high is None and self.vllm_importance_sampling_mode.endswith("truncate"):
            raise ValueError(
                f"vllm_importance_sampling_mode={self.vllm_importance_sampling_mode!r} cuts ratios at its bounds, and "
                "has none: set vllm_importance_sampling_clip_max or vllm_importance_sampling_clip_min"
            )
        if self.corrects and self.loss_type == "vespo" and self.vllm_importance_sampling_mode.startswith("sequence"):
            raise ValueError(
                f"vllm_importance_sampling_mode={self.vllm_importance_sampling_mode!r} does not go with "
                "loss_type='vespo', which multiplies the ratios of tokens itself: set it to 'token_truncate' or "
                "'token_mask'"
            )

    @property
    def aggregation(self) -> str:
        return self.multi_objective_aggregation


class EntropyControl:
    """The weight of entropy, which follows its target from step to step (arXiv 2505.22312)."""

    def __init__(self, options: GRPOOptions) -> None:
        self.coefficient = options.entropy_coef
        self.entropy = float("inf")
        """The mean of the last step, in nats."""
        self.total, self.tokens = 0.0, 0.0

    def applied(self, options: GRPOOptions) -> float:
        """The weight in this step."""
        return self.coefficient if not options.use_adaptive_entropy or self.entropy <= options.entropy_target else 0.0

    @torch.no_grad()
    def observe(self, written: Written) -> None:
        """Takes in the tokens of a micro-batch."""
        assert written.entropies is not None
        taking_part = written.entropies if written.kept is None else written.entropies * written.kept
        self.total += taking_part.sum().item()
        self.tokens += len(taking_part) if written.kept is None else int(written.kept.sum())

    def follow(self, options: GRPOOptions) -> None:
        """The step is taken that these tokens were of; all ranks together."""
        if not options.use_adaptive_entropy:
            return
        seen = torch.tensor([[self.total, self.tokens]], dtype=torch.float64, device=options.device)  # type: ignore
        total, tokens = gathered(seen).sum(0).tolist()
        self.total, self.tokens = 0.0, 0.0
        entropy = total / max(tokens, 1)
        sign = 1 if entropy <= options.entropy_target else -1
        moved = self.coefficient + sign * options.entropy_coef_delta
        self.coefficient = min(moved, options.entropy_coef_max) if sign > 0 else max(moved, options.entropy_coef_min)
        self.entropy = entropy


def loss(written: Written, counts: Counts, *, options: GRPOOptions, control: EntropyControl) -> Outcome:
    """The loss of the tokens, the divergence from the reference and the reward of entropy among it."""
    variant = LOSSES[options.loss_type]
    ratio = ratios(written, options.importance_sampling_level)
    losses = variant.fn(written, ratio, options)
    means: dict[str, Mean] = {}
    if options.off_policy_mask_threshold is not None:
        losses = losses * near_policy(written, options.off_policy_mask_threshold)
    if written.kept is not None:
        losses = losses * written.kept
    if written.correction is not None and not variant.corrects:
        losses = losses * written.correction
    if options.beta:
        distance = divergence(written) * (ratio if options.use_bias_correction_kl else 1.0)
        losses = losses + options.beta * distance
        means["kl"] = over_tokens(written, distance)
    total = (losses * shares(written, variant.scale, counts, options.max_completion_length)).sum()
    if options.rewards_entropy:
        assert written.entropies is not None
        means["policy_loss"] = Mean(to_float64(total.detach()) * counts["completions"], float(len(written.lengths)))
        taking_part = written.entropies if written.kept is None else written.entropies * written.kept
        total = total - control.applied(options) * taking_part.sum() / max(counts["kept"], 1)
    lows: dict[str, Tensor] = {}
    highs: dict[str, Tensor] = {}
    if variant.beyond is not None and len(written.logprobs):
        low, high = variant.beyond(written, ratio, options)
        of_clip, lows, highs = clip_metrics(written, low, high, options.importance_sampling_level)  # type: ignore
        means |= of_clip
    elif options.loss_type == "cispo":
        above = (ratio > options.upper) & (written.advantages > 0)
        means["cispo_clip_ratio"] = over_tokens(written, above.float())
    elif options.loss_type == "vespo":
        means["vespo/phi_seq_mean"] = over_tokens(written, gamma_weights(written, options), "sequence")
    return Outcome(total, means, lows, highs)


def objective(options: GRPOOptions, *, aux_coefficient: float = 0.0) -> RowObjective:
    """The loss of the options over completions."""
    control = EntropyControl(options)
    more: dict[str, Any] = {"running": control} if options.rewards_entropy else {}
    if options.use_adaptive_entropy:
        more["observe"] = control.observe
    return RowObjective(
        read=read_written,
        loss=functools.partial(loss, options=options, control=control),
        counts=completion_counts,
        want=Want(entropies=options.token_metrics or options.rewards_entropy),
        aux_coefficient=aux_coefficient,
        temperature=options.temperature,
        needs_reference=options.compares,
        mean_over="scores" if LOSSES[options.loss_type].scale in (Scale.STEP, Scale.WINDOW) else None,
        **more,
    )


PAPER = Paper(
    "shao2024deepseekmath",
    "DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models",
    ("Zhihong Shao", "Peiyi Wang", "Qihao Zhu", "Runxin Xu", "Junxiao Song", "others"),
    2024,
    "2402.03300",
)
ROWS = Prompts(ByAdvantage(), with_images=True)
METHOD = Method("grpo", "group relative policy optimization", GRPOOptions, ROWS, objective, PAPER)
