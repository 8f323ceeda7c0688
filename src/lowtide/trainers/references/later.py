"""The reference of a run whose log-probabilities were computed before training, for rows that come afterwards.

With new adapters it is the policy without them, and costs nothing. Otherwise it was let go, so that training has its
memory, and comes back for one computation: the policy itself as long as it has the reference's weights, or the model
loaded once more by its name. A digest of the weights says whether that is the reference.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

import torch

from lowtide.data.batches.collate import REFERENCE_COLUMN
from lowtide.engine.forward import causal_model, compute_in, embedding_weight, sequence_of
from lowtide.engine.over_ranks.splitting import split_over
from lowtide.engine.over_ranks.stage import stage_of
from lowtide.engine.reference import AdapterOff, FrozenModel
from lowtide.engine.weights.loading import load_model
from lowtide.engine.weights.sharded.stages import cut_into_stages
from lowtide.methods.method import Scorer
from lowtide.run.inputs.loading import model_name
from lowtide.run.optimizers import OPTIMIZERS
from lowtide.run.streamed_weights import stream_frozen
from lowtide.trainers.references.precompute import state_digest, with_column

if TYPE_CHECKING:
    from lowtide.trainers.hooks import LowtideTrainer

WAY_OUT = (
    "pass this dataset as `eval_dataset` when the trainer is made, pass the reference's name as `ref_model`, or set "
    "precompute_ref_log_probs=False"
)


class LaterReference:
    """What is known of a reference after it was let go.

    Args:
        fingerprint: of its weights and configuration, under which log-probabilities are cached.
        digest: of its weights alone.
        computed_in: what autocast takes its products in.
    """

    def __init__(self, reference: Any, fingerprint: str, digest: str, computed_in: torch.dtype | None) -> None:
        self.fingerprint, self.digest, self.computed_in = fingerprint, digest, computed_in
        self.adapters_off = reference if isinstance(reference, AdapterOff) else None
        # What a model was loaded by is without the adapters that came with it.
        came_adapted = self.adapters_off is None and hasattr(reference.model, "disable_adapter")
        self.name = "" if came_adapted else model_name(reference.model)
        self.dtype = embedding_weight(reference.model).dtype

    def with_columns(self, trainer: LowtideTrainer, dataset: Any) -> Any:
        """Prepared rows, one dataset or several by name, with the reference's log-probabilities.

        Raises:
            ValueError: the reference is not to be had any more; says what to do.
        """
        if isinstance(dataset, Mapping):
            return {name: self.with_columns(trainer, each) for name, each in dataset.items()}
        if REFERENCE_COLUMN in (getattr(dataset, "column_names", None) or ()):
            return dataset
        owner: Any = trainer
        before, owner.reference = owner.reference, _Late(self, trainer)
        try:
            return with_column(trainer, dataset, "eval", self.fingerprint)
        finally:
            owner.reference = before

    def again(self, trainer: LowtideTrainer) -> Scorer:
        """The reference."""
        if self.adapters_off is not None:
            return self.adapters_off
        padding_free = trainer.padding_free
        if state_digest(trainer.model) == self.digest:
            return FrozenModel(trainer.model, padding_free=padding_free)
        if not self.name:
            raise ValueError(
                "precompute_ref_log_probs=True let the reference go, the policy was trained since, and the model came "
                f"without a name to load it from again: {WAY_OUT}"
            )
        try:
            loaded = load_model(self.name, trust_remote_code=trainer.args.trust_remote_code, dtype=self.dtype)
        except ValueError as error:
            raise ValueError(f"the reference is needed again, and {error}: {WAY_OUT}") from error
        if trainer.args.optim in OPTIMIZERS:
            for parameter in loaded.parameters():
                parameter.data = parameter.data.to(torch.bfloat16)
        stream_frozen(loaded.requires_grad_(False), trainer.args, what="the reference")
        reference = FrozenModel.of(loaded, padding_free=padding_free)
        compute_in(loaded, self.computed_in)
        if (stage := stage_of(causal_model(trainer.model))) is not None:
            cut_into_stages(loaded, stage.pipeline, trainer.args.device)
        if state_digest(loaded) != self.digest:
            raise ValueError(
                f"the reference is needed again, and the weights of {self.name!r} are not those that it had: {WAY_OUT}"
            )
        cast(Any, loaded).to(trainer.args.device)
        split_over(loaded, sequence_of(trainer.model))
        return reference


class _Late:
    """The reference, loaded when a batch first asks: not where all log-probabilities are cached."""

    def __init__(self, known: LaterReference, trainer: LowtideTrainer) -> None:
        self.known, self.trainer = known, trainer
        self.reference: Scorer | None = None

    def __call__(self, batch: Any) -> Any:
        if self.reference is None:
            self.reference = self.known.again(self.trainer)
        return self.reference(batch)
