"""The optimizer steps of a trainer, as its runner takes them."""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor

from lowtide.ragged import RaggedBatch
from lowtide.ranks.world import distributed
from lowtide.step.rehearsal import rehearse
from lowtide.step.updaters.updater import NotFiniteStep

logger = logging.getLogger(__name__)


class Steps:
    """Takes the steps of a trainer, and counts what they took.

    Attributes:
        seconds: in steps so far.
        tokens: how many this rank computed alone so far.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer, self.args = trainer, trainer.args
        self.seconds, self.tokens = 0.0, 0
        self._rehearsed = False

    def begin(self) -> None:
        """Has techniques take hold, unless they do: before the first rows are drawn, so that those that a method writes
        or scores beforehand are computed as those of later steps, and a resumed run's are."""
        trainer = self.trainer
        if trainer.runner.begun:
            return
        trainer.runner.model, trainer.runner.updater.optimizer = trainer.model_wrapped, trainer.optimizer
        trainer.runner.begin()
        self._rehearsed = False

    def gradients(self, inputs: RaggedBatch) -> Tensor:
        """Forms the gradients of one optimizer step, and returns its loss."""
        trainer, start = self.trainer, time.perf_counter()
        self.begin()
        if not self._rehearsed:
            self._rehearse()
        with self.named(), trainer.compute_loss_context_manager():
            loss = trainer.runner.gradients(inputs)
        every = self.args.torch_empty_cache_steps
        if every and trainer.state.global_step % every == 0 and torch.cuda.is_available():
            torch.cuda.empty_cache()
        self.seconds += time.perf_counter() - start
        self.tokens += self.own_tokens(inputs)
        return loss

    def _rehearse(self) -> None:
        """Runs the heaviest micro-batch, before the first step."""
        trainer, self._rehearsed = self.trainer, True
        trainer.run_log.mark.note("loading")
        if cost := trainer.own_loss.cost():
            logger.warning(f"{cost}; a loss of log-probs, from `make_objective`, needs none of them")
        if self.args.rehearsal:
            lengths = trainer.row_lengths(trained=True)
            with trainer.compute_loss_context_manager():
                rehearse(trainer.runner, lengths, trainer.rehearsed_batch, trainer.rows_together)
        trainer.run_log.begin()

    @contextlib.contextmanager
    def named(self) -> Iterator[None]:
        """An error about values that are no numbers says at which step they came up."""
        try:
            yield
        except NotFiniteStep as error:
            raise ValueError(f"step {self.trainer.state.global_step + 1}: {error}") from None

    @functools.cached_property
    def parameters_beside_embeddings(self) -> int:
        """How many weights the model has beside its embeddings; asked for once, as it names every part to tell."""
        return self.trainer.model.num_parameters(exclude_embeddings=True)

    def own_tokens(self, inputs: RaggedBatch) -> int:
        """Of a step, those that this rank computes alone."""
        return 0 if inputs.stands_in else inputs.tokens // self.args.sharding.same_rows

    def tokens_of_all(self, inputs: RaggedBatch) -> int:
        """Of a step, those of all ranks; these ask for it together."""
        seen = 0 if inputs.stands_in else inputs.tokens
        if distributed():
            counted = self.trainer.accelerator.reduce(torch.tensor(seen, device=self.args.device), "sum")
            seen = int(cast(Tensor, counted).item())
        return seen // self.args.sharding.same_rows
