"""Cuts a model into the stages of a pipeline: each rank keeps some neighbouring layers, the first also what comes
before the layers, the last what comes after them.

Which modules come before and after is seen in a forward of the whole model, on the host. Its hidden states at both ends
of a rank's layers are what the stage is then proved with: where layers share more than these, the model is refused.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from lowtide.compat.transformers import attention_implementation, checkpointed_layers
from lowtide.engine.attention import NAME
from lowtide.engine.forward import causal_model, inference, score
from lowtide.engine.heads.head import HIDDEN
from lowtide.engine.over_ranks.stage import STAGE, Elsewhere, NoEmbedding, Stage, stage_of
from lowtide.engine.probe import tiny_batch
from lowtide.ragged import RaggedBatch
from lowtide.ranks.pipeline import Pipeline
from lowtide.ranks.shards import equal_weights

SAME = 1e-3
"""Relative difference up to which numbers are those of the same operations."""


@dataclass
class Passage:
    """What a forward of the whole model showed."""

    before: set[nn.Module] = field(default_factory=set)
    """The modules that were called before the first layer."""
    after: set[nn.Module] = field(default_factory=set)
    """Those that were called after the last one."""
    arrived: Tensor | None = None
    """[1, tokens, hidden]: what went into the first layer of this rank."""
    left: Tensor | None = None
    """[1, tokens, hidden]: what came out of its last layer."""
    scored: Tensor | None = None
    """[scores]"""


def cut_into_stages(model: nn.Module, pipeline: Pipeline, device: torch.device) -> Stage:
    """Leaves on each rank its stage of a model, on `device`; all ranks call it together.

    Args:
        model: prepared by `engine.forward.install`, whole on each rank. Ranks whose weights differ get those of the
            first.

    Raises:
        ValueError: it cannot be cut so; says why, and what to do.
    """
    inner = causal_model(model)
    layers = _layers(inner, pipeline.size)
    equal_weights(model, device)
    start, stop = (len(layers) * rank // pipeline.size for rank in (pipeline.rank, pipeline.rank + 1))
    batch = tiny_batch(model)
    seen = _passage(model, batch, [*layers], start, stop)
    ends = seen.left if pipeline.is_first else seen.arrived
    assert ends is not None
    tied = _tied(inner) if pipeline.is_first or pipeline.is_last else None
    stage = Stage(pipeline, ends.shape[-1], ends.dtype, with_weights_on(model, "meta"), tied)
    _replace(inner, layers, range(start, stop), seen, stage)
    vars(inner)[STAGE] = stage
    error = _error(model, batch, seen, stage)
    worst = torch.tensor(error, device=device)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    if not worst.item() <= SAME:
        raise ValueError(
            f"model type {inner.config.model_type} cannot be cut into the stages of a pipeline: a stage by itself does "
            "not run as it does in the whole model, as where its layers share more than hidden states (relative "
            f"difference {worst.item():.2g}). Leave pipeline_parallel_size out"
        )
    if getattr(inner, "hf_device_map", None) is None and not getattr(inner, "is_quantized", False):
        model.to(device)
    return stage


def _layers(inner: PreTrainedModel, ranks: int) -> nn.ModuleList:
    """The list of a model's layers."""
    if attention_implementation(inner.config) != NAME:
        raise ValueError("pipeline_parallel_size requires a model that runs without padding, and this one runs padded")
    found = checkpointed_layers(inner)
    lists = [each for each in inner.modules() if isinstance(each, nn.ModuleList) and [*each] == found]
    if not found or not lists:
        raise ValueError(
            f"model type {inner.config.model_type} does not have its layers in one list, which pipeline_parallel_size "
            "cuts: leave it out"
        )
    if len(found) < ranks:
        raise ValueError(
            f"pipeline_parallel_size={ranks} is more than the {len(found)} layers of the model: take at most as many"
        )
    return lists[0]


