"""Whether the ragged generator can serve a model: what is known of its config, then a proof on the model itself."""

from __future__ import annotations

import traceback
from typing import Any

import torch
from torch import Tensor, nn

from lowtide.compat.transformers import attention_implementation
from lowtide.engine.attention import NAME
from lowtide.engine.forward import COMPUTED_IN, causal_model, embedding_weight, inference, read_next, vocabulary
from lowtide.engine.heads import head_of
from lowtide.engine.heads.language_model import LanguageModel
from lowtide.engine.layers.mixers import mixers
from lowtide.engine.layers.rotary import kinds_by_length
from lowtide.engine.probe import TOLERANCE
from lowtide.engine.virtual_tokens import prompt_config
from lowtide.ops.attention.attention_plan import AttentionPlan
from lowtide.ragged import RaggedBatch
from lowtide.rollout.generators.cache import Group, KeyStore, Line
from lowtide.rollout.generators.plans import NextPlan, PromptPlan, RepliesPlan

ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}
"""Kinds of layers whose only reach across tokens is attention."""
ROWS = ((7, 6), (5, 6))
"""Tokens of the proof's prompts, and of what follows."""


def why_not(model: nn.Module) -> str | None:
    """What keeps the ragged generator from serving a model, as a part of a sentence ("runs padded ..."), or None.

    Runs the model on a few tokens.

    Args:
        model: prepared by `engine.forward.install`, wrapped or not.
    """
    return why_not_described(model) or _disproof(model)


def why_not_described(model: nn.Module) -> str | None:
    """The same as far as a model's config tells; nothing runs.

    Args:
        model: prepared by `engine.forward.install`, wrapped or not.
    """
    inner: Any = causal_model(model)
    config = inner.config.get_text_config()
    if head_of(inner) is not LanguageModel:
        return "has no language-modelling head"
    if attention_implementation(inner.config) != NAME:
        return f"runs padded: its attention is {attention_implementation(inner.config)!r}, not {NAME!r}"
    if prompt_config(model) is not None:
        return "has virtual tokens before each prompt, which PEFT adds to padded rows"
    if getattr(config, "is_encoder_decoder", False) or getattr(config, "add_cross_attention", False):
        return "attends to another sequence than its own"
    others = [] if mixers(inner) else sorted(set(getattr(config, "layer_types", None) or ()) - ATTENTION)
    if others:
        return f"has layers of another kind than attention: {', '.join(others)}"
    if growing := kinds_by_length(inner):  # keys held from before would be those of another table
        return f"has rotary embeddings that depend on the length of the row: {', '.join(growing)}"
    return None


def _disproof(model: nn.Module) -> str | None:
    """What is wrong with what the model says token by token, compared with what it says of whole rows."""
    weight = embedding_weight(model)
    try:
        with inference(model):
            at_once = _at_once(model)
            if at_once.isnan().any():
                return None  # the weights are not finite: writing says so
            error = (_token_by_token(model) - at_once).abs().mean().item()
    except (TypeError, ValueError, RuntimeError, AttributeError, KeyError, IndexError) as failure:
        traceback.clear_frames(failure.__traceback__)  # they hold the tensors of the forward
        return f"cannot run with keys that are held from before ({type(failure).__name__}: {failure})"
    dtype = vars(causal_model(model)).get(COMPUTED_IN) or weight.dtype
    tolerance = TOLERANCE.get(dtype, TOLERANCE[torch.bfloat16])
    if error <= tolerance:
        return None
    return f"gives other log-probs token by token than for whole rows (by {error:.2g} nats on average)"


def _rows(model: nn.Module) -> list[list[int]]:
    vocab = vocabulary(model)
    generator = torch.Generator().manual_seed(0)
    lengths = [sum(parts) for parts in ROWS]
    return [torch.randint(min(3, vocab - 1), vocab, (n,), generator=generator).tolist() for n in lengths]


def _logprobs(logits: Tensor, rows: slice) -> Tensor:
    """[vocab, rows]"""
    return torch.log_softmax(logits, -1).T


def _at_once(model: nn.Module) -> Tensor:
    rows, device = _rows(model), embedding_weight(model).device
    batch = RaggedBatch.from_segments(rows).to(device)
    ends = [part.start + prompt - 1 for part, (prompt, _) in zip(batch.segments, ROWS, strict=True)]
    counts = [after for _, after in ROWS]
    index = torch.cat([torch.arange(end, end + count + 1) for end, count in zip(ends, counts, strict=True)])
    return read_next(model, batch.token_ids, AttentionPlan.build(batch), index.to(device), _logprobs)


def _token_by_token(model: nn.Module) -> Tensor:
    """The second half of each row token by token, but for the last two tokens, which come together."""
    rows, device = _rows(model), embedding_weight(model).device
    groups = [Group(tuple(row[:prompt])) for row, (prompt, _) in zip(rows, ROWS, strict=True)]
    lines = [Line(group) for group in groups]
    for group, line in zip(groups, lines, strict=True):
        group.lines.append(line)
    store = KeyStore(max(after for _, after in ROWS), device)
    plan = PromptPlan(store, store.admit(groups))
    ends = {group: part.stop - 1 for group, part in zip(plan.groups, plan.batch.segments, strict=True)}
    index = torch.tensor([ends[line.group] for line in lines], device=device)
    found = [[column] for column in read_next(model, plan.batch.token_ids, plan, index, _logprobs).T]
    for _ in range(ROWS[0][1] - 2):
        tokens = torch.tensor([row[line.position] for row, line in zip(rows, lines, strict=True)], device=device)
        positions, held = (
            torch.tensor([getattr(line, name) for line in lines], device=device) for name in ("position", "held")
        )
        store.extend(1)
        said = read_next(model, tokens, NextPlan(store, positions, held), torch.arange(2, device=device), _logprobs)
        for place, line in enumerate(lines):
            found[place].append(said[:, place])
            line.held += 1
    tokens = torch.tensor([token for row in rows for token in row[-2:]], device=device)
    plan = RepliesPlan(store, [(line, 2) for line in lines])
    said = read_next(model, tokens, plan, torch.arange(4, device=device), _logprobs)
    return torch.stack([*found[0], said[:, 0], said[:, 1], *found[1], said[:, 2], said[:, 3]], dim=1)
