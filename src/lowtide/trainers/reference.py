"""The trainer of a method that compares the policy with a reference."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from safetensors.torch import load_file, save_file
from safetensors.torch import load_model as load_weights
from safetensors.torch import save_model as save_weights
from torch import Tensor, nn
from transformers import TrainerCallback

from lowtide.engine.forward import causal_model
from lowtide.engine.reference import ArrivedPolicy, FrozenModel
from lowtide.methods.completions import completion_segments, in_completion, segment_sums
from lowtide.run.edge import edge
from lowtide.run.engine import computed_in
from lowtide.step.cut import Part
from lowtide.trainers.method import MethodTrainer
from lowtide.trainers.references.later import LaterReference
from lowtide.trainers.references.precompute import Precomputed, precompute

logger = logging.getLogger(__name__)

REFERENCE = "reference.safetensors"
"""The file of a checkpoint for a reference that no model file holds: the policy's adapters as they arrived, or the
weights of a reference that follows the policy."""


class ReferenceTrainer(MethodTrainer):
    """A trainer of a method that compares the policy with a reference; the arguments are `MethodTrainer`'s."""

    def __init__(self, *positional: Any, **named: Any) -> None:
        self._later: LaterReference | None = None
        super().__init__(*positional, **named)
        options: Any = self.args
        if getattr(options, "precompute_ref_log_probs", False):
            with edge("precomputing the reference"):
                known = precompute(self)
                self._later = LaterReference(self.reference, *known, computed_in=computed_in(options))
            self.reference = Precomputed()
        if options.follows:
            if isinstance(self.reference, FrozenModel):
                self.reference.check_follows(self.site.model)
            followed = cast(FrozenModel | ArrivedPolicy, self.reference)
            self.add_callback(_FollowPolicy(followed, options.ref_model_mixup_alpha, options.ref_model_sync_steps))

    @property
    def ref_model(self) -> nn.Module | None:
        """The reference that is resident; None where it is the policy without adapters, or was computed before."""
        return self.reference.model if isinstance(self.reference, FrozenModel) else None

    @property
    def precompute_ref_logps(self) -> bool:
        """Whether the reference's log-probabilities are computed before training."""
        return getattr(self.args, "precompute_ref_log_probs", False)

    def compute_ref_log_probs(self, model: nn.Module, inputs: Mapping[str, Any]) -> tuple[Tensor, ...]:
        """[pairs] for the chosen and the rejected completions: the reference's log-probabilities, for a `compute_loss`
        of a subclass that asks for those of its inputs."""
        batch = self.own_loss.micro_of(inputs).batch
        referred = self.runner.models(model).referred(Part.of(batch), self.inner_objective)
        assert referred is not None
        counted = in_completion(batch, referred)
        sums = segment_sums(referred * counted, batch)
        return tuple(
            sums[segments] for segments in completion_segments(batch, len(self.method.rows.columns(self.args)))
        )

    def handed_in(self, dataset: Any) -> Any:
        """As the others', with the reference's log-probabilities where those of training were computed before it."""
        dataset = super().handed_in(dataset)
        return dataset if self._later is None else self._later.with_columns(self, dataset)

    def report_lines(self) -> list[tuple[str, str]]:
        return [("reference", self.training_run.reference_text)]

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        if isinstance(self.reference, ArrivedPolicy):
            state = self.reference.state()
            if self.args.should_save:
                save_file(state, str(Path(output_dir, REFERENCE)))
        elif cast(Any, self.args).follows and self.args.should_save:
            save_weights(cast(FrozenModel, self.reference).model, str(Path(output_dir, REFERENCE)))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        follows = cast(Any, self.args).follows
        if checkpoint is None or not (follows or isinstance(self.reference, ArrivedPolicy)):
            return
        saved = Path(checkpoint, REFERENCE)
        if not saved.exists():
            if follows:
                raise ValueError(
                    f"{checkpoint} has no {REFERENCE}: with sync_ref_model=True the reference has moved since the run "
                    "began, and where to is not known. Resume from a checkpoint that was saved with "
                    "sync_ref_model=True and save_only_model=False, or start a new run from this model"
                )
            logger.warning(
                f"{checkpoint} has no {REFERENCE}: it was saved without optimizer states, or by an earlier version, "
                "which compared with the model without its adapters. The reference is now the policy as it was passed "
                "to this trainer"
            )
        elif isinstance(self.reference, ArrivedPolicy):
            self.reference.load_state(load_file(saved))
        else:
            load_weights(cast(FrozenModel, self.reference).model, saved)


class _FollowPolicy(TrainerCallback):
    """Moves the reference towards the policy every so many steps (TR-DPO, arXiv 2404.09656)."""

    def __init__(self, reference: FrozenModel | ArrivedPolicy, share: float, steps: int) -> None:
        self.reference, self.share, self.steps = reference, share, steps

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step % self.steps == 0:
            self.reference.follow(causal_model(model), self.share)
