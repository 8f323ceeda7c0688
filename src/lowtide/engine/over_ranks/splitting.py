"""Has a model's forward split the tokens of each batch over ranks; a model that cannot be split is refused."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel

from lowtide.compat.transformers import attention_implementation
from lowtide.engine.attention import NAME
from lowtide.engine.forward import SPLIT_OVER, causal_model
from lowtide.engine.probe import probe_split
from lowtide.ranks.sequence import SequenceParallel


def split_over(model: nn.Module, sequence: SequenceParallel | None) -> str:
    """Has `engine.forward.score` split the tokens of a batch over the ranks of a group, whoever calls it.

    All ranks of the group call it together, and it is proved on a tiny batch that the numbers are those of one rank.

    Args:
        model: prepared by `engine.forward.install`, wrapped or not; copies of it keep this.
        sequence: its ranks; None ends it.

    Returns:
        For a report, a sentence on heads that do not divide by the ranks; empty where all do.

    Raises:
        ValueError: the model cannot be split; names the reason, and what to do.
    """
    inner = causal_model(model)
    vars(inner)[SPLIT_OVER] = None
    if sequence is None:
        return ""
    if reason := why_not_split(inner):
        raise ValueError(_refused(inner, reason))
    error, tolerance, shared = probe_split(model, sequence)
    if not error <= tolerance:
        reason = f"its numbers on {sequence.size} ranks differ from those on one by {error:.2g} on average"
        raise ValueError(_refused(inner, reason))
    vars(inner)[SPLIT_OVER] = sequence
    said = sorted(text for each in shared if (text := str(each)))
    return f"heads do not divide by {sequence.size} ranks: {', '.join(said)}" if said else ""


def split_traced(model: nn.Module, sequence: SequenceParallel) -> None:
    """`split_over` of a model without values, of whose numbers nothing can be proved.

    Raises:
        ValueError: the model cannot be split; names the reason, and what to do.
    """
    inner = causal_model(model)
    if reason := why_not_split(inner):
        raise ValueError(_refused(inner, reason))
    vars(inner)[SPLIT_OVER] = sequence


def why_not_split(model: PreTrainedModel) -> str | None:
    """What keeps a model's tokens from being split over ranks, as a clause; None if nothing is known to."""
    if attention_implementation(model.config) != NAME:
        return "it runs padded, and sequences are split in the attention that runs without padding"
    return None


def _refused(model: PreTrainedModel, reason: str) -> str:
    return (
        f"model type {model.config.model_type} cannot split sequences over ranks, since {reason}: train it with each "
        "sequence on one rank"
    )
