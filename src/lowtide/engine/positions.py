"""How many positions a model has, where that is bounded."""

from __future__ import annotations

import re

from torch import nn
from transformers import PretrainedConfig

from lowtide.engine.forward import causal_model, first_position

TABLE = re.compile(r"(wpe|pos\w*)(\.weight)?$")
"""The names of tables of positions."""
OFFSET = 2
"""The most entries of such a table that are no positions."""


def made_for(config: PretrainedConfig) -> int | None:
    """The positions that a model was made for; None where its config says none."""
    return getattr(config.get_text_config(), "max_position_embeddings", None)


def position_table(model: nn.Module) -> int | None:
    """The positions that a model has a table of, behind which there is none; None where positions are computed."""
    inner = causal_model(model)
    most = made_for(inner.config)
    named = (*inner.named_parameters(), *inner.named_buffers())
    tables = [table.shape[0] for name, table in named if table.ndim == 2 and TABLE.search(name)]
    if most is None or not any(most <= rows <= most + OFFSET for rows in tables):
        return None
    return most - first_position(inner)
