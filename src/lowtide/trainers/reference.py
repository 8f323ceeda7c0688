"""The trainer of a method that compares the policy with a reference."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from torch import Tensor, nn
from transformers import TrainerCallback

from lowtide.engine.forward import causal_model
from lowtide.engine.reference import ArrivedPolicy, FrozenModel
from lowtide.methods.shared.completions import completion_sums, in_completion
from lowtide.methods.shared.options import Following
from lowtide.run.edge import edge
from lowtide.run.engine import computed_in
from lowtide.step.cut import Part
from lowtide.trainers.method import MethodTrainer
from lowtide.trainers.references.asked import AskedTeacher
from lowtide.trainers.references.kept import KeptReference
from lowtide.trainers.references.later import LaterReference
from lowtide.trainers.references.precompute import Precomputed, precompute


class ReferenceTrainer(MethodTrainer):
    """A trainer of a method that compares the policy with a reference; the arguments are `MethodTrainer`'s."""

    def __init__(self, *positional: Any, **named: Any) -> None:
        self._later: LaterReference | None = None
        super().__init__(*positional, **named)
        self.kept_beside.append(KeptReference(self))
        options: Any = self.args
        self.asked = AskedTeacher.of(self)
        """The teacher, where it is not loaded."""
        if getattr(options, "precompute_ref_log_probs", False):
            with edge("precomputing the reference"):
                known = precompute(self)
                self._later = LaterReference(self.reference, *known, computed_in=computed_in(options))
            self.reference = Precomputed()
        following: Following | None = options.following
        if following is not None and options.compares:
            if isinstance(self.reference, FrozenModel):
                self.reference.check_follows(self.site.model)
            followed = cast(FrozenModel | ArrivedPolicy, self.reference)
            self.add_callback(_FollowPolicy(followed, following.share, following.steps))

    @property
    def ref_model(self) -> nn.Module | None:
        """The reference that is resident; None where it is the policy without adapters, or was computed before."""
        return self.reference.model if isinstance(self.reference, FrozenModel) else None

    @property
    def teacher_model(self) -> nn.Module | None:
        """The reference, of a method whose reference is a teacher; None where it is the student without adapters."""
        return self.ref_model if self.method.taught else None

    def _to_plan(self, given: Mapping[str, Any]) -> dict[str, Any]:
        teacher = {"teacher_model": given["teacher_model"]} if self.method.taught else {}
        return {**super()._to_plan(given), **teacher}

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
        return completion_sums(referred * counted, batch).unbind(1)

    def handed_in(self, dataset: Any) -> Any:
        """As the others', with the reference's log-probabilities where those of training were computed before it."""
        dataset = super().handed_in(dataset)
        return dataset if self._later is None else self._later.with_columns(self, dataset)

    def report_lines(self) -> list[tuple[str, str]]:
        text = self.training_run.reference_text if self.asked is None else self.asked.text
        return [("teacher" if self.method.taught else "reference", text)]


class _FollowPolicy(TrainerCallback):
    """Moves the reference towards the policy every so many steps (TR-DPO, arXiv 2404.09656)."""

    def __init__(self, reference: FrozenModel | ArrivedPolicy, share: float, steps: int) -> None:
        self.reference, self.share, self.steps = reference, share, steps

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step % self.steps == 0:
            self.reference.follow(causal_model(model), self.share)
