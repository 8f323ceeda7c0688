"""Whether a model has positions for the rows that are planned for, before anything is traced: as a training decides.

A training refuses rows behind the end of a table of positions alone. Positions that are computed (rotary ones) go on,
past those that the model was made for, which is said.
"""

from __future__ import annotations

import torch
from transformers import PretrainedConfig

from lowtide.engine.heads.head import Head
from lowtide.engine.positions import made_for, position_table
from lowtide.planner.answers.row_lengths import RowLengths
from lowtide.planner.tracing.described_model import DescribedModel


def positions_of(described: PretrainedConfig, head: type[Head]) -> int | None:
    """The positions behind which a model has none; None where positions are computed."""
    return position_table(DescribedModel(described, torch.float32, head).on_meta(1))


def beyond(described: PretrainedConfig, longest: int) -> tuple[str, ...]:
    """What there is to say of rows with more positions than a model was made for."""
    most = made_for(described)
    if most is None or longest <= most:
        return ()
    return (
        f"rows of up to {longest:,} tokens go past the {most:,} positions that the model was made for "
        "(max_position_embeddings); a training takes them, as positions are computed here",
    )


def check_lengths(lengths: RowLengths, described: PretrainedConfig, written: int = 0) -> tuple[str, ...]:
    """What there is to say of rows by their lengths alone.

    Args:
        written: tokens of the completions that a policy writes after the rows, which are prompts.

    Raises:
        ValueError: they are longer than the model has positions.
    """
    most, longest = made_for(described), lengths.sequence + written
    if most is None or longest <= most:
        return ()
    positions = positions_of(described, lengths.method.head)
    if positions is None or longest <= positions:
        return beyond(described, longest)
    more = f", which with max_completion_length={written} are {longest:,}" if written else ""
    less = (
        f" of at most {positions - written:,} tokens" if positions > written else ", or a lower max_completion_length"
    )
    raise ValueError(
        f"lengths: the longest row has {lengths.sequence:,} tokens{more}, and the model {positions:,} positions "
        f"(max_position_embeddings): give --lengths{less}, or take a model with more"
    )
