"""Leaves on each rank its rows of a model's head and embedding, which then run without whole weights anywhere.

See `ops.logits.split_vocabulary`. The rows are `DTensor`s, as other shards are. `fully_shard` is told to ignore them,
and so does not gather them. What reads all logits at once, as generation does, runs within `whole_vocabulary`.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from lowtide.compat.torch import fully_sharded_modules, parameters_of_unit
from lowtide.ops.logits.split_vocabulary import SplitVocabulary
from lowtide.ranks.shards import as_part, group_of, held_whole, rows_of
from lowtide.ranks.tensor import MESH, TensorParallel


def split_of(weight: Tensor) -> SplitVocabulary | None:
    """The ranks that hold the rows of a weight; None where it is whole, as one is that was gathered for this call."""
    if not isinstance(weight, DTensor):
        return None
    return SplitVocabulary(group_of(weight), weight.shape[0], same_scores=_of_tensor_parallel(weight))


def split_vocabulary(model: Any, mesh: DeviceMesh, device: torch.device) -> set[nn.Parameter]:
    """Leaves on each rank its rows of the vocabulary, of the embedding and of a language model's head.

    A head with a LoRA adapter is split with it: the adapter's second matrix has a row for each token. What is not known
    to run on rows, and what is tied to it, stays whole: embeddings that `engine.layers.embedding` does not replace, and
    other heads. So does all of it where a rank would have no row.

    Args:
        model: of transformers, prepared by `engine.forward.install`; whole on each rank.

    Returns:
        the parameters that are split, which `fully_shard` is to ignore.
    """
    embedding, vocab = model.get_input_embeddings(), model.config.get_text_config().vocab_size
    known = [*([embedding] if "forward" in vars(embedding) else []), *_linears(model.get_output_embeddings())]
    parts = [part for part in known if part.weight.shape[0] == vocab]
    elsewhere = {id(p) for module in model.modules() if module not in parts for p in module.parameters(recurse=False)}
    first, end = rows_of(vocab, mesh.size() - 1, mesh.size())
    if first == end or any(id(p) in elsewhere for part in parts for p in part.parameters(recurse=False)):
        return set()
    made: dict[int, nn.Parameter] = {}
    for part in parts:
        for name, p in [*part.named_parameters(recurse=False)]:
            if id(p) not in made:
                made[id(p)] = _cut(p, mesh, device)
            setattr(part, name, made[id(p)])
        if isinstance(part, nn.Linear):
            part.forward = types.MethodType(_all_logits, part)
    return {*made.values()}


@contextlib.contextmanager
def whole_vocabulary(model: nn.Module) -> Iterator[None]:
    """While it lasts, each rank holds all rows of what `split_vocabulary` split, without gradients; all ranks enter
    together. Where ranks hold the same tokens, they make all logits without."""
    with held_whole(_in_rows(model)):
        yield


def splits_head(model: Any) -> bool:
    """Whether `split_vocabulary` split a model's head."""
    return not {*_linears(model.get_output_embeddings())}.isdisjoint(_in_rows(model))


def _in_rows(model: nn.Module) -> list[nn.Module]:
    """The modules of which each rank holds its rows, and that are never gathered for a forward."""
    gathered = {id(p) for module in fully_sharded_modules(model) for p in parameters_of_unit(module)}
    return [
        module
        for module in model.modules()
        if any(
            isinstance(p, DTensor) and id(p) not in gathered and not _of_tensor_parallel(p)
            for p in module.parameters(recurse=False)
        )
    ]


def _linears(head: nn.Module | None) -> Sequence[nn.Linear]:
    return [module for module in head.modules() if isinstance(module, nn.Linear)] if head is not None else []


def _cut(whole: nn.Parameter, mesh: DeviceMesh, device: torch.device) -> nn.Parameter:
    start, end = rows_of(whole.shape[0], mesh.get_local_rank(), mesh.size())
    return as_part(whole.detach()[start:end].to(device, copy=True), whole, mesh, Shard(0))


def _all_logits(self: nn.Linear, input: Tensor) -> Tensor:
    """The forward of a head's module where it is called for all logits, and not by `engine.heads`."""
    if isinstance(self.weight, DTensor) and _of_tensor_parallel(self.weight):
        return _gathered_logits(self, input)
    if isinstance(self.weight, DTensor):
        raise ValueError(
            "all logits were asked of a model whose vocabulary is split over ranks, of which none can make them: score "
            "tokens with `lowtide.engine.forward.score`, or set fsdp_split_vocabulary=False"
        )
    return type(self).forward(self, input)


def _of_tensor_parallel(weight: DTensor) -> bool:
    """Whether the ranks that hold the rows of a weight hold the same tokens."""
    return MESH in (weight.device_mesh.mesh_dim_names or ())


def _gathered_logits(head: Any, hidden: Tensor) -> Tensor:
    """All logits, from those of the ranks that hold the same tokens."""
    split = split_of(head.weight)
    assert split is not None
    ranks = TensorParallel(split.group)
    own = F.linear(ranks.shared(hidden), head.weight.to_local(), None if head.bias is None else head.bias.to_local())
    return ranks.gathered(F.pad(own, (0, split.each - split.rows)))[..., : split.vocab]
