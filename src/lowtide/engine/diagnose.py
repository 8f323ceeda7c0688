"""Where a value that is no number came from: the rows, and the first module that gave it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lowtide.engine.forward import causal_model, score
from lowtide.engine.heads import head_of
from lowtide.ragged import RaggedBatch


@torch.no_grad()
def find_nonfinite(model: nn.Module, batch: RaggedBatch, *, padding_free: bool) -> str:
    """Runs a micro-batch again, forward only, and says what it finds.

    Returns:
        one sentence: the rows whose scores are not finite, and the first module whose output is not; empty if
        all is finite.
    """
    bad_weights = [name for name, p in model.named_parameters() if not torch.isfinite(p).all()]
    first: list[str] = []

    def watch(name: str):
        def hook(_module: nn.Module, _inputs: object, output: object) -> None:
            value = output[0] if isinstance(output, tuple) and output else output
            if not first and isinstance(value, Tensor) and not torch.isfinite(value).all():
                first.append(name)

        return hook

    leaves = [(name, module) for name, module in model.named_modules() if not any(module.children())]
    handles = [module.register_forward_hook(watch(name)) for name, module in leaves]
    try:
        scored = score(model, batch, padding_free=padding_free).scored
    finally:
        for handle in handles:
            handle.remove()
    rows = sorted({int(batch.row[s]) for s in batch.score_segment[~torch.isfinite(scored)].tolist()})
    found = []
    if rows:
        numbers = head_of(causal_model(model)).numbers
        found.append(f"{numbers} of row(s) {', '.join(map(str, rows))} of the micro-batch are not finite")
    if bad_weights:
        found.append(f"the weights of {bad_weights[0]} are not finite ({len(bad_weights)} such parameters)")
    if first:
        found.append(f"the first module with a non-finite output is {first[0]}")
    return "; ".join(found)
