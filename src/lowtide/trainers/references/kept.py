"""The reference of a checkpoint that no model file holds: the policy's adapters as they arrived, or the weights of a
reference that follows the policy."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from safetensors.torch import load_model as load_weights
from safetensors.torch import save_model as save_weights

from lowtide.engine.reference import ArrivedPolicy

logger = logging.getLogger(__name__)

REFERENCE = "reference.safetensors"


class KeptReference:
    """Writes and reads the reference of a trainer, where there is one to keep."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def save(self, folder: Path) -> None:
        """Writes it into a checkpoint."""
        reference, args = self.trainer.reference, self.trainer.args
        if isinstance(reference, ArrivedPolicy):
            state = reference.state()
            if args.should_save:
                save_file(state, str(folder / REFERENCE))
        elif args.follows and args.should_save:
            save_weights(reference.model, str(folder / REFERENCE))

    def load(self, folder: Path) -> None:
        """Reads it from a checkpoint.

        Raises:
            ValueError: it has moved since the run began, and the checkpoint does not have it.
        """
        reference, follows = self.trainer.reference, self.trainer.args.follows
        if not (follows or isinstance(reference, ArrivedPolicy)):
            return
        saved = folder / REFERENCE
        if not saved.exists():
            if follows:
                moved = self.trainer.args.following.option
                raise ValueError(
                    f"{folder} has no {REFERENCE}: with {moved} the reference has moved since the run began, and "
                    f"where to is not known. Resume from a checkpoint that was saved with {moved} and "
                    "save_only_model=False, or start a new run from this model"
                )
            logger.warning(
                f"{folder} has no {REFERENCE}: it was saved without optimizer states, or by an earlier version, "
                "which compared with the model without its adapters. The reference is now the policy as it was passed "
                "to this trainer"
            )
        elif isinstance(reference, ArrivedPolicy):
            reference.load_state(load_file(saved))
        else:
            load_weights(reference.model, saved)
