"""Tensor parallelism: each layer's matrices are split between devices, columns of the first and rows of the second.

Megatron-LM (arXiv 1909.08053, section 3) with the plans of transformers (`model.tp_plan`, styles in
`transformers/distributed/tensor_parallel.py`): queries, keys, values and the MLP's first matrices by columns, the
output projections by rows, the embedding and the head by vocabulary; norms are on every rank, and so is the
embedding's gradient (`Replicate`, seen with transformers 5.23). What a rank computes is
a narrower model, with its share of heads and of the MLP, between hidden states that are whole: `one_rank` describes
it, and the trace of it has the activations of a rank.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lowtide.engine.weights.sharded.split_layers import style_of
from lowtide.planner.sharding.layout import Layout, Parameter

SPLIT: dict[str, int] = {
    "colwise": -2,
    "colwise_rep": -2,
    "colwise_gather_output": -2,
    "packed_colwise": -2,
    "rowwise": -1,
    "rowwise_rep": -1,
    "rowwise_split_input": -1,
    "packed_rowwise": -1,
    "embedding_rowwise": 0,
    "embedding_colwise": 1,
}
"""The dimension of the weight, [..., out, in], that each style splits; all others keep it whole."""
WIDTHS = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "moe_intermediate_size")
"""Of a config: what a rank has its share of."""


def local_layout(layout: Layout, ranks: int) -> Layout:
    """What one rank has of a model.

    Raises:
        ValueError: the model has no plan.
    """
    if not layout.plan:
        raise ValueError(
            "this model has no plan for tensor parallelism (`tp_plan` is empty); shard it by data, with 'fsdp2' or "
            "'zero3'"
        )
    return layout.with_parameters(_local(p, layout.plan, ranks) for p in layout.parameters)


def one_rank(described: Any, ranks: int) -> Any:
    """A config whose model computes what one rank of a split model does.

    Args:
        described: a config of transformers.
        ranks: devices that the layers are split between.

    Raises:
        ValueError: heads or widths are no multiple of the ranks.
    """
    described = copy.deepcopy(described)
    text = described.get_text_config()
    text.head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    for name in WIDTHS:
        size = getattr(text, name, None)
        if size is None:
            continue
        if size % ranks:
            raise ValueError(f"{name} of {described.model_type} is {size}, which {ranks} ranks cannot share equally")
        setattr(text, name, size // ranks)
    return described


def _local(parameter: Parameter, plan: Mapping[str, str], ranks: int) -> Parameter:
    """The first rank's part, which is the largest."""
    style = style_of(parameter.name, plan)
    if style not in SPLIT:
        return parameter
    shape = list(parameter.shape)
    dimension = SPLIT[style]
    if len(shape) == 1:  # a bias: columns are split with their outputs, rows have whole ones
        dimension = 0 if dimension == -2 else None
    if dimension is None:
        return parameter
    shape[dimension] = -(-shape[dimension] // ranks)
    gathered = parameter.numel if style == "embedding_rowwise" else 0
    return replace(parameter, shape=tuple(shape), whole_gradient=gathered)