def _passage(model: nn.Module, batch: RaggedBatch, layers: list[nn.Module], start: int, stop: int) -> Passage:
    """Runs the whole model, and looks at it."""
    seen, handles = Passage(), []
    now: set[nn.Module] | None = seen.before

    def called(module: nn.Module, args: Any) -> None:
        if now is not None:
            now.add(module)

    def begins(module: nn.Module, args: Any) -> None:
        nonlocal now
        now = None

    def ends(module: nn.Module, args: Any, output: Any) -> None:
        nonlocal now
        now = seen.after

    def arrives(module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        seen.arrived = (args[0] if args else kwargs["hidden_states"]).clone()

    def leaves(module: nn.Module, args: Any, output: Any) -> None:
        seen.left = (output if isinstance(output, Tensor) else output[0]).clone()

    handles += [module.register_forward_pre_hook(called) for _, _, module in _around(causal_model(model), layers)]
    handles.append(layers[0].register_forward_pre_hook(begins))
    handles.append(layers[-1].register_forward_hook(ends))
    handles.append(layers[start].register_forward_pre_hook(arrives, with_kwargs=True))
    handles.append(layers[stop - 1].register_forward_hook(leaves))
    try:
        seen.scored = _scored(model, batch)
    finally:
        for handle in handles:
            handle.remove()
    return seen


def _scored(model: nn.Module, batch: RaggedBatch) -> Any:
    """Of a stage without the head its hidden states, else [scores]."""
    with inference(model):
        output = score(model, batch)
    hidden = output.stats.get(HIDDEN)
    return output.scored if hidden is None else hidden


def _around(module: nn.Module, layers: list[nn.Module]) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """(module, name, child) of the largest modules that hold no layer."""
    held = set(layers)
    for name, child in module.named_children():
        if not held.isdisjoint(child.modules()):
            if child not in held:
                yield from _around(child, layers)
        else:
            yield module, name, child


def _replace(inner: PreTrainedModel, layers: nn.ModuleList, own: range, seen: Passage, stage: Stage) -> None:
    """Puts something that passes hidden states on in the place of what lies on other ranks."""
    pipeline, embedding = stage.pipeline, inner.get_input_embeddings()
    for module, name, child in [*_around(inner, [*layers])]:
        weighs = any(True for _ in child.parameters())
        if child in seen.before:
            needed = pipeline.is_first or not weighs  # rotary embeddings, say, are every rank's
        else:
            needed = pipeline.is_last or not (weighs or child in seen.after)
        if needed:
            continue
        embeds = child is embedding or isinstance(child, nn.Embedding)
        setattr(module, name, NoEmbedding(child) if embeds else Elsewhere())
    for number, layer in enumerate(layers):
        if number not in own:
            facts = {key: value for key, value in vars(layer).items() if isinstance(value, str | int | bool | None)}
            facts = {key: value for key, value in facts.items() if not key.startswith("_") and key != "training"}
            layers[number] = Elsewhere(stage if number == own.start - 1 else None, **facts)


def _error(model: nn.Module, batch: RaggedBatch, seen: Passage, stage: Stage) -> float:
    """How much a stage by itself differs from what it was in the whole model; infinite where it does not run."""
    expected = seen.scored if stage.pipeline.is_last else seen.left
    assert expected is not None
    try:
        with stage.enter(None if stage.pipeline.is_first else seen.arrived):
            return ((_scored(model, batch) - expected).norm() / expected.norm()).item()
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError):
        return float("inf")


def _tied(inner: PreTrainedModel) -> nn.Parameter | None:
    """The weight that is both embedding and head."""
    head: Any = inner.get_output_embeddings()
    weight = getattr(inner.get_input_embeddings(), "weight", None)
    return weight if isinstance(weight, nn.Parameter) and getattr(head, "weight", None) is weight else None


# -- the whole model, for checkpoints ----------------------------------------------------------------------------------


def with_weights_on(model: nn.Module, device: str) -> nn.Module:
    """A copy of a whole model with weights that nothing is in yet; on "meta" they take no memory."""
    empty = {id(p): nn.Parameter(torch.empty_like(p, device=device), p.requires_grad) for p in model.parameters()}
    return copy.deepcopy(model, empty)


def gathered_weights(model: nn.Module, wanted: Mapping[str, Tensor], keep: bool) -> dict[str, Tensor]:
    """Weights and buffers of a whole model, on the host, from all ranks of its pipeline, which call it together.

    Args:
        wanted: those of `Stage.whole`, by their names.
        keep: whether this rank wants them; nothing is there on the others.
    """
    stage = stage_of(causal_model(model))
    assert stage is not None
    pipeline = stage.pipeline
    own = {name: value for name, value in model.state_dict().items() if name in wanted}
    tables: list[Any] = [None] * pipeline.size
    dist.all_gather_object(tables, [(name, t.shape, t.dtype) for name, t in own.items()], group=pipeline.group)
    if not pipeline.is_first:
        for value in own.values():
            dist.send(value.contiguous(), group=pipeline.group, group_dst=0)
        return {}
    device = next(model.parameters()).device
    found = {name: value.cpu() for name, value in own.items()} if keep else {}
    for rank, table in enumerate(tables[1:], 1):
        for name, shape, dtype in table:
            room = torch.empty(shape, dtype=dtype, device=device)
            dist.recv(room, group=pipeline.group, group_src=rank)
            if keep:
                found[name] = room.cpu()
    names: dict[int, str] = {}  # of a tied weight, the first
    return {name: found[names.setdefault(id(value), name)] for name, value in wanted.items()} if keep else {}
