"""A small ELECTRA, trainers of it, and the plain padded computation of its loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from datasets import Dataset
from torch import nn
from transformers import ElectraConfig, ElectraForMaskedLM, ElectraForPreTraining

from lowtide import ReplacedTokenDetectionConfig, ReplacedTokenDetectionTrainer
from lowtide.data.batches.values import DRAW
from lowtide.ranks.shards import whole_of
from tests.support.models.masked_texts import COMMON, PAD, SIZES, texts, tokenizer

ROWS = 22  # no multiple of the batch
PLAIN: dict[str, Any] = {"per_device_train_batch_size": 8, "max_steps": 5}
NO_GRADIENT = "key.bias"
"""It moves all scores of a query alike: its gradient is rounding, which the optimizer makes large."""


def build(**more: Any) -> ElectraForPreTraining:
    """Seeded weights, large enough for attention to be far from uniform; a new generator's are larger yet."""
    torch.manual_seed(0)
    sizes = {**SIZES, "embedding_size": 16, "vocab_size": len(tokenizer()), "initializer_range": 0.3}
    return sharpened(ElectraForPreTraining(ElectraConfig(**{**sizes, **more})))


def sharpened(model: Any) -> Any:
    for p in model.parameters():
        if p.ndim > 1:
            nn.init.normal_(p, std=0.1)
    return model


def make(folder: Any, rows: Dataset, **options: Any) -> ReplacedTokenDetectionTrainer:
    names = ("eval_dataset", "peft_config", "model")
    arguments = {"processing_class": tokenizer()}
    arguments |= {name: options.pop(name) for name in names if name in options}
    arguments.setdefault("model", build())
    args = ReplacedTokenDetectionConfig(output_dir=str(folder), **{**COMMON, "generator_size": 0.5, **options})
    return ReplacedTokenDetectionTrainer(args=args, train_dataset=rows, **arguments)


def run(folder: Path, rows: int = ROWS, **options: Any) -> Any:
    trainer = make(folder, texts(rows), **{**PLAIN, **options})
    trainer.train()
    return trainer


def weights(trainer: Any, *, trained: bool = False) -> dict[str, torch.Tensor]:
    """By name, whole on each rank; all, or those alone that are trained."""
    named = trainer.model.named_parameters()
    wanted = {name: p for name, p in named if not name.endswith(NO_GRADIENT) and (p.requires_grad or not trained)}
    return {name: whole_of(p).detach().clone() for name, p in wanted.items()}


def assert_near(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, p in expected.items():
        assert (found[name] - p).norm() <= 1e-3 * p.norm() + 1e-4, name


def plain_loss(model: Any, batch: Any) -> torch.Tensor:
    """By transformers' own models, on padded rows with all logits."""
    spans = [(part.start, part.stop) for part in batch.segments]
    longest = max(stop - start for start, stop in spans)
    ids = torch.full((len(spans), longest), PAD)
    mask, place = torch.zeros_like(ids), torch.zeros(batch.tokens, dtype=torch.long)
    for line, (start, stop) in enumerate(spans):
        ids[line, : stop - start] = batch.token_ids[start:stop]
        mask[line, : stop - start] = 1
        place[start:stop] = line * longest + torch.arange(stop - start)
    masked = place[batch.score_index]
    logits = ElectraForMaskedLM.forward(model.generator, ids, attention_mask=mask).logits.flatten(0, 1)[masked]
    with torch.no_grad():
        sums = torch.softmax(logits, -1).double().cumsum(-1)
        drawn = torch.searchsorted(sums, batch.score_values[DRAW][:, None], right=True)[:, 0]
    text = ids.flatten().index_copy(0, masked, drawn).view_as(ids)
    labels = torch.zeros(ids.numel()).index_copy(0, masked, (drawn != batch.score_target).float()).view_as(ids)
    detected = ElectraForPreTraining.forward(model, text, attention_mask=mask, labels=labels)
    return F.cross_entropy(logits, batch.score_target) + 50 * detected.loss
